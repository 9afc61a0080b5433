"""Segments of a packed row (prompts, answers) in blocks of similar length, so that one product serves many of them.

Legend: N tokens in the row, h heads, d head width, S segments of a block, T its longest segment, W its longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def cut(
    segments: Sequence[range], owners: Sequence[range] | None = None, *, call: float, move: float = 0
) -> list[list[int]]:
    """Indices of `segments` (rows, in order of place, none empty) in blocks: the cut by length of least cost.

    A block of S segments padded to length T, with prompts (`owners`) of at most W tokens, costs `call`, S T (W + T)
    query-key pairs and, if its rows must be copied, `move` a row. Found by dynamic programming over the lengths that
    occur (and, among segments of one length, over their prompts' lengths), so segments alike never pad each other.
    """
    of: dict[tuple[int, int], list[int]] = {}
    for i, segment in enumerate(segments):
        of.setdefault((len(segment), len(owners[i]) if owners is not None else 0), []).append(i)
    kinds = sorted(of)
    alone: list[list[list[int]]] = []  # the blocks of one kind, if it is mixed with no other
    best = [(0.0, 0)]  # the least cost of the kinds so far, and where their last block begins
    for j, (longest, width) in enumerate(kinds):
        indices = of[kinds[j]]
        count = len(indices)
        runs, copied = _even_runs(segments, indices), call + move * count * longest
        alone.append(runs if call * len(runs) <= copied else [indices])
        cost = min(call * len(runs), copied) + count * longest * (width + longest)
        options = [(best[j][0] + cost, j)]
        for i in range(j - 1, -1, -1):
            own, length = len(of[kinds[i]]), kinds[i][0]
            count, width = count + own, max(width, kinds[i][1])
            options.append((best[i][0] + call + count * longest * (width + longest + move), i))
            if own * (longest**2 - length**2) > call:  # cheaper in a block of its own, and so is all before it
                break
        best.append(min(options))
    blocks: list[list[int]] = []
    j = len(kinds)
    while j:
        i = best[j][1]
        blocks += alone[i] if j - i == 1 else [[s for kind in kinds[i:j] for s in of[kind]]]
        j = i
    return blocks


def _even_runs(segments: Sequence[range], indices: list[int]) -> list[list[int]]:
    """Segments of one length in runs that stand at equal distances."""
    runs: list[list[int]] = []
    for i in indices:
        run = [segments[k].start for k in runs[-1]] if runs else []
        if len(run) == 1 or (run and segments[i].start - run[-1] == run[1] - run[0]):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


class Block:
    """Segments side by side: a view of the row where they stand evenly, otherwise a copy padded with zeros."""

    def __init__(self, segments: Sequence[range]) -> None:
        self.count, self.length = len(segments), max(map(len, segments))
        steps = {b.start - a.start for a, b in pairwise(segments)} or {self.length}
        self.even = len(steps) == 1 and len({len(s) for s in segments}) == 1
        if self.even:
            self._rows, self._step = slice(segments[0].start, segments[-1].stop), steps.pop()
        else:
            padded = pad(segments, self.length)
            self._take = Take(padded)
            self._cells = (padded >= 0).nonzero().squeeze(1)
            self._places = padded[self._cells]

    def read(self, x: Tensor) -> Tensor:
        """[N, h, d] -> [S, h, T, d], or [N, h] -> [S, h, T]."""
        if self.even:
            return self._view(x)
        return self._take(x).view(self.count, self.length, *x.shape[1:]).transpose(1, 2)

    def write(self, x: Tensor, block: Tensor) -> None:
        """Put a block, shaped as `read` returns it, into its rows of x; padding is dropped."""
        if self.even:
            self._view(x).copy_(block)
        else:
            x.index_copy_(0, self._places, block.transpose(1, 2).flatten(0, 1).index_select(0, self._cells))

    def _view(self, x: Tensor) -> Tensor:
        return x[self._rows].unfold(0, self.length, self._step).movedim(-1, 2)


def pad(segments: Sequence[range], length: int) -> Tensor:
    """Row indices of segments side by side at one length, flattened: [S T]; padding is -1."""
    return torch.tensor([i for s in segments for i in (*s, *[-1] * (length - len(s)))])


class Take:
    """Rows of a tensor by index; -1 gives zeros."""

    def __init__(self, index: Tensor, device: torch.device | str = "cpu") -> None:
        absent = (index < 0).nonzero().squeeze(1)
        self.index = index.clamp(min=0).to(device)
        self.absent = absent.to(device) if len(absent) else None

    def __call__(self, x: Tensor) -> Tensor:
        out = x.index_select(0, self.index)
        if self.absent is not None:
            out.index_fill_(0, self.absent, 0)
        return out
