"""Rows of metrics, evaluations and answers to the series that a page draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupline.metrics import pass_at_k, wilson_interval
from groupline.report.answers import Answers, number

POINTS = 1000  # most places of a column
SCATTER = 600
BINS = 12
DIGITS = 5


def columns_of(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys(key for row in rows for key, value in row.items() if number(value, DIGITS) is not None)
    columns: dict[str, list[Any]] = {name: [number(row.get(name), 15) for row in rows] for name in names}
    columns["step"] = [number(row.get("step", i), 15) for i, row in enumerate(rows, 1)]
    if "seconds" not in columns and "step_time" in columns:
        columns["seconds"] = _running(columns["step_time"])
    if "num_tokens" in columns:
        columns["tokens"] = columns["num_tokens"]
    elif "tokens" in columns:
        columns["tokens"] = _running(columns["tokens"])
    if {"frac_groups_with_signal", "step_time"} <= set(columns):
        answers = [_answers(row, settings) for row in rows]
        parts = zip(answers, columns["frac_groups_with_signal"], columns["step_time"], strict=True)
        columns["derived/effective_per_s"] = [
            None if n is None or share is None or not spent else n * share / spent for n, share, spent in parts
        ]
    return columns


def _answers(row: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Answers of a step: its tokens by their mean length, or what the settings say."""
    tokens, mean = row.get("num_completion_tokens"), row.get("completions/mean_length")
    if tokens and mean:
        return float(round(tokens / mean))
    prompts, size = settings.get("prompts_per_step"), settings.get("num_generations")
    return float(prompts * size) if prompts and size else None


def _running(values: Iterable[float | None]) -> list[float]:
    total, out = 0.0, []
    for value in values:
        total += value or 0.0
        out.append(total)
    return out


def length_p95(train: Answers, steps: Sequence[Any]) -> list[int | None]:
    lengths: dict[int, list[int]] = {}
    for place in train.places.values():
        lengths.setdefault(place.step, []).extend(place.lengths)
    at = {step: sorted(own)[math.ceil(0.95 * len(own)) - 1] for step, own in lengths.items() if own}
    return [at.get(step) for step in steps]


def evaluations(held: Answers, results: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Of each evaluation: from the answers where they were written, else from results.json."""
    told = (results or {}).get("held_out") or {}
    measured = {0: told.get("before"), (told.get("history") or [{}])[-1].get("step"): told.get("after")}
    found: dict[int, dict[str, Any]] = {}
    for row in told.get("history") or ():
        count = told.get("problems")
        between = wilson_interval(row["pass@1"] * count, count) if count else (None, None)
        found[row["step"]] = {"step": row["step"], "problems": count, "pass": {"1": [row["pass@1"], *between]}}
    steps: dict[int, list[Any]] = {}
    for place in held.places.values():
        steps.setdefault(place.step, []).append(place)
    for step, places in steps.items():
        if len({len(p.at) for p in places}) != 1:  # the evaluation is still being written
            continue
        n = len(places[0].at)
        ks = [2**i for i in range(n.bit_length())]
        shares = {str(k): [pass_at_k(n, sum(p.right), k) for p in places] for k in ks}
        passes = {k: [sum(v) / len(v), *wilson_interval(sum(v), len(v))] for k, v in shares.items()}
        found[step] = {"step": step, "problems": len(places), "samples": n, "pass": passes}
        scored = [x for p in places for x in p.rewards if x is not None]
        found[step] |= {
            "reward": sum(scored) / len(scored) if scored else None,
            "length": sum(map(sum, (p.lengths for p in places))) / (n * len(places)),
            "truncated": sum(map(sum, (p.cut for p in places))) / (n * len(places)),
        }
    for step, one in measured.items():
        if step is None or not isinstance(one, Mapping) or "pass@1" not in one:
            continue
        own = found.setdefault(step, {"step": step, "problems": told.get("problems"), "pass": {}})
        passes = {k.removeprefix("pass@"): [v["value"], *v["wilson"]] for k, v in one.items() if k.startswith("pass@")}
        own["pass"] = passes | own["pass"]
        own.setdefault("samples", told.get("samples_per_problem"))
        for name, key in (("reward", "reward"), ("length", "completion_length"), ("truncated", "truncated")):
            own.setdefault(name, one.get(key))
    return [found[step] for step in sorted(found)]


def place_evaluations(evals: Iterable[dict[str, Any]], columns: Mapping[str, Sequence[Any]]) -> None:
    """Where each evaluation stands on the other axes: after its step, the start being 0."""
    for one in evals:
        done = sum(1 for step in columns["step"] if step is not None and step <= one["step"])
        for name in ("seconds", "tokens"):
            one[name] = 0 if done == 0 else columns[name][done - 1] if name in columns else None


def thinned(columns: Mapping[str, list[Any]]) -> tuple[dict[str, list[Any]], int]:
    """(columns of at most POINTS places, steps in each): means of neighbours; of step, seconds and tokens the last."""
    size = math.ceil(len(columns["step"]) / POINTS) or 1
    if size == 1:
        return dict(columns), 1
    out = {}
    for name, values in columns.items():
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        if name in ("step", "seconds", "tokens", "num_tokens"):
            out[name] = [part[-1] for part in parts]
        else:
            out[name] = [sum(own) / len(own) if (own := [x for x in part if x is not None]) else None for part in parts]
    return out, size


def lengths_of(train: Answers) -> dict[str, Any]:
    found = [(n, r, p.step) for p in train.places.values() for n, r in zip(p.lengths, p.right, strict=True)]
    if not found:
        return {"bins": [], "points": []}
    low, high = min(n for n, _, _ in found), max(n for n, _, _ in found) + 1
    width = max(1, math.ceil((high - low) / BINS))
    bins = [[start, min(start + width, high), 0, 0] for start in range(low, high, width)]
    for tokens, right, _ in found:
        own = bins[(tokens - low) // width]
        own[2] += 1
        own[3] += right
    every = max(1, math.ceil(len(found) / SCATTER))
    return {"bins": bins, "points": [[n, int(r), step] for n, r, step in found[::every]]}
