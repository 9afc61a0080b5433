"""Caches that never move, for decoding in CUDA graphs, and who stands where in them.

Answers stand in a grid of groups, each of them rows of one prompt, so that the prompt's keys are read once per group
and nothing is gathered. A place of the grid without an answer, or whose answer has ended, computes finite numbers that
nobody reads. Sizes of grid and caches are rounded up to few values, as a graph is captured for each combination.

Legend: B groups, R rows a group, k key/value heads, d key width, e value width, P prompt tokens and T own tokens that
there is room for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from groupline.sampling.cache import PromptCache
from groupline.sampling.scheduler import Answer

SIZES = sorted(m << i for i in range(24) for m in (1, 3))  # 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
LEAST = 64  # tokens of a prompt or an answer that there is room for
_ROW = 64  # a row's logits cost as much as reading the keys of so many tokens: an estimate
_WASTE = 0.6  # a grid is left for a better one that costs less than this share of it


class Shape(NamedTuple):
    """Of a grid and its caches: B, R, P, T."""

    groups: int
    rows: int
    prompt: int
    room: int

    @property
    def places(self) -> int:
        return self.groups * self.rows

    @property
    def tokens(self) -> tuple[int, int]:
        """Own and prompt tokens that there is room for."""
        return self.places * self.room, self.groups * self.prompt

    @property
    def cost(self) -> int:
        """Of one step beyond reading the weights, in tokens whose keys are read."""
        return sum(self.tokens) + self.places * _ROW


def round_up(n: int, least: int = 1) -> int:
    """The smallest of SIZES that is at least `n` and `least`."""
    return SIZES[bisect_left(SIZES, max(n, least))]


def best_shape(members: Sequence[int], prompt: int, room: int, fits: Callable[[Shape], bool]) -> Shape:
    """The cheapest grid for members[p] answers to each prompt p, among those that fit if any does.

    A prompt with more answers than R takes several groups: cheaper than rows without answers in all the others.
    """
    shapes = []
    for rows in SIZES[: SIZES.index(round_up(max(members))) + 1]:
        groups = sum(-(-m // rows) for m in members)
        shapes.append(Shape(round_up(groups), rows, prompt, room))
    return min([s for s in shapes if fits(s)] or shapes, key=lambda s: s.cost)


class Grid:
    """Which answer stands at which place, and which prompt's keys each group has (-1: none)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.answers: list[Answer | None] = [None] * shape.places
        self.prompts = [-1] * shape.groups

    def place(self, live: Sequence[Answer]) -> list[int] | None:
        """Give every live answer a place, in its prompt's groups or in empty ones; others lose theirs.

        Returns the groups that got another prompt, or None if somebody finds no place.
        """
        alive = set(map(id, live))
        self.answers = [a if a is not None and id(a) in alive else None for a in self.answers]
        standing = {id(a) for a in self.answers if a is not None}
        free: dict[int, list[int]] = {}  # prompt -> places in its groups
        empty: list[int] = []  # groups
        for group in range(self.shape.groups):
            places = self._places(group)
            if all(self.answers[i] is None for i in places):
                empty.append(group)
            else:
                free.setdefault(self.prompts[group], []).extend(i for i in places if self.answers[i] is None)
        changed = []
        for answer in live:
            if id(answer) in standing:
                continue
            prompt = answer.prompt.index
            if not free.get(prompt):
                if not empty:
                    return None
                group = next((g for g in empty if self.prompts[g] == prompt), empty[0])
                empty.remove(group)
                if self.prompts[group] != prompt:
                    self.prompts[group] = prompt
                    changed.append(group)
                free[prompt] = list(self._places(group))
            self.answers[free[prompt].pop(0)] = answer
        return changed

    def _places(self, group: int) -> range:
        return range(group * self.shape.rows, (group + 1) * self.shape.rows)


