"""The comparison of two models' pass@k curves, from the JSON that `groupline eval --out` wrote: table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupline.report.figure import BLUE, GREEN, GREY, ORANGE, draw_pass_at_k, load_pyplot, save
from groupline.runlog import read_json

SHOWN = 8  # problems named in the table


def ability_table(found: dict[str, Any]) -> str:
    """The curves, how problems moved, which were gained and lost, and the verdict, as text."""
    lines = [
        f"{found['problems']} held-out problems, {found['samples']} answers each, same draws; intervals: 95% bootstrap "
        "over problems",
        f"before: {found['models']['before']}",
        f"after:  {found['models']['after']}",
        "",
        f"{'':10}{'before':>7}  {'':<16}{'after':>7}  {'':<16}{'after - before':>14}",
    ]
    for key, difference in found["difference"].items():
        cells = [
            f"{c['value']:>7.1%}  {_range(c['bootstrap']):<16}" for c in (found["before"][key], found["after"][key])
        ]
        low, high = difference["bootstrap"]
        beyond = "" if low <= 0 <= high else " *"
        lines.append(f"{key:<10}{''.join(cells)}{difference['value']:>+8.1%}  ({low:+.1%} to {high:+.1%}){beyond}")
    crossed = found["crossing"]
    lines += ["(* the paired interval leaves out 0)", ""]
    lines.append("the curves do not cross" if crossed is None else f"the curves cross at k = {crossed}")
    moves = found["flips"]
    classes = list(moves["table"])
    lines += ["", "problems solved (mostly: in half of the answers or more), rows before, columns after"]
    lines.append(f"{'':12}" + "".join(f"{name:>11}" for name in classes))
    lines += [f"{name:<12}" + "".join(f"{moves['table'][name][to]:>11}" for to in classes) for name in classes]
    lines.append(f"clearly better {moves['clearly_better']}, clearly worse {moves['clearly_worse']} (Fisher, Holm 5%)")
    for key, text in (("gained", "never solved before, solved after"), ("lost", "solved before, never after")):
        rows = moves[key]
        named = ", ".join(f"{r['id']} ({r['before']} -> {r['after']}{'*' * r['beyond_noise']})" for r in rows[:SHOWN])
        more = f", and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        lines.append(f"{text}: {len(rows)}{': ' if rows else ''}{named}{more}")
    return "\n".join([*lines, "", found["verdict"]["text"]])


def write_ability(file: Path) -> list[Path]:
    """The figure beside the JSON file, as PNG and SVG: the curve or curves, and how problems moved.

    Raises ImportError naming the extra if matplotlib is missing.
    """
    pyplot = load_pyplot()
    found = read_json(file)
    if "verdict" not in found:
        figure, axis = pyplot.subplots(figsize=(7, 4.2))
        draw_pass_at_k(axis, [(Path(found["model"]).name, found, BLUE)])
        axis.set_title(f"pass@k, {found['problems']} problems, {found['samples']} answers each (band: 95% bootstrap)")
        return save(figure, file, (".png", ".svg"))
    figure, (axis, bars) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2))
    draw_pass_at_k(axis, [("before", found["before"], GREY), ("after", found["after"], BLUE)])
    if found["crossing"] is not None:
        axis.axvline(found["crossing"], color=ORANGE, linewidth=1, linestyle=":", label=f"cross at {found['crossing']}")
    axis.set_title(f"{found['problems']} problems, {found['samples']} answers each (bands: 95% bootstrap)", fontsize=10)
    axis.legend(frameon=False, loc="lower right")
    table = found["flips"]["table"]
    bottom = [0, 0]
    for name, colour in zip(table, (ORANGE, GREY, GREEN), strict=True):
        counts = [sum(table[name].values()), sum(row[name] for row in table.values())]
        drawn = bars.bar(["before", "after"], counts, bottom=bottom, color=colour, alpha=0.75, label=name, width=0.6)
        bars.bar_label(drawn, [str(c) if c else "" for c in counts], label_type="center")
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    gained, lost = len(found["flips"]["gained"]), len(found["flips"]["lost"])
    bars.set_title(f"problems by how often solved ({gained} gained, {lost} lost)", fontsize=10)
    bars.set_ylabel("problems")
    bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=9)
    figure.suptitle(f"Verdict: {found['verdict']['label']}")
    return save(figure, file, (".png", ".svg"))


def _range(interval: list[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"
