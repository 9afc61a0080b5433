"""The policy loss of each token, and facts about it.

Legend: N trained tokens, flat over the answers of a micro-batch; S answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from groupline.objective.kl import KLEstimator, kl_estimate
from groupline.objective.presets import Objective
from groupline.objective.ratios import at_least_fp32, sequence_product_ratio, sequence_ratio, token_ratio


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Sums over trained tokens, scalars on the tokens' device, detached: `a + b` is the facts of both micro-batches.

    tokens: how many. ratio_sum, ratio_min, ratio_max: of the objective's ratio (of the token ratio if it has none).
    clip_low, clip_high: tokens whose gradient the clip stops (ratio below its bound and A < 0; above and A > 0); in the
    detached form, tokens whose weight was bounded. delta: further tokens whose gradient `Objective.delta` stops.
    kl_sum: nats, by the objective's estimator (k3 if it has none); None when no reference was given.
    """

    tokens: Tensor
    ratio_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    clip_low: Tensor
    clip_high: Tensor
    delta: Tensor
    kl_sum: Tensor | None

    def __add__(self, other: PolicyFacts) -> PolicyFacts:
        if (self.kl_sum is None) != (other.kl_sum is None):
            raise ValueError("PolicyFacts: one part has a KL and the other has none; give a reference for both or none")
        return PolicyFacts(
            tokens=self.tokens + other.tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            clip_low=self.clip_low + other.clip_low,
            clip_high=self.clip_high + other.clip_high,
            delta=self.delta + other.delta,
            kl_sum=None if self.kl_sum is None or other.kl_sum is None else self.kl_sum + other.kl_sum,
        )


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    objective: Objective,
    *,
    sequence: Tensor,
    num_sequences: int,
    ref_logp: Tensor | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, PolicyFacts]:
    """The loss of each token; the caller takes (weight * per_token).sum() with `token_weights`.

    logp [N]: log-probs under the weights being trained, differentiable. old_logp [N]: under those that drew the
    answers; None on-policy, where the ratio is 1 and only its gradient counts. advantages [N]: each token's own
    answer's. sequence [N]: each token's answer, 0..S-1 in any order. ref_logp [N]: the reference's, needed when beta
    is above 0 in the loss; given with beta 0 it is only measured. importance [N]: `truncated_importance_weights`, a
    constant factor on the policy term, not on the KL.
    -> per-token loss [N], fp32 or better, and facts. Formulas: see `Objective`.

    On-policy with centred advantages the sum of the loss is 0 while its gradient is not. N = 0 gives an empty loss.
    ValueError: shapes that differ, or beta > 0 in the loss without ref_logp.
    """
    for name, x in (("advantages", advantages), ("sequence", sequence), ("importance", importance)):
        if x is not None and x.shape != logp.shape:
            raise ValueError(f"policy_loss: {name} has shape {tuple(x.shape)}, logp {tuple(logp.shape)}; one per token")
    logp = at_least_fp32(logp)
    advantage = advantages.detach().to(logp.dtype)
    old = logp.detach() if old_logp is None else old_logp.detach()
    ratio = _ratio(logp, old, objective, sequence, num_sequences)  # [N]
    low, high = _bounds(objective)
    bounded = ratio.clamp(low, high)  # [N]
    if objective.form == "surrogate":
        first = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
        loss = -torch.minimum(first * advantage, bounded * advantage)
    elif objective.ratio == "none":
        loss = -advantage * logp
    else:
        loss = -bounded.detach() * advantage * logp
    if importance is not None:
        loss = loss * importance.detach().to(loss.dtype)

    estimator: KLEstimator = "k3" if objective.kl == "none" else objective.kl
    kl = None if ref_logp is None else kl_estimate(logp, ref_logp.detach(), estimator)  # [N]
    if objective.beta > 0 and objective.kl_place == "loss":
        if kl is None:
            raise ValueError(f"policy_loss: objective {objective.name} has beta {objective.beta}, so it needs ref_logp")
        loss = loss + objective.beta * (kl * ratio if objective.kl_times_ratio else kl)
    return loss, _facts(ratio.detach(), advantage, objective, None if kl is None else kl.detach())


def clipped_tokens(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, objective: Objective, *, sequence: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """(ratio [N], clipped [N]: -1 at the lower bound, 1 at the upper one, else 0) of each token; shapes as `policy_loss`.

    A token is clipped where `PolicyFacts` counts it.
    """
    logp = at_least_fp32(logp.detach())
    ratio = _ratio(logp, old_logp.detach(), objective, sequence, num_sequences)
    below, above = _stopped(ratio, advantages.detach(), objective)
    return ratio, above.to(torch.int8) - below.to(torch.int8)


def _ratio(logp: Tensor, old: Tensor, objective: Objective, sequence: Tensor, num_sequences: int) -> Tensor:
    if objective.ratio == "sequence":
        return sequence_ratio(logp, old, sequence, num_sequences)
    if objective.ratio == "sequence_product":
        return sequence_product_ratio(logp, old, sequence, num_sequences)
    return token_ratio(logp, old)


def _bounds(objective: Objective) -> tuple[float, float]:
    low, high = objective.clip_low, objective.clip_high
    return -math.inf if low is None else 1 - low, math.inf if high is None else 1 + high


def _stopped(ratio: Tensor, advantage: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Tokens [N] that the lower and the upper bound stop, as `PolicyFacts` counts them."""
    low, high = _bounds(objective)
    below, above = ratio < low, ratio > high  # [N]
    if objective.form == "surrogate":
        below, above = below & (advantage < 0), above & (advantage > 0)
    return below, above


def _facts(ratio: Tensor, advantage: Tensor, objective: Objective, kl: Tensor | None) -> PolicyFacts:
    below, above = _stopped(ratio, advantage, objective)
    cap = math.inf if objective.delta is None else objective.delta
    capped = (ratio > cap) & (advantage != 0) & ~above
    some = ratio if ratio.numel() else ratio.new_ones(1)  # no tokens: a ratio of 1
    return PolicyFacts(
        tokens=torch.tensor(ratio.numel(), device=ratio.device),
        ratio_sum=ratio.sum(),
        ratio_min=some.min(),
        ratio_max=some.max(),
        clip_low=below.sum(),
        clip_high=above.sum(),
        delta=capped.sum(),
        kl_sum=None if kl is None else kl.sum(),
    )
