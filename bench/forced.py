"""Answers of forced lengths, for groupline's engine and for transformers' `generate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor


def force_drafts(lengths: Sequence[int]) -> None:
    """groupline: answer `number` of every group ends at `lengths[number]` tokens and nowhere else.

    It is what an end that can be checked would do, without luck. Stays in force for this process.
    """
    from groupline.sampling.draft import Drafts

    record = Drafts.record
    limits = np.array(lengths)

    def forced(self: Drafts, rows: Any, *values: Any) -> Any:
        record(self, rows, *values)
        at = np.asarray(rows)
        return self.lengths[at] >= limits[at % self.n]

    Drafts.record = forced  # type: ignore[method-assign]


class ForcedEnd(LogitsProcessor):
    """transformers: row i draws no end of sequence before token `lengths[i % G]`, and nothing else as that token.

    So an answer's mask, which TRL takes from its first end of sequence, is as long as the answer. Scores are changed
    in place: no pass over the vocabulary beyond the rows that end now.
    """

    def __init__(self, lengths: Sequence[int], ends: Collection[int], prompt_tokens: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.ends = torch.tensor(sorted(ends))
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self.prompt_tokens + 1  # of the token to be drawn
        scores[:, self.ends] = -torch.inf
        ending = (self.lengths == number).nonzero().flatten()
        if len(ending):
            rows = (torch.arange(0, len(scores), len(self.lengths))[:, None] + ending).flatten()
            scores[rows] = -torch.inf
            scores[rows, self.ends[0]] = 0.0
        return scores
