"""A run over time: accuracy and length on one axis; and pass@1 against pass@k before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupline.metrics import wilson_interval
from groupline.report.figure import BLUE, GREY, ORANGE
from groupline.runlog import read_json, read_jsonl

SECOND = 8  # the k beside 1; where it was not measured, the largest that was


@dataclass(frozen=True, slots=True)
class Progress:
    """Per step: the share of training answers right, and the mean length in tokens.

    held_out: (step, pass@1, low, high) of every evaluation, Wilson's 95% interval over problems.
    """

    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    length: tuple[float, ...]
    held_out: tuple[tuple[int, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """pass@1 and pass@k of the held-out problems, before and after: (value, Wilson low, Wilson high) by k."""

    ks: tuple[int, int]
    before: tuple[tuple[float, float, float], ...]
    after: tuple[tuple[float, float, float], ...]
    problems: int
    samples: int


def read_progress(run: Path) -> Progress:
    """From metrics.jsonl, and results.json where it is there already."""
    rows = [r for r in read_jsonl(run / "metrics.jsonl") if r.get("accuracy") is not None]
    held = _held_out(run)
    problems = held.get("problems") or 0
    history = [(row["step"], row["pass@1"]) for row in held.get("history", ())]
    return Progress(
        tuple(r["step"] for r in rows),
        tuple(r["accuracy"] for r in rows),
        tuple(r["completions/mean_length"] for r in rows),
        tuple((step, value, *wilson_interval(value * problems, problems)) for step, value in history),
    )


def read_ends(run: Path) -> Ends | None:
    """From results.json; None where the run was not evaluated before and after."""
    held = _held_out(run)
    if not held.get("before") or not held.get("after"):
        return None
    known = sorted(int(key.removeprefix("pass@")) for key in held["after"] if key.startswith("pass@"))
    ks = (known[0], SECOND if SECOND in known else known[-1])
    before, after = (tuple(_pass(held[when], k) for k in ks) for when in ("before", "after"))
    return Ends(ks, before, after, held["problems"], held["samples_per_problem"])


def smoothed(values: tuple[float, ...]) -> list[float]:
    """The mean over a window of about a tenth of the run around each step, cut off at both ends."""
    half = len(values) // 20
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def draw_progress(pyplot: Any, found: Progress) -> Any:
    """Accuracy above length, over the same steps."""
    figure, axes = pyplot.subplots(2, 1, figsize=(7.1, 4.5), sharex=True)
    for axis, values, colour, what in (
        (axes[0], found.accuracy, BLUE, "training answers right"),
        (axes[1], found.length, ORANGE, "mean length, tokens"),
    ):
        axis.plot(found.steps, values, color=colour, linewidth=0.8, alpha=0.55, label="each step")
        if len(values) >= 20:
            axis.plot(found.steps, smoothed(values), color=colour, linewidth=2.4, label="mean of the steps around it")
        elif len(values) == 1:
            axis.plot(found.steps, values, "o", color=colour)
        axis.set_ylabel(what)
        axis.spines[["top", "right"]].set_visible(False)
    if found.held_out:
        steps, value, low, high = (np.array(column) for column in zip(*found.held_out, strict=True))
        axes[0].errorbar(steps, value, [value - low, high - value], fmt="D", color="black", markersize=5, capsize=4,
                         label="held-out pass@1, 95% Wilson", clip_on=False)  # fmt: skip
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(0, 1.1 * max(found.length))
    axes[1].set_xlabel("step")
    for axis in axes:
        axis.legend(fontsize=8.5, frameon=False, loc="lower right")
    axes[0].set_title("Accuracy and length over the run", fontsize=11)
    return figure


def draw_ability(pyplot: Any, found: Ends) -> Any:
    """Two pairs of points with intervals: what one answer solves, and what one of k solves."""
    figure, axis = pyplot.subplots(figsize=(7.4, 4.2))
    for pairs, name, colour, marker, shift in (
        (found.before, "before training", GREY, "s", -0.12),
        (found.after, "after training", BLUE, "o", 0.12),
    ):
        x = np.arange(2) + shift
        value, low, high = (np.array(column) for column in zip(*pairs, strict=True))
        axis.errorbar(x, value, [value - low, high - value], fmt=marker, color=colour, markersize=9, capsize=6,
                      linewidth=2, label=name)  # fmt: skip
        for place, share in zip(x, value, strict=True):
            left = shift < 0
            axis.annotate(f"{share:.1%}", (place, share), (-11 if left else 11, 0), textcoords="offset points",
                          ha="right" if left else "left", va="center", fontsize=11)  # fmt: skip
    changes = [f"{100 * (a[0] - b[0]):+.1f} points" for b, a in zip(found.before, found.after, strict=True)]
    axis.set_xticks([0, 1], [f"pass@{k}\n{change}" for k, change in zip(found.ks, changes, strict=True)], fontsize=11)
    axis.set(xlim=(-0.6, 1.6), ylim=(0, 1.02), ylabel="share of held-out problems")
    axis.set_title(
        f"{found.problems} held-out problems, {found.samples} answers each (bars: 95% Wilson)", fontsize=10.5
    )
    axis.legend(frameon=False, loc="lower right", fontsize=10)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _held_out(run: Path) -> dict[str, Any]:
    file = run / "results.json"
    found: dict[str, Any] = read_json(file)["held_out"] if file.is_file() else {}
    return found


def _pass(measured: dict[str, Any], k: int) -> tuple[float, float, float]:
    found = measured[f"pass@{k}"]
    return (found["value"], *found["wilson"])
