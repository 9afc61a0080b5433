"""`groupline doctor`: what a run's figures warn of, read from its files or from a TRL trainer's log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from groupline.alarms import Alarm, Watch, verdict
from groupline.runlog import read_jsonl

TRL_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """steps: rows read. verdict: healthy, watch or broken, the worst of the alarms."""

    source: Path
    steps: int
    verdict: str
    alarms: tuple[Alarm, ...]

    def text(self) -> str:
        lines = [f"{self.verdict}  {self.source}, {self.steps} steps"]
        if self.alarms:
            lines.append(f"first at step {min(a.step for a in self.alarms)}")
        for alarm in self.alarms:
            lines += ["", f"{alarm.level:>7}  step {alarm.step}: {alarm.name}", f"{'':9}{alarm.evidence}"]
            lines.append(f"{'':9}{alarm.advice}")
        return "\n".join(lines)


def diagnose(source: Path) -> Diagnosis:
    """source: a run folder, finished or going; a TRL output or checkpoint folder, its trainer_state.json, or a JSON file
    with a log_history list.

    Raises:
        ValueError: there is nothing of the kind; the message says what was looked for.
    """
    if (source / "metrics.jsonl").is_file():
        return _of_run(source)
    file = _trl_state(source) if source.is_dir() else source
    if file is None or not file.is_file():
        raise ValueError(f"{source} holds neither metrics.jsonl (a groupline run) nor {TRL_STATE} (a TRL run)")
    return _of_log(file)


def _of_run(run: Path) -> Diagnosis:
    return judged(run, list(read_jsonl(run / "metrics.jsonl")), _held_out(run))


def judged(run: Path, rows: Sequence[Mapping[str, Any]], held_out: Iterable[tuple[int, float]]) -> Diagnosis:
    """A run folder whose rows of metrics and evaluations, (step, share right), have been read."""
    settings = settings_of(run)
    rewards, weights = settings.get("rewards"), settings.get("reward_weights")
    known = dict(zip(rewards, weights, strict=False)) if rewards and weights else {}
    watch = Watch(settings.get("max_completion_length"), known)
    alarms = watch.replay(rows, held_out)
    return Diagnosis(run, len(rows), verdict(alarms), tuple(alarms))


def _held_out(run: Path) -> list[tuple[int, float]]:
    """(step, share right) of each evaluation, also while the run is going. None of a run that has no such answers."""
    if (run / "results.json").is_file():
        history = json.loads((run / "results.json").read_text(encoding="utf-8"))["held_out"].get("history", ())
        return [(row["step"], row["pass@1"]) for row in history]
    right: dict[int, list[bool]] = {}
    if (run / "held_out.jsonl").is_file():
        for row in read_jsonl(run / "held_out.jsonl"):
            first = next(iter(row["rewards"].values()), None)  # the first function says what is right
            right.setdefault(int(row["step"]), []).append(first is not None and first >= 1)
    return [(step, sum(values) / len(values)) for step, values in right.items()]


def _of_log(file: Path) -> Diagnosis:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    history = state.get("log_history") if isinstance(state, Mapping) else state
    if not isinstance(history, list) or not all(isinstance(row, Mapping) for row in history):
        raise ValueError(f"{file} has no log_history, a list of rows")
    rows = [_numbers(row) for row in history]
    training = [row for row in rows if "loss" in row and "reward" in row]
    if not training:
        raise ValueError(f"none of the {len(rows)} rows in {file} has both a loss and a reward, as GRPO's have")
    watch = Watch()
    alarms = watch.replay(training, _evaluations(rows))
    return Diagnosis(file, len(training), verdict(alarms), tuple(alarms))


def _evaluations(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    keys = ("eval_pass@1", "eval_accuracy")  # a rising eval_reward may be the very thing that is gamed
    found = []
    for row in rows:
        value = next((row[k] for k in keys if isinstance(row.get(k), float)), None)
        if value is not None:
            found.append((int(row.get("step", 0)), value))
    return found


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """TRL writes some of its numbers as text."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        try:
            out[key] = float(value) if isinstance(value, (str, int, float)) else value
        except ValueError:
            out[key] = value
    return out


def _trl_state(folder: Path) -> Path | None:
    """trainer_state.json of a TRL folder, or of its newest checkpoint."""
    if (folder / TRL_STATE).is_file():
        return folder / TRL_STATE
    found = [p for p in folder.glob(f"checkpoint-*/{TRL_STATE}") if p.parent.name.rpartition("-")[2].isdecimal()]
    return max(found, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=None)


def settings_of(run: Path) -> dict[str, Any]:
    """config.yaml of a run, or nothing."""
    file = run / "config.yaml"
    if not file.is_file():
        return {}
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}
