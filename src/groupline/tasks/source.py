"""Where a run's problems come from: the files that its settings name, or else a built-in task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from groupline.config import RunSettings
from groupline.records import Problem
from groupline.tasks.arithmetic_templates import Split
from groupline.tasks.problems import read_problems
from groupline.tasks.task import get_task


def training_problems(settings: RunSettings, count: int) -> list[Problem]:
    """At most `count` training problems."""
    return _problems(settings, settings.train_file, "train", count)


def held_out_problems(settings: RunSettings, count: int) -> list[Problem]:
    """At most `count` held-out problems; from `eval_file` if given. A run on a file of its own needs one."""
    if count and settings.train_file and not settings.eval_file:
        raise ValueError(
            "train_file is set but eval_file is not: there are no held-out problems to measure on; "
            "give eval_file, or set eval_problems to 0"
        )
    return _problems(settings, settings.eval_file, "held_out", count)


def _problems(settings: RunSettings, file: str | None, split: Split, count: int) -> list[Problem]:
    if count == 0:
        return []
    if file is None:
        return get_task(settings.task).problems(split, count, settings.data_seed)
    place = "train" if split == "train" else "test"  # what the splits of published data sets are called
    found = read_problems(
        file,
        prompt=settings.prompt_column,
        answer=settings.answer_column,
        system=settings.system_prompt,
        split=place,
        count=count,
    )
    if not found:
        raise ValueError(f"{file} holds no problems")
    return found


def given_problems(settings: RunSettings, source: Iterable[Any]) -> list[Problem]:
    """Problems passed in by the caller: `Problem`s, or rows such as dicts or a `datasets.Dataset`, read by the settings."""
    return read_problems(
        source, prompt=settings.prompt_column, answer=settings.answer_column, system=settings.system_prompt
    )
