"""What every measured process shares: a clock for methods, medians, memory, and the one JSON line it prints."""

from __future__ import annotations

import functools
import json
import os
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Clock:
    """Seconds spent inside wrapped methods since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time `owner.method` under `name`, on this one object. A method the owner has not is an AttributeError."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """{name: seconds} since the last call, and start again."""
        spent, self._spent = self._spent, {}
        return spent


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each phase over steps: {phase: seconds}. All rows have the same phases."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def peak_gib() -> float:
    """Largest resident memory of this process so far, GiB (Linux counts it in KiB)."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def resident_gib() -> float:
    """Resident memory of this process now, GiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**30, 3)


def emit(rows: Sequence[Mapping[str, float]], **facts: Any) -> None:
    """Print the process's result as one JSON line: facts, medians, and every counted step."""
    rows = [{name: round(value, 4) for name, value in row.items()} for row in rows]
    line = facts | {
        "seconds": medians(rows),
        "step_seconds": [row["step"] for row in rows],
        "rows": rows,
        "peak_gib": peak_gib(),
    }
    print(json.dumps(line), flush=True)
