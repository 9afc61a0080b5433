"""How much likelier the policy makes what was drawn than the weights that drew it.

Legend: N trained tokens, flat over the answers of a micro-batch; S answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # e^20 = 4.85e8: far outside any clip range, and its square still fits fp32


def at_least_fp32(x: Tensor) -> Tensor:
    """x itself in fp32 or fp64, else cast to fp32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """logp - other per token, [N] each, in fp32 or better. ValueError if the shapes differ."""
    if logp.shape != other.shape:
        raise ValueError(f"log-probs differ in shape: {tuple(logp.shape)} and {tuple(other.shape)}")
    return at_least_fp32(logp) - at_least_fp32(other)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), held at exp(+-LOG_RATIO_BOUND) outside the bound, where its gradient is 0: never inf, never inf * 0."""
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def token_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """pi(token) / pi_old(token), the ratio of PPO and GRPO (arXiv 1707.06347, 2402.03300).

    logp, old_logp [N], natural log -> [N], within e^-20..e^20 (see `bounded_exp`). Differentiable in logp.
    """
    return bounded_exp(log_ratio(logp, old_logp))


def sequence_sum(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum of x over each answer's tokens. x [N], sequence [N] in 0..S-1, in any order -> [S]."""
    return torch.zeros(num_sequences, dtype=x.dtype, device=x.device).index_add(0, sequence, x)


def sequence_ratio(logp: Tensor, old_logp: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """(pi(answer) / pi_old(answer)) ** (1 / length), GSPO's length-normalised ratio (arXiv 2507.18071, eq. 7).

    exp of the mean log-ratio over the answer's tokens, given to each of them; the gradient flows through the mean, so
    an answer must lie in one micro-batch. logp, old_logp, sequence [N] -> [N], within e^-20..e^20.
    """
    delta = log_ratio(logp, old_logp)  # [N]
    length = sequence_sum(torch.ones_like(delta), sequence, num_sequences)  # [S]
    mean = sequence_sum(delta, sequence, num_sequences) / length.clamp(min=1)  # [S]
    return bounded_exp(mean)[sequence]


def sequence_product_ratio(logp: Tensor, old_logp: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """pi(answer) / pi_old(answer), the product of the token ratios, given to each token (RLOO, arXiv 2402.14740).

    logp, old_logp, sequence [N] -> [N], within e^-20..e^20. An answer must lie in one micro-batch.
    """
    return bounded_exp(sequence_sum(log_ratio(logp, old_logp), sequence, num_sequences))[sequence]


def truncated_importance_weights(logp: Tensor, sampler_logp: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_sampler, cap) per token, for answers drawn by an engine whose log-probs differ a little.

    Truncated importance sampling (Ionides 2008). logp: the trainer's log-probs under the weights that drew the answer;
    sampler_logp: the engine's, under the same temperature and filters. [N] each -> [N], detached, multiplies the loss.
    ValueError: cap not above 0, or a log-prob that is NaN or infinite (its flat position is named).
    """
    return Correction(cap=cap).weights(logp, sampler_logp)


@dataclass(frozen=True, slots=True)
class Correction:
    """How tokens are weighed that another engine drew than the one that trains on them.

    level: each token's own ratio pi_trainer / pi_sampler, or that of its whole answer (their product). beyond: a ratio
    above the cap becomes the cap ("truncate", Ionides 2008), or 0, which leaves the token or answer out ("mask").
    rounding: a token's log-probs that differ by no more than this, in nats, count as equal.
    """

    level: Literal["token", "sequence"] = "token"
    beyond: Literal["truncate", "mask"] = "truncate"
    cap: float = 3.0
    rounding: float = 0.0

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"importance weights: cap is {self.cap}; it must be above 0")

    def weights(
        self, logp: Tensor, sampler_logp: Tensor, sequence: Tensor | None = None, num_sequences: int = 0
    ) -> Tensor:
        """[N], detached, multiplies the loss. logp, sampler_logp, sequence [N]; the last is for level "sequence", where
        an answer must lie in one micro-batch. ValueError: a log-prob that is NaN or infinite, its position named.
        """
        delta = log_ratio(logp.detach(), sampler_logp.detach())
        bad = ~torch.isfinite(delta)
        if bad.any():
            where = int(bad.flatten().nonzero()[0])
            raise ValueError(
                f"importance weights: token {where} has log-probs {logp.flatten()[where].item()} (trainer) and "
                f"{sampler_logp.flatten()[where].item()} (sampler); both must be finite"
            )
        delta = delta.masked_fill(delta.abs() <= self.rounding, 0)
        if self.level == "sequence":
            if sequence is None:
                raise ValueError('importance weights: level "sequence" needs each token\'s answer')
            delta = sequence_sum(delta, sequence, num_sequences)[sequence]
        ratio = bounded_exp(delta)
        return ratio.clamp(max=self.cap) if self.beyond == "truncate" else ratio.masked_fill(ratio > self.cap, 0)


def effective_share(weights: Tensor) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2 as a share of the N weights: 1 if all are equal. N = 0 gives 1."""
    total, squares = float(weights.double().sum()), float(weights.double().square().sum())
    return total * total / (squares * len(weights)) if squares else 1.0
