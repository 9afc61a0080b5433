"""Alarms of a run that is going: said as soon as they are raised, and written to alarms.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupline.alarms import Alarm, Watch, verdict
from groupline.training.run import RunFolder
from groupline.training.setup import Setup
from groupline.training.sharing import NoFolder


class Alarms:
    """Follows one run. before: evaluations of a run that goes on, whose steps are in the folder already."""

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder | NoFolder,
        say: Callable[[str], None],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.folder, self.say = folder, say
        self._stops = setup.config.stop_on_alarm
        self._watch = Watch(setup.config.max_completion_length, {r.name: r.weight for r in setup.rewards})
        self._watch.replay(folder.rows(), [(row["step"], row["pass@1"]) for row in before])

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._raise(self._watch.step(metrics))

    def held_out(self, step: int, measured: Mapping[str, Any] | None) -> None:
        if measured is not None:
            self._raise(self._watch.held_out(step, measured["pass@1"]["value"]))

    @property
    def stop(self) -> bool:
        """Whether the run should end, because that was asked for and it is broken."""
        return self._stops and verdict(self._watch.raised) == "broken"

    def results(self) -> dict[str, Any]:
        """For results.json: the verdict and all alarms."""
        raised = self._watch.raised
        return {"verdict": verdict(raised), "alarms": [alarm.to_json() for alarm in raised]}

    def _raise(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.folder.log_alarm(alarm)
            self.say(f"ALARM  {alarm}")
