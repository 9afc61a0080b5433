"""What reward functions log beside their rewards: `log_extra(column, values)` and `log_metric(name, value)`."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupline.rewards.contract import RewardError


class Recorder:
    """The two callables that one call of a function receives, and what it gave them.

    As in TRL, several calls of `log_extra` under one column add up to it, and those of `log_metric` under one name are
    averaged.
    """

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[Any]] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Values of a column of the answers file, one per completion."""
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """A number about the whole call."""
        self.metrics.setdefault(name, []).append(value)


class Log:
    """What all functions logged about a batch."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._columns: dict[str, tuple[str, list[Any]]] = {}
        self._metrics: dict[str, list[float]] = {}

    def add(self, name: str, recorder: Recorder, first: int, rows: int) -> None:
        """Take over what one call of function `name` logged about `rows` rows from `first` on.

        Raises:
            RewardError: a column without one value per row, or a metric that is not a number.
        """
        for column, values in recorder.extras.items():
            if len(values) != rows:
                raise RewardError(
                    f"reward function {name!r} logged {len(values)} values of {column!r} with log_extra; it must be one "
                    f"for each of its {rows} completions"
                )
            owner, _ = self._columns.setdefault(column, (name, [None] * self._rows))
            if owner != name:  # another function's column of the same name stays whole
                column = f"{name}/{column}"
                self._columns.setdefault(column, (name, [None] * self._rows))
            self._columns[column][1][first : first + rows] = map(plain, values)
        for metric, values in recorder.metrics.items():
            for value in values:
                self._metrics.setdefault(metric, []).append(_metric(name, metric, value))

    def extras(self) -> tuple[Mapping[str, Any], ...]:
        """A mapping from column to value for each row."""
        return tuple({c: values[row] for c, (_, values) in self._columns.items()} for row in range(self._rows))

    def metrics(self) -> dict[str, float]:
        """The mean of each metric."""
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}


def _metric(name: str, metric: str, value: Any) -> float:
    found = plain(value)
    if not isinstance(found, int | float):
        raise RewardError(
            f"reward function {name!r} logged {str(value)[:80]!r} ({type(value).__name__}) as metric {metric!r} with "
            "log_metric; it must be a number"
        )
    return float(found)


def plain(value: Any) -> Any:
    """The value as JSON can carry it: scalars and arrays of numpy and torch as numbers, what is none of these as text."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [plain(v) for v in value]
    return str(value)