class Layer:
    """Storage of one layer's keys and values: flat, and seen through whatever shape is in use.

    Everything ever written is finite, so what a step must not see needs no more than a mask.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: tuple[int, int]) -> None:
        """key [tokens, k, d], value [tokens, k, e]: of the layer's sizes and format. capacity: own and prompt tokens."""
        self.kv, self.widths = key.shape[1], (key.shape[2], value.shape[2])
        self._own, self._prompt = (
            [x.new_zeros(tokens * self.kv * x.shape[2]) for x in (key, value)] for tokens in capacity
        )

    def own(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Keys [B, k, R, T, d] and values [B, k, R, T, e] of the answers."""
        sizes = shape.groups, self.kv, shape.rows, shape.room
        d, e = self.widths
        key, value = (x[: shape.tokens[0] * self.kv * w] for x, w in zip(self._own, (d, e), strict=True))
        return key.view(*sizes, d), value.view(*sizes, e)

    def prompt(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Keys [B, k, d, P] and values [B, k, P, e] of the groups' prompts."""
        d, e = self.widths
        key, value = (x[: shape.tokens[1] * self.kv * w] for x, w in zip(self._prompt, (d, e), strict=True))
        return key.view(shape.groups, self.kv, d, shape.prompt), value.view(shape.groups, self.kv, shape.prompt, e)


class Caches:
    """The layers' storage, kept between calls, and the grid of the call that runs."""

    def __init__(self, device: torch.device, before_moving: Callable[[], None]) -> None:
        """before_moving: called before storage moves, to let go of what knows its addresses."""
        self.device, self.before_moving = device, before_moving
        self.layers: dict[int, Layer] = {}
        self.grid: Grid | None = None
        self._capacity = self._reserve = (0, 0)  # own and prompt tokens

    def begin(self, members: Sequence[int], longest: int, new: int, tokens: int) -> None:
        """A new call: at most members[p] answers at once to each prompt p, of `new` tokens; `longest` prompt tokens.

        tokens: budget. Padding may take half as much again, and more only where a burst cannot do without.
        """
        self.grid = None
        full = best_shape(members, round_up(longest, LEAST), round_up(new, LEAST), lambda _: True)
        own = max(full.places, round_up(sum(members))) * full.room
        prompt = max(full.groups, round_up(len(members))) * full.prompt
        share = min(1.0, 1.5 * tokens / (own + prompt))
        self._reserve = int(own * share), int(prompt * share)

    def clear(self) -> None:
        """Give all storage back."""
        self.before_moving()
        self.layers.clear()
        self.grid, self._capacity = None, (0, 0)

    def arrange(self, live: Sequence[Answer], room: int, cache: PromptCache) -> Grid:
        """A grid with room for all live answers, filled with what they have in the cache."""
        prompt = max(a.prompt.length for a in live)
        members = list(Counter(a.prompt.index for a in live).values())
        best = best_shape(members, round_up(prompt, LEAST), round_up(room, LEAST), self._fits)
        grid = self.grid
        if grid is not None and room <= grid.shape.room and prompt <= grid.shape.prompt:
            changed = grid.place(live) if best.cost > _WASTE * grid.shape.cost else None
            if changed is not None:
                self._load_prompts(grid, changed, cache)
                return grid
        self.grid = self._move(best, live, cache)
        self._load_prompts(self.grid, [g for g, p in enumerate(self.grid.prompts) if p >= 0], cache)
        return self.grid

    def _fits(self, shape: Shape) -> bool:
        return all(n <= max(has) for n, has in zip(shape.tokens, self._sizes(), strict=True))

    def _sizes(self) -> list[tuple[int, int]]:
        """(capacity, reserve) of own tokens and of prompt tokens."""
        return list(zip(self._capacity, self._reserve, strict=True))

    def _move(self, shape: Shape, live: Sequence[Answer], cache: PromptCache) -> Grid:
        """A grid of this shape with the answers' own keys and values. Storage grows if it must."""
        old, grid = self.grid, Grid(shape)
        grid.place(live)
        before = {id(a): i for i, a in enumerate(old.answers)} if old is not None else {}
        moves = [(before[id(a)], i) for i, a in enumerate(grid.answers) if a is not None and a.length]
        span = max(a.length for a in live)
        grow = any(n > has for n, has in zip(shape.tokens, self._capacity, strict=True))
        if grow:
            self.before_moving()
            own, prompt = (max(n, *has) for n, has in zip(shape.tokens, self._sizes(), strict=True))
            self._capacity = own, prompt
        for index in cache.keys:
            taken: list[Tensor] = []
            if old is not None and moves:
                group, row = self._coordinates([i for i, _ in moves], old.shape)
                taken = [x[group, :, row, :span] for x in self.layers[index].own(old.shape)]  # [moves, k, span, d or e]
            if grow:
                self.layers[index] = Layer(cache.keys[index], cache.values[index], self._capacity)
            if taken:
                group, row = self._coordinates([i for _, i in moves], shape)
                for target, values in zip(self.layers[index].own(shape), taken, strict=True):
                    target[group, :, row, :span] = values
        return grid

    def _coordinates(self, places: list[int], shape: Shape) -> tuple[Tensor, Tensor]:
        at = torch.tensor(places, device=self.device)
        return at // shape.rows, at % shape.rows

    def _load_prompts(self, grid: Grid, groups: list[int], cache: PromptCache) -> None:
        """Copy the prompts of these groups out of `cache`."""
        if not groups:
            return
        at = torch.tensor(groups, device=self.device)
        for index, layer in self.layers.items():
            new = cache.stacked(index, [grid.prompts[g] for g in groups])
            key, value = layer.prompt(grid.shape)
            key[at, ..., : new[0].shape[-1]] = new[0]
            value[at, :, : new[1].shape[2]] = new[1]
