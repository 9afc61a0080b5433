"""The pictures of docs/traps.md, from the figures of traps_show.py. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import traps_numbers as numbers

from groupline.report.curves import BLUE, GREEN, GREY, ORANGE

COLOURS = (BLUE, ORANGE, GREEN, GREY)
PULL: tuple[numbers.Penalty, ...] = (
    "none", "k1 in the loss", "k3 in the loss", "k1 in the reward", "k2 in the loss",
)  # fmt: skip
START, REFERENCE = (2.0, 0.0, -1.0, 0.5), (0.4, 0.3, 0.2, 0.1)  # of the picture of what each penalty pulls on


def draw(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Write traps_*.png into the folder and return their paths. ImportError naming the extra without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'groupline[plot]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, panels, plot in PICTURES:
        figure, axes = pyplot.subplots(1, panels, figsize=(4.6 * panels, 3.9))
        plot(figures[name], axes)
        for axis in axes:
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        made.append(folder / f"traps_{name}.png")
        figure.savefig(made[-1], dpi=110)
        pyplot.close(figure)
    return made


def _empty_think(found: dict[str, Any], axes: Any) -> None:
    for axis, judge, title in zip(axes, ("naive", "fixed"), ("naive_think_format", "think_format"), strict=True):
        for seed, style in ((0, "-"), (1, "--")):
            f = found[f"{judge}_{seed}"]
            steps = range(1, len(f["empty"]) + 1)
            for key, colour, label in (
                ("reward", GREY, "mean reward / 2"), ("empty", ORANGE, "empty thoughts"), ("accuracy", BLUE, "right answers"),
            ):  # fmt: skip
                values = [v / 2 for v in f[key]] if key == "reward" else f[key]
                axis.plot(steps, values, style, color=colour, linewidth=1.4, label=f"{label}, seed {seed}")
        axis.set(xlabel="step", ylabel="share", ylim=(0, 1.02), title=f"Judge of the format: {title}")
    axes[1].legend(fontsize=7, loc="upper right", ncols=2, frameon=False)


def _groups(found: dict[str, Any], axes: Any) -> None:
    sizes = list(found["sizes"])
    rows = list(found["sizes"].values())
    measured = [r["measured"] for r in rows]
    low, high = (
        [m - r["wilson"][0] for m, r in zip(measured, rows, strict=True)],
        [r["wilson"][1] - m for m, r in zip(measured, rows, strict=True)],
    )
    left = axes[0]
    left.errorbar(sizes, measured, (low, high), color=GREY, fmt="o", capsize=3, label="one step of 128 groups (95%)")
    left.plot(sizes, [r["cut"] for r in rows], "x", color=BLUE, markersize=8, label="32 answers each, cut into groups")
    left.plot(sizes, [r["each_p"] for r in rows], color=BLUE, label="$p^G+(1-p)^G$, each problem's $p$")
    left.plot(
        sizes, [r["one_p"] for r in rows], "--", color=ORANGE, label=f"the same with one $p={found['p']:.2f}$ for all"
    )
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(s) for s in sizes])
    left.set(
        xlabel="answers in a group, G", ylabel="share of dead groups", ylim=(0, 0.75), title="Groups with equal rewards"
    )
    left.legend(fontsize=7.5, frameon=False)
    axes[1].hist([r / 32 for r in found["right"]], bins=[i / 16 for i in range(17)], color=BLUE, alpha=0.8)
    axes[1].axvline(found["p"], color=ORANGE, linestyle="--", label=f"mean {found['p']:.2f}")
    axes[1].set(
        xlabel="share of 32 answers right, p", ylabel="problems (of 128)", title="Problems are not equally hard"
    )
    axes[1].legend(fontsize=8, frameon=False)


def _temperature(found: dict[str, Any], axes: Any) -> None:
    for (t, f), colour in zip(found.items(), (GREEN, BLUE, ORANGE, GREY), strict=True):
        for axis, key in ((axes[0], "signal"), (axes[1], "accuracy")):
            axis.plot(*_smooth(f[key], 5), color=colour, label=f"temperature {t}")
    axes[0].set(xlabel="step", ylabel="share of groups", ylim=(0, 1), title="Groups with signal")
    axes[1].set(xlabel="step", ylabel="share right", ylim=(0, 1), title="Training answers, as they were drawn")
    axes[1].legend(fontsize=8, frameon=False, loc="lower right", ncols=2)
    for place, f in enumerate(found.values()):
        for seed, run in enumerate(f["held_out"]):
            value, low, high = run["after"]
            axes[2].errorbar(
                place + (seed - 0.5) / 4, value, ([value - low], [high - value]), color=(BLUE, ORANGE)[seed], fmt="o", capsize=3,
                label=f"seed {seed}" if place == 0 else None,
            )  # fmt: skip
    axes[2].set_xticks(range(len(found)), list(found))
    axes[2].set(
        xlabel="training temperature", ylabel="pass@1", ylim=(0.5, 1), title="Held out after 40 steps, drawn at 1 (95%)"
    )
    axes[2].legend(fontsize=8, frameon=False)


def _std(found: dict[str, Any], axes: Any) -> None:
    p = [i / 100 for i in range(101)]
    curves = (("divided", sqrt, r"$\sqrt{p(1-p)}$"), ("not divided", float, "$p(1-p)$"))
    for (name, shape, formula), colour in zip(curves, (BLUE, ORANGE), strict=True):
        top = numbers.expected_weight(0.5, 8, name == "divided")
        exact = [numbers.expected_weight(x, 8, name == "divided") / top for x in p]
        axes[0].plot(p, exact, color=colour, label=f"{name}, G = 8, exact")
        limit = [shape(x * (1 - x)) / shape(0.25) for x in p]
        axes[0].plot(p, limit, ":", color=colour, label=f"{name}, large G: {formula}")
    axes[0].set(
        xlabel="p, the chance of a right answer", ylabel="mean summed |A|, 1 at p = 1/2", title="A group's weight"
    )
    axes[0].legend(fontsize=7.5, frameon=False, loc="lower center")
    for place, (name, colour) in enumerate((("divided", BLUE), ("not divided", ORANGE))):
        at = [i + (place - 0.5) * 0.36 for i in range(4)]
        axes[1].bar(at, found[name]["measured"], 0.34, color=colour, alpha=0.75, label=f"{name}, measured")
        axes[1].plot(
            at, found[name]["expected"], "_", color="black", markersize=16, label="expected" if place else None
        )
    axes[1].set_xticks(range(4), ["0 to ¼", "¼ to ½", "½ to ¾", "¾ to 1"])
    axes[1].set(xlabel="p of the problem", ylabel="share of the summed |A|", title="128 groups of 8, one step")
    axes[1].set_ylim(0, 0.62)
    axes[1].legend(fontsize=8, frameon=False, loc="upper left")


def _length(found: dict[str, Any], axes: Any) -> None:
    words = {"grpo": "per sequence (grpo)", "dr_grpo": "per budget (dr_grpo)"}
    for axis, kind in zip(axes, ("wrong", "right"), strict=True):
        for (row, seeds), colour in zip(found.items(), (ORANGE, BLUE), strict=True):
            for seed, f in enumerate(seeds):
                at, means, _ = zip(*f[kind], strict=True)
                axis.plot(
                    at,
                    means,
                    ("-", "--")[seed],
                    color=colour,
                    marker="o",
                    markersize=3,
                    label=f"{words[row]}, seed {seed}",
                )
        axis.set(xlabel="step", ylabel="mean length (tokens)", ylim=(0, 55), title=f"Answers that are {kind}")
    axes[1].legend(fontsize=8, frameon=False, loc="lower right")


def _kl(found: dict[str, Any], axes: Any) -> None:
    for (label, f), colour in zip(found.items(), (GREY, ORANGE, BLUE, GREEN), strict=True):
        for seed, curve in enumerate(f["kl"]):
            shown = label if seed == 0 else None
            axes[0].plot(range(1, len(curve) + 1), curve, ("-", "--")[seed], color=colour, linewidth=1.3, label=shown)
    axes[0].set(
        xlabel="step", ylabel="KL to the start (nats a token)", title="Measured, beta 0.3 (no penalty: one seed)"
    )
    axes[0].legend(fontsize=8, frameon=False)
    colours = (GREY, ORANGE, BLUE, GREEN, "black")
    for place, (penalty, colour) in enumerate(zip(PULL, colours, strict=True)):
        path = numbers.pull(START, REFERENCE, penalty, steps=40, rate=0.3)
        axes[1].plot(path, color=colour, linewidth=(4, 1.5, 1.5, 4, 1.5)[place], linestyle=":" if place == 4 else "-",
                     alpha=0.5 if place in (0, 3) else 1, label=penalty)  # fmt: skip
    axes[1].set(xlabel="descents", ylabel="KL (nats)", title="The mean gradient alone, four tokens, exact")
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=8, frameon=False)


def _smooth(values: list[float], width: int) -> tuple[list[float], list[float]]:
    """Means over windows of `width` steps, each at its middle."""
    found = numbers.mean_by_step(enumerate(values, start=1), width)
    return [at for at, _, _ in found], [value for _, value, _ in found]


PICTURES: tuple[tuple[str, int, Callable[[Any, Any], None]], ...] = (
    ("empty_think", 2, _empty_think),
    ("groups", 2, _groups),
    ("temperature", 3, _temperature),
    ("std", 2, _std),
    ("length", 2, _length),
    ("kl", 2, _kl),
)
