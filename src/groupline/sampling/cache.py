"""Keys and values of prompts and answers in one paged pool, and attention of one decode step over them.

Legend: b live rows, B prompts among them, R most rows of one prompt, h query heads, k key/value heads, d head width,
P most prompt tokens, T most answer tokens in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from groupline.sampling.scheduler import Answer


class KeyValuePool:
    """Per layer two tensors [slots, k, d], allocated at the layer's first write and kept between calls."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key [n, k, d], value [n, k, dv] into slots [n]."""
        if layer not in self.keys:
            self.keys[layer] = key.new_zeros(self.slots, *key.shape[1:])
            self.values[layer] = value.new_zeros(self.slots, *value.shape[1:])
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


class DecodePlan:
    """Attention of one new token per live answer: to its prompt's keys, read once per group, and to its own.

    Both parts go through one softmax, so nothing is merged afterwards. Built when the set of live answers or their
    pages change; `step` moves it one token on.
    """

    def __init__(self, pool: KeyValuePool, answers: Sequence[Answer], page: int) -> None:
        self.pool = pool
        device = pool.device
        groups: dict[int, int] = {}
        members: list[list[int]] = []
        for row, answer in enumerate(answers):
            place = groups.setdefault(answer.prompt.index, len(groups))
            if place == len(members):
                members.append([])
            members[place].append(row)
        prompts = [answers[rows[0]].prompt for rows in members]
        self.prompt_slots = _slots([p.pages for p in prompts], page)[:, : max(p.length for p in prompts)].to(device)
        self.own_slots = _slots([a.pages for a in answers], page).to(device)
        self.lengths = torch.tensor([a.length for a in answers], device=device)  # [b] own tokens before this step
        self.prompt_lengths = torch.tensor([a.prompt.length for a in answers], device=device)  # [b]
        self.most = max((a.length for a in answers), default=0)
        self.even = min((a.length for a in answers), default=0) == self.most
        self.even_prompts = len({p.length for p in prompts}) == 1
        # Rows of a group side by side; None where they already are.
        most_rows = max(map(len, members))
        flat = [r for rows in members for r in rows + [rows[-1]] * (most_rows - len(rows))]
        self.shape = (len(members), most_rows)
        self.gather: Tensor | None = None
        self.scatter: Tensor | None = None
        if flat != list(range(len(answers))):
            self.gather = torch.tensor(flat, device=device)  # [B * R]
            where = np.empty(len(answers), dtype=np.int64)
            where[flat[::-1]] = np.arange(len(flat))[::-1]
            self.scatter = torch.from_numpy(where).to(device)  # [b]
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self._begin()

    @property
    def position_ids(self) -> Tensor:
        return self.prompt_lengths + self.lengths

    def step(self) -> None:
        """One token further: every row's newest token is now in the cache."""
        self.lengths += 1
        self.most += 1
        self._begin()

    def _begin(self) -> None:
        self.span = self.most + 1  # own tokens visible in this step, the newest included
        self.write_slots = self.own_slots.gather(1, self.lengths[:, None]).squeeze(1)
        self.read_slots = self.own_slots[:, : self.span].flatten()
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        pool, b = self.pool, query.shape[0]
        pool.write(layer, self.write_slots, key, value)
        kv, d = key.shape[1:]
        repeat = query.shape[1] // kv
        own_k = pool.keys[layer].index_select(0, self.read_slots).view(b, self.span, kv, d)
        own_v = pool.values[layer].index_select(0, self.read_slots).view(b, self.span, kv, -1)
        if layer not in self._prompt:
            self._prompt[layer] = (
                pool.keys[layer][self.prompt_slots].permute(0, 2, 3, 1).contiguous(),  # [B, k, d, P]
                pool.values[layer][self.prompt_slots].transpose(1, 2).contiguous(),  # [B, k, P, dv]
            )
        prompt_k, prompt_v = self._prompt[layer]
        q = (query * scaling).view(b, kv, repeat, d)
        to_prompt = self._ungroup(self._group(q) @ prompt_k)  # [b, k, repeat, P]
        to_own = q @ own_k.permute(0, 2, 3, 1)  # [b, k, repeat, T]
        scores = torch.cat([to_prompt, to_own], -1)
        mask = self._mask(window)
        if mask is not None:
            scores = scores + mask[:, None, None, :]
        p = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        width = prompt_k.shape[-1]
        out = self._ungroup(self._group(p[..., :width]) @ prompt_v) + p[..., width:] @ own_v.transpose(1, 2)
        return out.reshape(b, query.shape[1], -1)

    def _group(self, x: Tensor) -> Tensor:
        """[b, k, repeat, e] -> [B, k, R * repeat, e]: all rows of a prompt as one matrix."""
        if self.gather is not None:
            x = x.index_select(0, self.gather)
        return x.view(*self.shape, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _ungroup(self, x: Tensor) -> Tensor:
        groups, kv, _, e = x.shape
        x = x.view(groups, kv, self.shape[1], -1, e).transpose(1, 2).flatten(0, 1)
        return x if self.scatter is None else x.index_select(0, self.scatter)

    def _mask(self, window: int | None) -> Tensor | None:
        """[b, P + T] added to the scores; None where every row sees every column."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        columns = self.prompt_slots.shape[1]
        if self.even and self.even_prompts and (window is None or window >= columns + self.span):
            return None
        device = self.lengths.device
        prompt, own = torch.arange(columns, device=device), torch.arange(self.span, device=device)
        see_prompt = prompt < self.prompt_lengths[:, None]
        see_own = own <= self.lengths[:, None]
        if window is not None:
            now = self.position_ids[:, None]
            see_prompt = see_prompt & (now - prompt < window)
            see_own = see_own & (now - (self.prompt_lengths[:, None] + own) < window)
        see = torch.cat([see_prompt, see_own], -1)
        return torch.zeros(see.shape, device=device).masked_fill(~see, -torch.inf)


def _slots(pages: Sequence[Sequence[int]], size: int) -> Tensor:
    """Slots [rows, most pages * size]; rows with fewer pages repeat their last one."""
    most = max(map(len, pages))
    table = np.array([[*p, *[p[-1]] * (most - len(p))] for p in pages], dtype=np.int64)
    return torch.from_numpy((table[:, :, None] * size + np.arange(size)).reshape(len(pages), -1))


def prompt_slots(pages: Sequence[int], length: int, size: int) -> Tensor:
    """Slots [length] of a prompt's tokens."""
    return _slots([pages], size)[0, :length]
