"""PNG curves of a run, from its files. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupline.report.figure import BLUE, GREEN, GREY, ORANGE, draw_pass_at_k, load_pyplot
from groupline.report.figure import save as save_figure
from groupline.report.figures.progress import draw_progress, read_progress
from groupline.runlog import read_json, read_jsonl

_BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.14),
    "ncols": 2,
    "fontsize": 8,
    "frameon": False,
}


def write_curves(run: Path) -> list[Path]:
    """Write figures/*.png into the run folder and return their paths.

    Raises ImportError naming the extra if matplotlib is missing, and FileNotFoundError naming a file the run lacks.
    """
    pyplot = load_pyplot()
    rows = list(read_jsonl(run / "metrics.jsonl"))
    if not rows:
        return []
    results = read_json(run / "results.json")
    steps = [r["step"] for r in rows]
    folder = run / "figures"
    made: list[Path] = []

    def save(figure: Any, name: str) -> None:
        made.extend(save_figure(figure, folder / name))

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    mean = [r["reward"] for r in rows]
    spread = [r["reward_std"] for r in rows]
    axis.fill_between(
        steps, [m - s for m, s in zip(mean, spread, strict=True)], [m + s for m, s in zip(mean, spread, strict=True)],
        color=BLUE, alpha=0.15, linewidth=0, label="one standard deviation over answers",
    )  # fmt: skip
    axis.plot(steps, mean, color=BLUE, label="mean reward")
    for name, colour in zip(sorted(k for k in rows[0] if k.startswith("rewards/") and k.endswith("/mean")),
                            (ORANGE, GREEN, GREY) * 3, strict=False):  # fmt: skip
        label = name.removeprefix("rewards/").removesuffix("/mean")
        axis.plot(steps, [r[name] for r in rows], color=colour, linewidth=1, label=f"{label} (unweighted)")
    axis.set(xlabel="step", ylabel="reward", title="Training reward per step")
    axis.legend(**_BELOW)
    save(figure, "reward.png")

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    parts = ["groups/all_wrong", "groups/mixed", "groups/all_right"]
    labels = ["all wrong", "mixed", "all right"]
    axis.stackplot(
        steps, [[r[p] for r in rows] for p in parts], labels=labels, colors=[ORANGE, BLUE, GREEN], alpha=0.75
    )
    signal = [r["frac_groups_with_signal"] for r in rows]
    axis.plot(steps, signal, color="black", linewidth=1.2, label="reward std above 0 (groups that teach)")
    axis.set(
        xlabel="step", ylabel="share of groups", ylim=(0, 1), title="Groups by answers right, and groups with signal"
    )
    axis.legend(**_BELOW)
    save(figure, "groups.png")

    save(draw_progress(pyplot, read_progress(run)), "length_accuracy.png")

    if (figure := _pass_at_k(results["held_out"], pyplot)) is not None:
        save(figure, "pass_at_k.png")
    return made


def _pass_at_k(held: dict[str, Any], pyplot: Any) -> Any:
    if not held["before"] or not held["after"]:
        return None
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    draw_pass_at_k(axis, [(f"{name} training", held[name], c) for name, c in (("before", GREY), ("after", BLUE))])
    axis.set_title(f"Held-out pass@k, {held['problems']} problems (bands: 95% bootstrap over problems)")
    axis.legend(frameon=False)
    return figure
