"""Trackers of a TRL script: told the rows of the log history under the names that Hugging Face gives them."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Mapping
from typing import Any

from groupline.training.sinks import RunInfo, Sinks, Status, open_sinks
from groupline.trl.arguments import GRPOConfig


class Reporting(Sinks):
    """Sinks of `report_to`. They stay open after training, so that a later evaluation reaches them, until the next
    training or the end of the process, as Hugging Face's do."""

    def __init__(self, args: GRPOConfig) -> None:
        super().__init__(open_sinks(args.report_to).all_named())
        self._args = args
        self._status: Status = "finished"
        self._open, self._waiting = False, list[tuple[int, Mapping[str, Any]]]()
        self.told_before = 0  # the last step that was reported before the run was killed
        self._run: RunInfo | None = None
        if self:
            atexit.register(self.close)

    def start(self, run: RunInfo, seen: int = 0) -> None:
        self.close()
        options = self._args.to_sanitized_dict()
        fallback = "huggingface"  # as for Hugging Face's own callbacks
        self._open = True
        self._run = dataclasses.replace(run, settings=options, fallback_project=fallback)
        super().start(self._run, self.told_before)
        waiting, self._waiting = self._waiting, []
        for step, row in waiting:
            self.report(step, row)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Not told: what goes to metrics.jsonl after every rollout."""

    def report(self, step: int, row: Mapping[str, Any]) -> None:
        """A row of the log history. Before training it waits until the sinks have started."""
        if not self:
            return
        if self._open:
            super().log(step, {renamed(name): value for name, value in row.items()})
        else:
            self._waiting.append((step, row))

    def finish(self, status: Status, results: Mapping[str, Any]) -> None:
        self._status = status
        if status == "failed":
            self.close()

    def ids(self) -> dict[str, str]:
        """Under which name each tracker knows the run."""
        return {} if self._run is None else self._run.ids()

    def close(self) -> None:
        if self._open:
            self._open = False
            super().finish(self._status, {})


def renamed(name: str) -> str:
    """eval_reward -> eval/reward, reward -> train/reward."""
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name.removeprefix(f'{kind}_')}"
    return f"train/{name}"
