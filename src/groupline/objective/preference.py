"""Losses of preference pairs: DPO on log-probs, and Bradley and Terry's on scores.

Legend: P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from groupline.objective.ratios import at_least_fp32


@dataclass(frozen=True)
class PreferenceFacts:
    """What a batch of pairs says, each [P] and detached, under TRL's names.

    chosen, rejected: implicit rewards beta (log pi - log pi_ref) of the answers, or a reward model's scores.
    """

    chosen: Tensor
    rejected: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def right(self) -> Tensor:
        """1.0 where the chosen answer is above the rejected one. Equal ones are not right."""
        return (self.chosen > self.rejected).float()


def dpo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, PreferenceFacts]:
    """(-log sigmoid(m) of every pair [P], facts), m = beta (log pi(c) - log pi_ref(c) - log pi(r) + log pi_ref(r)).

    All [P]: sums over an answer's tokens, in nats. Rafailov et al., arXiv 2305.18290, equation 7. With label_smoothing e
    it is -(1 - e) log sigmoid(m) - e log sigmoid(-m), which has its least value at sigmoid(m) = 1 - e: for labels that
    are wrong with probability e (conservative DPO, https://ericmitchell.ai/cdpo.pdf).
    ValueError unless beta > 0 and 0 <= label_smoothing < 0.5.
    """
    if beta <= 0:
        raise ValueError(f"dpo_loss: beta is {beta}; it must be positive")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"dpo_loss: label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    chosen = beta * (at_least_fp32(chosen_logp) - ref_chosen_logp)
    rejected = beta * (at_least_fp32(rejected_logp) - ref_rejected_logp)
    margin = chosen - rejected
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return loss, PreferenceFacts(chosen.detach(), rejected.detach())


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    center: float = 0.0,
) -> tuple[Tensor, PreferenceFacts]:
    """(-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2 of every pair [P], facts).

    chosen, rejected [P]: scores, so that sigmoid(chosen - rejected) is the probability that the chosen answer is
    preferred (Bradley and Terry 1952; Ouyang et al., arXiv 2203.02155, equation 1). margin [P]: how much better it is
    to be (Touvron et al., arXiv 2307.09288, equation 2). center: pulls scores to a mean of 0, which the first term
    leaves free (Eisenstein et al., arXiv 2312.09244). ValueError: center is negative.
    """
    if center < 0:
        raise ValueError(f"bradley_terry_loss: center is {center}; it must be 0 or more")
    chosen, rejected = at_least_fp32(chosen), at_least_fp32(rejected)
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -logsigmoid(gap)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return loss, PreferenceFacts(chosen.detach(), rejected.detach())
