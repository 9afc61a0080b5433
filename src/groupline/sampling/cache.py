"""Keys and values of prompts and answers, and attention of one decode step over them.

Legend: b rows, B prompts among them, R most rows of one prompt, h query heads, k key/value heads, d key width,
e value width, P most prompt tokens, T answer tokens that the cache has room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from groupline.sampling.scheduler import Answer, Prompt


class PromptCache:
    """Keys and values of the resident prompts, token after token without padding: per layer [tokens, k, d or e]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._rows: dict[int, range] = {}  # prompt -> its tokens' places

    def begin(self, prompts: Sequence[Prompt], resident: set[int]) -> None:
        """Make `prompts` the next to be kept, in this order, and drop those that are resident no more."""
        new = {p.index for p in prompts}  # one that was given up may come back in the same step
        kept = [i for i in self._rows if i in resident and i not in new]
        self._keep: Tensor | None = None
        if len(kept) < len(self._rows):
            places = [place for i in kept for place in self._rows[i]]
            self._keep = torch.tensor(places, dtype=torch.long, device=self.device)
        lengths = [(i, len(self._rows[i])) for i in kept] + [(p.index, p.length) for p in prompts]
        self._rows, at = {}, 0
        for index, length in lengths:
            self._rows[index] = range(at, at + length)
            at += length

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The new prompts' keys and values of one layer, side by side."""
        for store, new in ((self.keys, key), (self.values, value)):
            old = store.get(layer)
            if old is not None and self._keep is not None:
                old = old.index_select(0, self._keep)
            store[layer] = new.contiguous() if old is None or not len(old) else torch.cat([old, new])

    def stacked(self, layer: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(keys [B, k, d, P], values [B, k, P, e]); a shorter prompt repeats its last token, to be masked."""
        width = max(len(self._rows[i]) for i in indices)
        table = [[*r, *[r[-1]] * (width - len(r))] for r in (self._rows[i] for i in indices)]
        places = torch.tensor(table, device=self.device)
        return (
            self.keys[layer][places].permute(0, 2, 3, 1).contiguous(),
            self.values[layer][places].transpose(1, 2).contiguous(),
        )


class DecodePlan:
    """Attention of one new token per row: to its prompt's keys, read once per group, and to its own.

    Both parts go through one softmax, so nothing is merged afterwards. A plan holds its rows' own keys and values; the
    next plan, for other rows or with more room, takes over from it what stays. `step` moves it one token on.
    """

    def __init__(
        self, prompts: PromptCache, answers: Sequence[Answer], room: int, previous: DecodePlan | None = None
    ) -> None:
        """room: tokens an answer can hold. previous: the plan of the step before, which holds what stays."""
        self.answers, self.room, self.prompts = list(answers), room, prompts
        device = prompts.device
        groups: dict[int, int] = {}
        members: list[list[int]] = []
        for row, answer in enumerate(answers):
            place = groups.setdefault(answer.prompt.index, len(groups))
            if place == len(members):
                members.append([])
            members[place].append(row)
        self.groups = list(groups)
        lengths = [answers[rows[0]].prompt.length for rows in members]
        self.width = max(lengths)
        self.even_prompts = min(lengths) == self.width
        self.lengths = torch.tensor([a.length for a in answers], device=device)  # [b] own tokens before this step
        self.prompt_lengths = torch.tensor([a.prompt.length for a in answers], device=device)  # [b]
        self.most = max(a.length for a in answers)
        self.even = min(a.length for a in answers) == self.most
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
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys [b, k, T, d], values [b, k, T, e]
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self._previous = previous
        self._source: list[int] = []  # row -> row of the previous plan whose room it takes over; new rows come last
        if previous is not None:
            self._source = _sources(self.answers, previous.answers)
            if self.groups == previous.groups:
                self._prompt = previous._prompt
        self._begin()

    @property
    def position_ids(self) -> Tensor:
        return self.prompt_lengths + self.lengths

    def step(self) -> None:
        """One token further: every row's newest token is now in the cache."""
        self.lengths += 1
        self.most += 1
        self._previous = None  # every layer has taken over what it needs
        self._begin()

    def _begin(self) -> None:
        self.span = self.most + 1  # own tokens visible in this step, the newest included
        if self.span > self.room:
            raise ValueError(f"DecodePlan: a row needs room for {self.span} tokens and has {self.room}")
        self._write: Tensor | None = None
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        b, kv = key.shape[:2]
        if layer not in self._own:
            self._own[layer] = self._take_over(layer, key, value)
        if layer not in self._prompt:
            self._prompt[layer] = self.prompts.stacked(layer, self.groups)
        own_k, own_v = self._own[layer]
        if self.even:
            own_k[:, :, self.most] = key
            own_v[:, :, self.most] = value
        else:
            at = self._places(kv)
            own_k.view(-1, own_k.shape[-1]).index_copy_(0, at, key.reshape(b * kv, -1))
            own_v.view(-1, own_v.shape[-1]).index_copy_(0, at, value.reshape(b * kv, -1))
        prompt_k, prompt_v = self._prompt[layer]
        q = (query * scaling).reshape(b, kv, -1, key.shape[-1])
        repeat = q.shape[2]
        to_prompt = self._ungroup(self._group(q) @ prompt_k)  # [b, k, repeat, P]
        seen = own_k[:, :, : self.span].flatten(0, 1)  # a view
        to_own = torch.bmm(q.flatten(0, 1), seen.transpose(1, 2)).view(b, kv, repeat, self.span)
        scores = torch.cat([to_prompt, to_own], -1)
        mask = self._mask(window)
        if mask is not None:
            scores += mask[:, None, None, :]
        p = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out = self._ungroup(self._group(p[..., : self.width]) @ prompt_v)
        own_p = p[..., self.width :].flatten(0, 1)
        out = out.reshape(b * kv, repeat, -1).baddbmm(own_p, own_v[:, :, : self.span].flatten(0, 1))
        return out.view(b, query.shape[1], -1)

    def _take_over(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the rows' own keys and values, filled with what the previous plan held of them.

        Zeros elsewhere: what is masked is multiplied by 0, and must be finite for that.
        """
        previous, b = self._previous, len(self.answers)
        same = previous is not None and self._source == list(range(b)) and len(previous.answers) == b
        if previous is not None and same and previous.room == self.room:
            return previous._own.pop(layer)
        shape = b, key.shape[1], self.room
        new = key.new_zeros(*shape, key.shape[-1]), value.new_zeros(*shape, value.shape[-1])
        if previous is not None:
            span, source = min(previous.span, self.room), torch.tensor(self._source, device=self.lengths.device)
            for mine, theirs in zip(new, previous._own.pop(layer), strict=True):
                mine[: len(source), :, :span] = theirs[:, :, :span].index_select(0, source)
        return new

    def _places(self, kv: int) -> Tensor:
        """[b * k] places of this step's tokens in a layer's own keys, flattened to rows."""
        if self._write is None:
            rows = torch.arange(len(self.answers) * kv, device=self.lengths.device)
            self._write = rows * self.room + self.lengths.repeat_interleave(kv)
        return self._write

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
        """[b, P + span] added to the scores; None where every row sees every column."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if self.even and self.even_prompts and (window is None or window >= self.width + self.span):
            return None
        device = self.lengths.device
        prompt, own = torch.arange(self.width, device=device), torch.arange(self.span, device=device)
        see_prompt = prompt < self.prompt_lengths[:, None]
        see_own = own <= self.lengths[:, None]
        if window is not None:
            now = self.position_ids[:, None]
            see_prompt = see_prompt & (now - prompt < window)
            see_own = see_own & (now - (self.prompt_lengths[:, None] + own) < window)
        see = torch.cat([see_prompt, see_own], -1)
        return torch.zeros(see.shape, device=device).masked_fill(~see, -torch.inf)


def _sources(answers: Sequence[Answer], before: Sequence[Answer]) -> list[int]:
    """For each row but new ones at the end, its row in the plan before; a new answer in an ended one's row takes that."""
    places = {id(a): i for i, a in enumerate(before)}
    sources: list[int] = []
    for row, answer in enumerate(answers):
        if id(answer) in places:
            sources.append(places[id(answer)])
        elif row < len(before) and not before[row].pages:
            sources.append(row)
        else:
            break
    if any(id(a) in places for a in answers[len(sources) :]):
        raise ValueError("DecodePlan: new answers must take ended ones' rows or come last")
    return sources


def fewer_rows(rows: int) -> int:
    """So few live rows of `rows` that leaving the ended ones out pays: an eighth less, at counts products run well on."""
    if rows <= 4:
        return rows - 1
    if rows <= 16:
        return 4 if rows <= 8 else 8
    return rows * 7 // 8 // 8 * 8


def arrange_rows(rows: Sequence[Answer], live: Sequence[Answer]) -> list[Answer]:
    """The next plan's rows: live ones where they are, new ones in place of ended ones, then at the end."""
    known = set(map(id, rows))
    new = [a for a in live if id(a) not in known]
    alive = set(map(id, live))
    if len(live) > fewer_rows(len(rows)):
        kept = list(rows)
        ended = [i for i, a in enumerate(rows) if id(a) not in alive]
        for place, answer in zip(ended, new, strict=False):
            kept[place] = answer
        return [a for a in kept if a.pages] + new[len(ended) :]
    return [a for a in rows if id(a) in alive] + new
