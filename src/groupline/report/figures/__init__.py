"""`groupline report --figures`: five figures as PNG and SVG. Those of a run are read from its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from groupline.report.figure import load_pyplot, save
from groupline.report.figures.estimators import draw_estimators
from groupline.report.figures.groups import draw_groups, example_groups, recorded_groups
from groupline.report.figures.models import draw_models
from groupline.report.figures.progress import draw_ability, draw_progress, read_ends, read_progress

ENDINGS = (".png", ".svg")


def write_figures(runs: Sequence[Path], folder: Path, say: Callable[[str], None] | None = None) -> list[Path]:
    """Write the figures into the folder, which is made if need be, and return their paths.

    ppo_to_grpo and kl_estimators need no run. two_groups, length_accuracy and ability are a run's: of a single run they lie
    in the folder itself, of several in one named after each. Without a run, and where a run has recorded no group of a
    kind, two_groups shows an example worked out. A run that has no step, or no evaluation before and after, lacks the
    figure of it; `say` hears which and why.

    ValueError: a path that holds no metrics.jsonl, or two runs of one name. ImportError naming the extra if matplotlib
    is missing.
    """
    pyplot = load_pyplot()
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise ValueError(f"{run} holds no metrics.jsonl, so it is not a run's folder")
    names = [run.resolve().name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several runs are called {', '.join(twice)}; their figures would lie in one folder")
    made = save(draw_models(pyplot), folder / "ppo_to_grpo", ENDINGS)
    made += save(draw_estimators(pyplot), folder / "kl_estimators", ENDINGS)
    if not runs:
        made += save(draw_groups(pyplot, example_groups()), folder / "two_groups", ENDINGS)
    for run, name in zip(runs, names, strict=True):
        made += _of_run(pyplot, run, folder / name if len(runs) > 1 else folder, say or (lambda line: None))
    return made


def _of_run(pyplot: object, run: Path, folder: Path, say: Callable[[str], None]) -> list[Path]:
    made = save(draw_groups(pyplot, recorded_groups(run)), folder / "two_groups", ENDINGS)
    if (rows := read_progress(run)).steps:
        made += save(draw_progress(pyplot, rows), folder / "length_accuracy", ENDINGS)
    else:
        say(f"no length_accuracy: {run} has no step yet")
    if (found := read_ends(run)) is not None:
        made += save(draw_ability(pyplot, found), folder / "ability", ENDINGS)
    else:
        say(f"no ability: {run} has no evaluation before and after in results.json")
    return made
