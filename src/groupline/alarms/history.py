"""A run's figures so far, what an alarm is, and what a rule is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["watch", "broken"]
Row = Mapping[str, Any]
Finding = tuple[Level, str]  # how bad, and the evidence


@dataclass(frozen=True, slots=True)
class Alarm:
    """One warning. step: the step after which it was raised."""

    name: str
    level: Level
    step: int
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level} at step {self.step}: {self.name}: {self.evidence}. {self.advice}"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("step", "level", "name", "evidence", "advice")}


@dataclass(slots=True)
class History:
    """A run so far. cap: most tokens of an answer. weights: of the reward functions, by name."""

    cap: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, share of answers right)

    def values(self, key: str, rows: Sequence[Row] | None = None) -> list[float]:
        """The finite values of a metric, in order."""
        found = (row.get(key) for row in (self.rows if rows is None else rows))
        return [float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)]

    def last(self, key: str, count: int) -> float | None:
        """Mean over the last `count` steps; None where fewer of them have the metric."""
        values = self.values(key, self.rows[-count:])
        return statistics.fmean(values) if len(values) == count else None

    def first(self, key: str, count: int) -> float | None:
        """Mean over the first `count` steps, likewise."""
        values = self.values(key, self.rows[:count])
        return statistics.fmean(values) if len(values) == count else None

    def rise(self, key: str, count: int = 10) -> float | None:
        """Last mean less first mean; None before the two no longer overlap."""
        if len(self.rows) < 2 * count:
            return None
        last, first = self.last(key, count), self.first(key, count)
        return None if last is None or first is None else last - first

    def parts(self) -> list[str]:
        """Names of the reward functions."""
        keys = self.rows[-1] if self.rows else ()
        return [k.split("/")[1] for k in keys if k.startswith("rewards/") and k.endswith("/mean")]


@dataclass(frozen=True, slots=True)
class Rule:
    """check: called once there are `warm_up` rows; None where nothing is wrong."""

    name: str
    warm_up: int
    check: Callable[[History], Finding | None]
    advice: str
