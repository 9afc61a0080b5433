"""Tasks of reasoning-gym by name: `gym:leg_counting` and a hundred others, made from a seed and judged by their own
scorers (https://github.com/open-thought/reasoning-gym).
"""

from __future__ import annotations

import difflib
import hashlib

from groupline.records import Problem
from groupline.rewards.gym import CLOSE, OPEN, import_gym
from groupline.tasks.arithmetic_templates import Split

PREFIX = "gym:"
REWARDS = ("gym_score", "think_format")
SYSTEM_PROMPT = f"Think inside <think>...</think>, then give the answer alone inside {OPEN}...{CLOSE}."
_HELD_OUT = 5  # one question in so many is held out
_TRIES = 20  # entries looked at for each problem asked for


def check_name(name: str) -> None:
    """Raises:
    ImportError: reasoning-gym is not installed.
    ValueError: it has no such task; the nearest ones are named.
    """
    names = sorted(import_gym("reasoning_gym.factory").DATASETS)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
        raise ValueError(f"reasoning-gym has no task {name!r}; the nearest of its {len(names)} are {', '.join(near)}")


def gym_problems(name: str, split: Split, count: int, seed: int) -> list[Problem]:
    """The first `count` different problems of a reasoning-gym task, with its standard difficulty.

    A question is held out, or not, by its text alone, so train and held-out problems never meet, whatever their seeds.
    Columns: `gym_task`, `gym_entry` (what the scorer needs), and `solution`, which earns every reward if the task has
    one right answer.

    Raises:
        ValueError: the task has fewer different problems.
    """
    gym = import_gym()
    problems: list[Problem] = []
    seen: set[str] = set()
    size = _HELD_OUT * count + 20
    for chunk in range(_TRIES):
        start = (seed * 1_000_003 + chunk * size) % 2**31  # entry i of a task is drawn from its seed + i
        for entry in gym.create_dataset(name, seed=start, size=size):
            question = str(entry["question"])
            if question in seen or _is_held_out(question) != (split == "held_out"):
                continue
            seen.add(question)
            problems.append(_problem(name, f"gym-{name}-{split}-{seed}-{len(problems):06d}", question, entry))
            if len(problems) == count:
                return problems
    raise ValueError(
        f"task {PREFIX}{name} has only {len(problems)} different {split} problems where {count} are asked for"
    )


def _problem(name: str, problem_id: str, question: str, entry: dict[str, object]) -> Problem:
    gold = "" if entry["answer"] is None else str(entry["answer"])
    return Problem(
        id=problem_id,
        prompt=({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.strip()}),
        answer=gold,
        columns={
            "gym_task": name,
            "gym_entry": entry,
            "solution": f"<think>I work it out step by step.</think>\n{OPEN}{gold}{CLOSE}",
        },
    )


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT == 0
