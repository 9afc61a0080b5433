"""Trackers beside the run's files: told what the files are told, and never in the way of them."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from groupline.config import ConfigError, RunSettings
from groupline.runlog import read_jsonl, write_json
from groupline.settings import TRACKERS as NAMES
from groupline.settings import tracker_names

IDS = "sinks.json"  # in the run's folder: under which name each tracker knows the run
Status = Literal["finished", "interrupted", "failed"]
MOST_SKIPPED = 63


@dataclass(frozen=True)
class RunInfo:
    """What a sink is told of the run when it starts.

    folder: the run's. settings: plain values, as in config.yaml. project: None, it was not set. resumed: the run goes
    on from a checkpoint.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    project: str | None = None
    fallback_project: str = "groupline"
    resumed: bool = False

    def project_or(self, default: str | None) -> str:
        """The project that was set, else `default` (an environment variable's value), else the fallback."""
        return self.project or default or self.fallback_project

    def kept(self, sink: str) -> str | None:
        """What `keep` was given for this sink when the run first started; None for a run that begins."""
        return self.ids().get(sink) if self.resumed else None

    def keep(self, sink: str, run_id: str) -> None:
        write_json(self.folder / IDS, self.ids() | {sink: run_id})

    def ids(self) -> dict[str, str]:
        """What was kept so far, by sink."""
        file = self.folder / IDS
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return found


class Sink(Protocol):
    """A tracker. A method may raise any Exception: the run says so once, counts it and goes on."""

    def start(self, run: RunInfo) -> None:
        """The run begins, or goes on (`run.resumed`). An Exception here refuses a run that begins."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finite numbers after `step` steps. Steps never fall; several calls may come for one step."""

    def finish(self, status: Status, results: Mapping[str, float]) -> None:
        """The run ends; no call follows. results: held-out measures before and after."""


def open_sinks(report_to: Any, own: Sequence[Sink] = (), say: Callable[[str], None] = print) -> Sinks:
    """Sinks by name, and those that the caller made. Nothing is started.

    Raises:
        ConfigError: an unknown name, or an object without the three methods.
        ImportError: a tracker is not installed; the message names the extra.
    """
    from groupline.training import trackers

    try:
        names = tracker_names(report_to)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    chosen = [n for n in NAMES if n in names or ("all" in names and importlib.util.find_spec(n) is not None)]
    sinks: list[tuple[str, Sink]] = [(name, trackers.TRACKERS[name]()) for name in chosen]
    for sink in own:
        lacking = [m for m in ("start", "log", "finish") if not callable(getattr(sink, m, None))]
        if lacking:
            raise ConfigError(f"sinks: {type(sink).__name__} has no method {lacking[0]}(); see groupline.Sink")
        sinks.append((type(sink).__name__, sink))
    return Sinks(sinks, say)


def run_info(settings: RunSettings, folder: Path, resumed: bool = False) -> RunInfo:
    """What sinks are told of a run with these settings."""
    name = settings.run_name or folder.resolve().name
    return RunInfo(name, folder, settings.model_dump(mode="json"), settings.project, resumed=resumed)


@dataclass
class _Told:
    """One sink and what became of the calls to it."""

    name: str
    sink: Sink
    running: bool = False
    told: int = 0
    lost: int = 0
    failures: int = 0  # in a row
    skip: int = 0


class Sinks:
    """All sinks of a run. Each call goes to every one; one that fails is said once and counted, and the run goes on.

    After failures in a row the next calls are left out, 1, 3, 7, ... up to 63 of them, so that a tracker that takes a
    minute to fail does not hold up every step.
    """

    def __init__(self, sinks: Sequence[tuple[str, Sink]] = (), say: Callable[[str], None] = print) -> None:
        self._all = [_Told(name, sink) for name, sink in sinks]
        self._say, self._seen = say, 0

    def all_named(self) -> list[tuple[str, Sink]]:
        return [(told.name, told.sink) for told in self._all]

    def __bool__(self) -> bool:
        return bool(self._all)

    def start(self, run: RunInfo, seen: int = 0) -> None:
        """seen: the last step that sinks were told of before the run was killed; earlier ones are not told again.

        Raises:
            ConfigError: a sink of a run that begins cannot start. Those started before it are finished as failed.
        """
        self._seen = seen
        for told in self._all:
            told.told = told.lost = told.failures = told.skip = 0
            try:
                with kept_random():
                    told.sink.start(run)
                told.running = True
            except Exception as error:  # whatever a tracker's own code, its network or its disk may raise
                if not run.resumed:
                    self.finish("failed", {})
                    raise ConfigError(
                        f"report_to: {told.name} cannot start: {_words(error)}. Nothing was trained; mend it, or leave it out"
                    ) from error
                self._say(f"{told.name} cannot go on and is left out, the run goes on: {_words(error)}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The numbers among `metrics` to every sink; anything else, and what is not finite, is left out."""
        if step < self._seen:
            return
        numbers = numbers_of(metrics)
        for told in self._all:
            if not told.running or told.skip:
                told.skip = max(0, told.skip - 1)
                told.lost += 1
                continue
            if self._call(told, lambda sink: sink.log(step, numbers)):
                told.told += 1
            else:
                told.lost += 1

    def finish(self, status: Status, results: Mapping[str, Any]) -> None:
        for told in self._all:
            if told.running:
                told.running = False
                self._call(told, lambda sink: sink.finish(status, numbers_of(results)))
            if told.lost:
                self._say(
                    f"{told.name} missed {told.lost} of {told.told + told.lost} reports; the run's files have all"
                )
            told.told = told.lost = 0

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Finishes the sinks also where the run ends in an error or Ctrl-C."""
        try:
            yield
        except BaseException as error:
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", {})
            raise
        self.finish("finished", {})

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each sink, how many reports reached it and how many were lost."""
        return {t.name: {"told": t.told, "lost": t.lost} for t in self._all}

    def _call(self, told: _Told, call: Callable[[Sink], None]) -> bool:
        try:
            with kept_random():
                call(told.sink)
        except Exception as error:  # whatever a tracker's own code, its network or its disk may raise
            if not told.lost:
                self._say(f"{told.name} failed, the run goes on and its files are whole: {_words(error)}")
            told.failures += 1
            told.skip = min(2**told.failures - 1, MOST_SKIPPED)
            return False
        told.failures = 0
        return True


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers; of a measure with intervals its value. The step is the axis, not a metric."""
    plain = {k: v["value"] if isinstance(v, Mapping) and "value" in v else v for k, v in metrics.items() if k != "step"}
    return {
        k: float(v)
        for k, v in plain.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
    }


def held_out_numbers(measured: Mapping[str, Any] | None, prefix: str) -> dict[str, float]:
    """Held-out measures as numbers, their names under `prefix`."""
    found = numbers_of({k: v for k, v in (measured or {}).items() if k != "policy_version"})
    return {f"{prefix}/{name}": value for name, value in found.items()}


def last_step(metrics: Path) -> int:
    """The last step of a file of metrics; 0 without one."""
    return max((int(row["step"]) for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0


@contextmanager
def kept_random() -> Iterator[None]:
    """Python's generator as it was, afterwards: some trackers draw names from it, and that must not change the run."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
