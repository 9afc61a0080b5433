"""The scorers of reasoning-gym (https://github.com/open-thought/reasoning-gym) as a reward function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from groupline.rewards.text import CompletionLike, after_thinking, whole_texts

OPEN, CLOSE = "<answer>", "</answer>"


def gym_score(
    *,
    completions: Sequence[CompletionLike],
    gym_task: Sequence[str | None],
    gym_entry: Sequence[Mapping[str, Any] | None],
    prefill: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """What the task's own scorer gives, 0 to 1; None for a problem that is not from reasoning-gym.

    The scorer is given the inside of the last `<answer>...</answer>` after the thinking, or all that follows the
    thinking if there is none; thinking that stays open is no answer.
    gym_task: the task's name. gym_entry: the problem as reasoning-gym made it. The tasks `gym:...` bring both.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such task.
    """
    texts = whole_texts(completions, prefill)
    return [
        None if name is None or entry is None else float(_scorer(name)(_answer(text), dict(entry)))
        for text, name, entry in zip(texts, gym_task, gym_entry, strict=True)
    ]


def import_gym(module: str = "reasoning_gym") -> Any:
    """A module of reasoning-gym, or an ImportError that says how to get it."""
    try:
        import reasoning_gym  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ImportError("tasks called gym:NAME need reasoning-gym: pip install 'groupline[gym]'") from None
    return importlib.import_module(module)


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str | None, dict[str, Any]], float]:
    scorer: Callable[[str | None, dict[str, Any]], float] = import_gym().get_score_answer_fn(name)
    return scorer


def _answer(text: str) -> str | None:
    said = after_thinking(text)
    if said is None:
        return None
    start = said.rfind(OPEN)
    if start < 0:
        return said.strip()
    return said[start + len(OPEN) :].partition(CLOSE)[0].strip()
