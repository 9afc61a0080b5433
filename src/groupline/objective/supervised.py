"""The loss of supervised fine-tuning. Legend: N answer tokens of a micro-batch."""

from __future__ import annotations

from torch import Tensor


def supervised_loss(logp: Tensor, tokens: int) -> Tensor:
    """sum of -logp / tokens: the mean negative log-likelihood of answer tokens, in nats (Ouyang et al., arXiv 2203.02155).

    logp [N], natural log, differentiable -> []. tokens: the answer tokens of the whole optimiser step, so that its
    micro-batches add up to their mean. ValueError: a total smaller than what `logp` already holds.
    """
    if tokens < max(1, len(logp)):
        raise ValueError(
            f"supervised_loss: tokens is {tokens}, but logp alone holds {len(logp)}; give the step's total"
        )
    return -logp.sum() / tokens
