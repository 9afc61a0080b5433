"""Estimators of KL(policy || reference) from the log-probs of drawn tokens (Schulman, "Approximating KL", 2020).

With d = ref_logp - logp: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1. Over tokens drawn from the policy, k1 and k3 have
the KL as their mean; k2 is biased. As a loss it is the gradient that counts, and there (on tokens drawn from the
policy itself) k2 has the KL's gradient as its mean, k1 has 0, k3 has that of KL(reference || policy), and k3 times
the ratio has the KL's again. Legend: N tokens, S answers.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from groupline.objective.ratios import LOG_RATIO_BOUND, log_ratio, sequence_sum

KLEstimator = Literal["none", "k1", "k2", "k3"]

SERIES_BELOW = 0.1  # below it e^d - d - 1 loses its digits to cancellation, and the series to d^9 is exact to 1e-14
SERIES = tuple(1.0 / math.factorial(n) for n in range(9, 1, -1))  # 1/9! .. 1/2!


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp per token, nats. [N], [N] -> [N], fp32 or better. Unbiased; either sign."""
    return log_ratio(logp, ref_logp)


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(logp - ref_logp)^2 / 2 per token, nats. [N], [N] -> [N], fp32 or better. Biased; never negative."""
    return 0.5 * log_ratio(logp, ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """e^d - d - 1 per token with d = ref_logp - logp, nats. [N], [N] -> [N], fp32 or better.

    Unbiased and never negative. The gradient in logp is 1 - e^d. Above d = LOG_RATIO_BOUND = 20 (value 4.85e8) it goes
    on along its tangent: the value grows linearly and the gradient stays 1 - e^20, so both are finite and still pull
    the policy back. There is no lower bound: d = -100 gives 99.
    """
    d = log_ratio(ref_logp, logp)  # [N]
    bounded = d.clamp(max=LOG_RATIO_BOUND)
    small = d.clamp(-SERIES_BELOW, SERIES_BELOW)
    series = torch.full_like(small, SERIES[0])
    for coefficient in SERIES[1:]:
        series = series * small + coefficient
    near = series * small * small
    beyond = torch.relu(d - LOG_RATIO_BOUND)  # not d - bounded: its two gradients of e^20 would cancel in rounding
    far = torch.expm1(bounded) - bounded + math.expm1(LOG_RATIO_BOUND) * beyond
    return torch.where(d.abs() < SERIES_BELOW, near, far)


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: KLEstimator) -> Tensor:
    """The named estimator per token. [N], [N] -> [N], nats. ValueError for "none" or an unknown name."""
    if estimator == "k1":
        return k1(logp, ref_logp)
    if estimator == "k2":
        return k2(logp, ref_logp)
    if estimator == "k3":
        return k3(logp, ref_logp)
    raise ValueError(f'KL estimator is "{estimator}"; it must be one of k1, k2, k3')


def answer_kl(logp: Tensor, ref_logp: Tensor, sequence: Tensor, answers: int, estimator: KLEstimator = "k1") -> Tensor:
    """The estimator summed over each answer's tokens, nats. logp, ref_logp, sequence [N] -> [S], float64, detached.

    answers: S; an answer without tokens has 0.
    """
    return sequence_sum(kl_estimate(logp.detach(), ref_logp.detach(), estimator).double(), sequence, answers)


def add_kl_to_reward(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """rewards - beta * kl: the penalty as part of the reward (arXiv 2402.14740).

    rewards [S]; kl [S], of each whole answer (`answer_kl`) -> [S], detached, rewards' unit. float64 if the rewards are,
    else float32. NaN ("not scored") stays NaN. ValueError if the shapes differ.
    """
    if rewards.shape != kl.shape:
        raise ValueError(f"add_kl_to_reward: rewards have shape {tuple(rewards.shape)} and kl {tuple(kl.shape)}")
    base = rewards if rewards.dtype == torch.float64 else rewards.to(torch.float32)
    return base.detach() - beta * kl.detach().to(base.dtype)
