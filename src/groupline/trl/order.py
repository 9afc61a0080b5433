"""Rows in, prompts out, in the order in which TRL's RepeatSampler takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from groupline.config import ConfigError
from groupline.records import Problem
from groupline.training.collect import Prompted

NOT_COLUMNS = ("prompt", "completion", "completion_ids", "answer")


def problems_of(rows: Any, label: str) -> list[Problem]:
    """Problems of a `datasets.Dataset` or a list of rows with `prompt` and any further columns.

    ConfigError naming the row: no prompt, or one that is neither text nor a conversation of texts.
    """
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or isinstance(rows, (str, Mapping)):
        raise ConfigError(
            f"{label} is a {type(rows).__name__}; give a datasets.Dataset, or a list of rows such as "
            '{"prompt": ..., "answer": ...} (of a stream: list(stream.take(n)))'
        )
    return [_problem(row, f"{label} row {number}") for number, row in enumerate(rows)]


def _problem(row: Any, where: str) -> Problem:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is a {type(row).__name__}; it must be a mapping with a prompt")
    if "prompt" not in row:
        raise ConfigError(f"{where} has no column 'prompt'; it has {', '.join(map(str, row)) or 'none'}")
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        texts = isinstance(prompt, Sequence) and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in prompt
        )
        if not texts or not prompt:
            raise ConfigError(
                f'{where}: prompt must be a text, or a conversation such as [{{"role": "user", "content": "..."}}] '
                f"with texts as contents; it is {str(prompt)[:80]!r}"
            )
        prompt = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    columns = {name: value for name, value in row.items() if name not in NOT_COLUMNS}
    # A gold answer keeps its type: a reward function sees what stands in the dataset.
    return Problem(where.replace(" row ", "-"), prompt, cast(str, row.get("answer", "")), columns)


class EpochStream:
    """Prompts in TRL's order: a seeded shuffle an epoch, in whole generation batches; an epoch's rest is left out."""

    def __init__(self, prompted: Sequence[Prompted], batch: int, together: int, shuffle: bool, seed: int) -> None:
        """batch: prompts of a generation batch. together: generation batches of a rollout, fewer at an epoch's end."""
        self.prompted, self.batch, self.together, self.shuffle = prompted, batch, together, shuffle
        self._draw = torch.Generator().manual_seed(seed)
        self._orders: list[list[int]] = []

    def take(self, step: int, count: int) -> list[Prompted]:
        batches = len(self.prompted) // self.batch
        epoch, place = divmod(step, -(-batches // self.together))
        first = place * self.together
        last = min(first + self.together, batches)
        return [self.prompted[i] for i in self._order(epoch)[first * self.batch : last * self.batch]]

    def _order(self, epoch: int) -> list[int]:
        size = len(self.prompted)
        while len(self._orders) <= epoch:
            self._orders.append(
                torch.randperm(size, generator=self._draw).tolist() if self.shuffle else list(range(size))
            )
        return self._orders[epoch]
