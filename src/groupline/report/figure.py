"""What figures have in common: how matplotlib is loaded, colours, and saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLUE, ORANGE, GREEN, GREY = "#2563a8", "#c2571a", "#2e7d4f", "#8a8a8a"


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files only. ImportError naming the extra if it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'groupline[plot]'") from error
    return pyplot


def save(figure: Any, path: Path, endings: Sequence[str] = (".png",)) -> list[Path]:
    """Write the figure under the path with each of the endings, and close it; the paths written."""
    from matplotlib import pyplot, rc_context

    figure.tight_layout()
    made = [path.with_suffix(ending) for ending in endings]
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.stem}):  # the same numbers give the same file
        for target in made:
            figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)
    return made


def draw_pass_at_k(axis: Any, curves: Sequence[tuple[str, dict[str, Any], str]]) -> list[int]:
    """pass@k with bootstrap bands over a logarithmic k; returns the k. curves: (label, {"pass@k": ...}, colour)."""
    ks: list[int] = []
    for label, found, colour in curves:
        ks = sorted(int(k.removeprefix("pass@")) for k in found if k.startswith("pass@"))
        values = [found[f"pass@{k}"]["value"] for k in ks]
        low, high = zip(*(found[f"pass@{k}"]["bootstrap"] for k in ks), strict=True)
        axis.fill_between(ks, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(ks, values, color=colour, marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, [str(k) for k in ks])
    axis.set(xlabel="k", ylabel="pass@k", ylim=(0, 1))
    return ks
