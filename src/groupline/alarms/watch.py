"""Follows a run and raises alarms, each once until it has cooled down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from groupline.alarms.history import Alarm, History, Level, Row, Rule
from groupline.alarms.rules import RULES

COOL_DOWN = 25  # steps before an alarm that was raised is raised again at the same level


class Watch:
    """Follows a run. `step` and `held_out` return the alarms that are new."""

    def __init__(
        self, cap: int | None = None, weights: Mapping[str, float] | None = None, rules: Sequence[Rule] | None = None
    ) -> None:
        self.history = History(cap, weights or {})
        self.rules = RULES if rules is None else rules
        self.raised: list[Alarm] = []
        self._quiet: dict[str, tuple[int, Level]] = {}  # name -> rows when last raised, and the level

    def step(self, row: Row) -> list[Alarm]:
        """After an optimiser step. row: its metrics, with `step`."""
        self.history.rows.append(row)
        return self._look()

    def held_out(self, step: int, right: float) -> list[Alarm]:
        """After an evaluation. right: share of held-out answers that are right, pass@1."""
        self.history.held_out.append((step, right))
        return self._look()

    def replay(self, rows: Iterable[Row], held_out: Iterable[tuple[int, float]] = ()) -> list[Alarm]:
        """All alarms of a run that is written down: every evaluation, (step, pass@1), comes after its step's row."""
        waiting = sorted(held_out)
        for row in rows:
            step = int(row.get("step", len(self.history.rows) + 1))
            while waiting and waiting[0][0] < step:
                self.held_out(*waiting.pop(0))
            self.step(row)
        for place in waiting:
            self.held_out(*place)
        return self.raised

    def _look(self) -> list[Alarm]:
        rows = len(self.history.rows)
        new: list[Alarm] = []
        for rule in self.rules:
            found = rule.check(self.history) if rows >= rule.warm_up else None
            if found is None:
                continue
            level, evidence = found
            at, before = self._quiet.get(rule.name, (-COOL_DOWN, "watch"))
            if rows - at < COOL_DOWN and not (before == "watch" and level == "broken"):
                continue
            self._quiet[rule.name] = (rows, level)
            new.append(Alarm(rule.name, level, int(self.history.rows[-1].get("step", rows)), evidence, rule.advice))
        self.raised += new
        return new


def verdict(alarms: Iterable[Alarm]) -> Literal["healthy", "watch", "broken"]:
    """The worst level raised."""
    levels = {alarm.level for alarm in alarms}
    return "broken" if "broken" in levels else "watch" if levels else "healthy"
