"""The one place where a loss is normalised.

Every loss is (weight * per_token).sum(), with weights counted over the whole optimiser step, so splitting a step into
micro-batches or ranks cannot change its gradient. Legend: S answers.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

TokenWeight = Literal["per_sequence", "per_token", "per_budget", "sequence_sum"]


def step_totals(lengths: Tensor, rule: TokenWeight, *, count_masked: bool | None = None) -> tuple[int, int]:
    """How many answers and trained tokens the rule divides by: add these over ranks and micro-batches.

    lengths [S]: trained tokens of each answer; 0 for a masked one. -> (answers, tokens).
    count_masked: whether masked answers count; None is the rule's own choice, see `token_weights`.
    """
    if rule not in get_args(TokenWeight):
        raise ValueError(f'token weight rule is "{rule}"; it must be one of {", ".join(get_args(TokenWeight))}')
    if lengths.dim() != 1 or (lengths < 0).any():
        raise ValueError("token weights: lengths must be a flat tensor of counts, 0 or more")
    if count_masked is None:
        count_masked = rule == "per_budget"
    return len(lengths) if count_masked else int((lengths > 0).sum()), int(lengths.sum())


def token_weights(
    lengths: Tensor,
    rule: TokenWeight,
    *,
    budget: int | None = None,
    sequences: int | None = None,
    tokens: int | None = None,
    count_masked: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token of each answer.

    lengths [S]: trained tokens of each answer; 0 for one masked out. -> [S], per token.
    With `sequences` and `tokens` the totals of the whole optimiser step (default: those of `lengths`):

    - "per_sequence": 1 / (sequences * length), a mean over answers of token means (GRPO, arXiv 2402.03300).
    - "per_token": 1 / tokens, a mean over all tokens (DAPO, arXiv 2503.14476).
    - "per_budget": 1 / (sequences * budget), budget being the most tokens an answer may have, a constant that does
      not depend on what was drawn (Dr. GRPO, arXiv 2503.20783).
    - "sequence_sum": 1 / sequences, a mean over answers of token sums (REINFORCE over whole answers).

    A masked answer (length 0) has weight 0. It leaves the denominator too, except under "per_budget", whose
    denominator is a constant of the step; `count_masked=True` keeps it in (as TRL's "grpo" loss does).
    An answer left out only because its gradient is zero is not masked: it keeps its length here, or the weights of the
    others would grow. When every answer is masked, all weights are 0.

    ValueError: an unknown rule, a missing budget, or a total smaller than what `lengths` already holds.
    """
    own_sequences, own_tokens = step_totals(lengths, rule, count_masked=count_masked)
    for name, total, own in (("sequences", sequences, own_sequences), ("tokens", tokens, own_tokens)):
        if total is not None and total < own:
            raise ValueError(f"token_weights: {name} is {total}, but lengths alone hold {own}; give the step's total")
    answers = own_sequences if sequences is None else sequences
    length = lengths.to(torch.float64)  # [S]
    if rule == "per_sequence":
        denominator = answers * length
    elif rule == "per_token":
        denominator = torch.full_like(length, own_tokens if tokens is None else tokens)
    elif rule == "sequence_sum":
        denominator = torch.full_like(length, answers)
    else:
        if budget is None or budget < 1:
            raise ValueError(f'token_weights: rule "per_budget" needs a budget of at least 1 token; it is {budget}')
        denominator = torch.full_like(length, answers * budget)
    return torch.where(length > 0, 1.0 / denominator.clamp(min=1.0), 0.0).to(dtype)  # [S]
