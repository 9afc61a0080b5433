"""Tables and the figure of `scale_sim.py`: simulated beside measured, and 1 to 1,024 devices. Every table says which it is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_sim import Layout, Measured, Simulation, Times, best, fit, tails

DEVICES = (1, 4, 16, 64, 256, 1024)
STALENESS = (0, 1, 2, 4)
STEPS, ANSWERS, GROUP, ROWS = 21, 2048, 16, 64


def check(
    run: Measured, also: Sequence[tuple[Measured, Sequence[int]]], others: Sequence[tuple[Measured, int]]
) -> None:
    """Each step by itself: fitted to every second step of the run, tried on the rest, then on runs of several processes.

    also: steps of a run of fewer answers, to fit beside.
    """
    count = len(run.rows)
    times = fit((run, range(0, count, 2)), *also)
    print("| run | processes | steps | step s measured | step s simulated | error | median error of a step |")
    print("|---|---|---|---|---|---|---|")
    for name, found, ranks, steps in [
        ("fitted to", run, 1, range(0, count, 2)),
        *(("fitted to, fewer answers", few, 1, steps) for few, steps in also),
        ("held out", run, 1, range(1, count, 2)),
        *((f"{ranks} processes", other, ranks, range(len(other.rows))) for other, ranks in others),
    ]:
        layout = Layout(ranks, ranks, shared=True)
        measured = [found.rows[i]["step_time"] for i in steps]
        simulated = []
        for i in steps:
            own = replace(times, train_token=times.train_token * found.share([i]))
            simulated.append(Simulation(own, layout, [found.lengths[i]], found.group, found.prompt).run().ends[0])
        a, b = statistics.mean(measured), statistics.mean(simulated)
        off = statistics.median(abs(y - x) / x for x, y in zip(measured, simulated, strict=True))
        print(f"| {name} | {ranks} | {len(measured)} | {a:.2f} | {b:.2f} | {b / a - 1:+.0%} | {off:.0%} |")


def scale(run: Measured, times: Times, figure: Path | None) -> None:
    """ANSWERS answers a step, whatever the number of devices."""
    mean = statistics.mean(x for step in run.lengths for x in step)
    print(f"simulated; a device is one measured process; {ANSWERS:,} answers a step, mean {mean:.0f} tokens\n")
    print("| lengths | devices | " + " | ".join(f"k={k}: s, used, trainers" for k in STALENESS) + " |")
    print("|---|---|" + "---|" * len(STALENESS))
    curves: dict[tuple[str, int], list[Any]] = {}
    for kind in ("even", "long"):
        lengths = tails(kind, ANSWERS, STEPS, mean, seed=0)
        for devices in DEVICES:
            cells = []
            for k in STALENESS:
                layout, found = best(times, devices, k, lengths, GROUP, run.prompt, ROWS)
                curves.setdefault((kind, k), []).append((devices, found.step, found.utilisation))
                split = "shared" if layout.shared else f"{layout.trainers}"
                cells.append(f"{found.step:.2f}, {found.utilisation:.0%}, {split}")
            print(f"| {kind} | {devices} | " + " | ".join(cells) + " |", flush=True)
    if figure is not None:
        draw(curves, figure)


def draw(curves: dict[tuple[str, int], list[Any]], file: Path) -> None:
    """Step time and utilisation against devices, a panel a kind of lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = ("even", "long")
    titles = {"even": "all answers alike", "long": "log-normal, sigma 1 (long tail)"}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey="row")
    for column, kind in enumerate(kinds):
        for k, style in zip(STALENESS, ("o-", "s--", "^-.", "x:"), strict=True):
            points = curves[kind, k]
            label = "synchronous, shared" if k == 0 else f"staleness {k}, split"
            axes[0][column].plot([p[0] for p in points], [p[1] for p in points], style, label=label, markersize=4)
            axes[1][column].plot([p[0] for p in points], [100 * p[2] for p in points], style, markersize=4)
        ideal = curves[kind, 0][0][1]
        axes[0][column].plot(DEVICES, [ideal / d for d in DEVICES], color="grey", linewidth=0.8, label="one device / n")
        axes[0][column].set(title=titles[kind], xscale="log", yscale="log")
        axes[1][column].set(xlabel="devices", ylim=(0, 105))
        axes[1][column].set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
        axes[1][column].minorticks_off()
        for row in axes:
            row[column].grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("device-seconds in use, %")
    axes[0][1].legend(fontsize=8)
    figure.suptitle("Simulated: 2,048 answers a step on devices like the one process measured", fontsize=11)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
