"""Attention over a packed row by PyTorch's public operator: on any device, in any number format, under any window.

Blocks of prompts are plainly causal; blocks of answers attend to [prompt ; own] under a mask of positions. Padded
queries are dropped on the way out, padded keys are hidden by causality or by the mask.

Legend: N tokens in the row, h query heads, k key/value heads, d head width, S segments of a block, T its longest
segment, W its longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupline.models.packed_blocks import Take, cut, pad


class JoinedAttention:
    def __init__(
        self,
        prompts: Sequence[range],
        answers: Sequence[range],
        owners: Sequence[range],
        device: torch.device,
        call: float,
    ) -> None:
        """Rows of the prompts and of the answers, owners[i] the prompt of answers[i]; `call` as in `cut`."""
        self.blocks = [_Block([prompts[i] for i in part], None, device) for part in cut(prompts, call=call)]
        for part in cut(answers, owners, call=call):
            self.blocks.append(_Block([answers[i] for i in part], [owners[i] for i in part], device))
        padded = torch.cat([b.padded for b in self.blocks])
        cells = (padded >= 0).nonzero().squeeze(1)
        places = torch.empty_like(cells)  # every row stands in one cell
        places[padded[cells]] = cells
        self._cells, self._rows = Take(padded, device), Take(places, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """query [N, h, d], key and value [N, k, d] -> [N, h, d]."""
        sizes = [b.count * b.length for b in self.blocks]
        parts = (torch.split(_move(x, self._cells, self._rows), sizes) for x in (query, key, value))
        outs = []
        for block, q, k, v in zip(self.blocks, *parts, strict=True):
            k, v = block.with_prompt(k, key), block.with_prompt(v, value)
            outs.append(_sdpa(block.side_by_side(q), k, v, block.mask(window), scaling).flatten(0, 1))
        return _move(torch.cat(outs), self._rows, self._cells)


class _Block:
    def __init__(self, segments: list[range], owners: list[range] | None, device: torch.device) -> None:
        self.count, self.length, self.width = len(segments), max(map(len, segments)), 0
        self.padded = pad(segments, self.length)
        self._at = torch.arange(self.length, device=device)
        self._prompt: Tensor | None = None
        if owners is not None:
            self.width = max(map(len, owners))
            self._prompt = pad(owners, self.width).clamp(min=0).to(device)  # padding is any row: the mask hides it
            lengths = [len(p) for p in owners]
            even = min(lengths) == self.width
            self._lengths = torch.tensor(lengths[:1] if even else lengths, device=device)[:, None, None]
            self._columns = torch.arange(self.width, device=device)
        self._masks: dict[int | None, Tensor | None] = {}

    def side_by_side(self, x: Tensor) -> Tensor:
        """[S T, k, d] -> [S, T, k, d]."""
        return x.view(self.count, -1, *x.shape[1:])

    def with_prompt(self, own: Tensor, row: Tensor) -> Tensor:
        """[S T, k, d] and [N, k, d] -> [S, W + T, k, d]. Backward: a prompt's keys receive the sum over its answers."""
        own = self.side_by_side(own)
        if self._prompt is None:
            return own
        return torch.cat([self.side_by_side(row.index_select(0, self._prompt)), own], 1)

    def mask(self, window: int | None) -> Tensor | None:
        """[S or 1, 1, T, W + T] of who sees whom; None: plain causal."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if self._prompt is None and (window is None or window >= self.length):
            return None
        gap = self._at[:, None] - self._at  # [T, T]
        own = gap >= 0 if window is None else (gap >= 0) & (gap < window)
        if self._prompt is None:
            return own
        prompt = (self._columns < self._lengths).expand(-1, self.length, -1)  # [S or 1, T, W]
        if window is not None:
            prompt = prompt & (self._lengths + self._at[:, None] - self._columns < window)
        return torch.cat([prompt, own.expand(len(prompt), -1, -1)], -1)[:, None]


class _Move(torch.autograd.Function):
    """A move that reads each row at most once: its backward is the inverse move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Take, back: Take) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _move(x: Tensor, forth: Take, back: Take) -> Tensor:
    out: Tensor = _Move.apply(x, forth, back)  # type: ignore[no-untyped-call]
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[S, Q, h, d] x [S, K, k, d] -> [S, Q, h, d]; mask None is plain causal."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2)
