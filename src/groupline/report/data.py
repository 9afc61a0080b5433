"""A run's files as one JSON-ready value: all that `groupline report` and `groupline watch` draw from.

    data = run_data(Path("runs/quickstart"), rollouts=1600)
    RunReader(folder).data(1600)       # the same; a reader kept by a server reads on instead of anew

What it holds; a number that is missing or not finite is None everywhere:

    format      1; raised when a field changes its meaning
    id, name, folder, label    the folder's path, its last part, the path again, and the name to show (see `labels`)
    kind        grpo, ppo, sft, reward_model, dpo, or run where the files do not tell
    status      going (no results.json: still running, or killed), finished, interrupted or failed; `error`: why
    written     when the last row was written, seconds since 1970
    steps       rows of metrics.jsonl; `steps_planned`: the setting
    config      config.yaml, as it was resolved; `plan`: lines of plan.txt by their name; `models`: weights in memory
    columns     name -> a list of numbers, all equally long, a place a step: everything numeric in metrics.jsonl, and
                  seconds                    since training began, evaluations left out
                  tokens                     prompt and answer tokens so far
                  derived/length_p95         95th percentile (nearest rank) of the answers' tokens, from rollouts.jsonl
                  derived/effective_per_s    answers in groups with signal, a second of the step
    averaged    steps that a place of `columns` is the mean of: 1 up to POINTS steps
    evals       [{step, seconds, tokens, problems, samples, pass: {k: [value, low, high]}, reward, length, truncated}],
                low and high: Wilson's 95% interval over problems
    verdict     healthy, watch or broken; `alarms`: [{step, level, name, evidence, advice}] in order
    lengths     {bins: [[low, high, answers, right]], points: [[tokens, 0 or 1, step]]}: training answers; bins hold all of
                them, low <= tokens < high; points are at most SCATTER of them, spread evenly
    reward_names    of the reward functions; the first says what is right
    groups      {answers, groups: how many there are; shown_answers; limit; list: [group, ...]}, see `answers.packed`
    problems    [{id, prompt, gold}] that a group's `problem` is a place of
    vocabulary  token id -> its text, or its bytes where it is part of a character

Raises ValueError where a folder holds no run, naming what was looked for, or where a line of a file is broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupline.report.answers import Answers, number, sample
from groupline.report.doctor import judged, settings_of
from groupline.report.series import (
    DIGITS,
    columns_of,
    evaluations,
    length_p95,
    lengths_of,
    place_evaluations,
    thinned,
)
from groupline.report.vocabulary import pieces
from groupline.runlog import finite, read_jsonl

FORMAT = 1
ROLLOUTS = 1600


def run_data(folder: Path, rollouts: int = ROLLOUTS) -> dict[str, Any]:
    """See the module. rollouts: most answers whose texts are in it; 0: rollouts.jsonl is not opened at all."""
    return RunReader(folder).data(rollouts)


def labels(folders: Sequence[Path]) -> list[str]:
    """A name for each run to be shown beside the others: its folder's, with as many parents as tell it from these."""
    paths = [path.absolute() for path in folders]
    found = []
    for i, path in enumerate(paths):
        for count in range(1, len(path.parts) + 1):
            name = "/".join(path.parts[-count:])
            if not any(other.parts[-count:] == path.parts[-count:] for other in paths if other != path):
                break
        twice = paths[:i].count(path)
        found.append(f"{name} ({twice + 1})" if twice else name)
    return found


class RunReader:
    """Reads a run's folder; what was read of the answers is kept for the next call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.train, self.held_out = Answers(folder, "train"), Answers(folder, "held_out")

    def data(self, rollouts: int = ROLLOUTS) -> dict[str, Any]:
        if rollouts < 0:
            raise ValueError(f"rollouts is {rollouts}; it must be 0 (no answers) or positive")
        metrics = self.folder / "metrics.jsonl"
        if not metrics.is_file():
            raise ValueError(f"{self.folder} is not a run: it holds no metrics.jsonl, which every run writes")
        rows = list(read_jsonl(metrics))
        settings = settings_of(self.folder)
        results = _json(self.folder / "results.json")
        if rollouts:
            self.train.read()
        self.held_out.read()
        evals = evaluations(self.held_out, results)
        diagnosis = judged(self.folder, rows, [(e["step"], e["pass"]["1"][0]) for e in evals if "1" in e["pass"]])
        columns = columns_of(rows, settings)
        if rollouts and self.train.places:
            columns["derived/length_p95"] = length_p95(self.train, columns["step"])
        place_evaluations(evals, columns)
        columns, averaged = thinned(columns)
        groups, problems = (
            sample(self.train, self.held_out, rollouts, [a.step for a in diagnosis.alarms]) if rollouts else ([], [])
        )
        places = [*self.train.places.values(), *self.held_out.places.values()]
        ids = {token for group in groups for answer in group["ids"] for token in answer}
        value = {
            "format": FORMAT,
            "id": str(self.folder),
            "name": self.folder.absolute().name,
            "folder": str(self.folder),
            "label": self.folder.absolute().name,
            "kind": _kind(settings, results),
            **_status(results),
            "written": metrics.stat().st_mtime,
            "steps": len(rows),
            "steps_planned": settings.get("steps"),
            "config": settings,
            "plan": _plan(self.folder / "plan.txt"),
            "models": (results or {}).get("models"),
            "columns": {k: [number(x, DIGITS if k != "step" else 15) for x in v] for k, v in columns.items()},
            "averaged": averaged,
            "evals": evals,
            "verdict": diagnosis.verdict,
            "alarms": [alarm.to_json() for alarm in diagnosis.alarms],
            "lengths": lengths_of(self.train),
            "reward_names": self.train.rewards or self.held_out.rewards,
            "groups": {
                "answers": sum(len(p.at) for p in places),
                "groups": len(places),
                "shown_answers": sum(len(g["texts"]) for g in groups),
                "limit": rollouts,
                "list": groups,
            },
            "problems": problems,
            "vocabulary": {str(k): v for k, v in pieces(self._tokenizers(settings), ids).items()} if ids else {},
        }
        return dict(finite(value))

    def _tokenizers(self, settings: Mapping[str, Any]) -> Iterable[Path]:
        """Where the run's tokenizer may lie: the model it saved, a checkpoint, what it started from."""
        yield self.folder / "model" / "tokenizer.json"
        yield from sorted(self.folder.glob("checkpoint-*/**/tokenizer.json"))
        for key in ("tokenizer", "model"):
            name = settings.get(key)
            if name == "builtin":
                yield Path(__file__).parents[1] / "models" / "builtin" / "tokenizer.json"
            elif isinstance(name, str):
                yield Path(name) / "tokenizer.json"


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _plan(file: Path) -> dict[str, str]:
    """plan.txt: `      name  text` on every line."""
    if not file.is_file():
        return {}
    lines = (re.fullmatch(r" *(\w[\w ]*?)  +(.*)", line) for line in file.read_text(encoding="utf-8").splitlines())
    return {line[1]: line[2] for line in lines if line}


def _kind(settings: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    if method := (results or {}).get("method"):
        return str(method)
    known = {"value_clip": "ppo", "num_generations": "grpo", "solution_columns": "sft"}
    known |= {"center_rewards_coefficient": "reward_model", "label_smoothing": "dpo"}
    return next((kind for key, kind in known.items() if key in settings), "run")


def _status(results: Mapping[str, Any] | None) -> dict[str, Any]:
    if results is None:
        return {"status": "going", "error": None}
    ended = "failed" if "error" in results else "interrupted" if results.get("interrupted") else "finished"
    return {"status": ended, "error": results.get("error")}
