"""A task: where its problems come from and which rewards judge them, and the proof that the two fit together."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from groupline.records import Problem
from groupline.rewards import Reward, call_rewards, get_reward
from groupline.tasks import gym
from groupline.tasks.arithmetic import generate
from groupline.tasks.arithmetic_templates import Language, Split

ARITHMETIC_REWARDS = ("correct_number", "think_format", "language_share")


@dataclass(frozen=True, slots=True)
class Task:
    """A named source of problems with the names of the reward functions that judge answers to them.

    make: `make(split, count, seed)` returns the problems; the same arguments give the same list.
    """

    name: str
    make: Callable[[Split, int, int], list[Problem]]
    rewards: tuple[str, ...]

    def problems(self, split: Split, count: int, seed: int = 0) -> list[Problem]:
        """`count` different problems of the split; train and held-out problems never meet."""
        return self.make(split, count, seed)


def check_gold(task: Task, n: int, split: Split = "train", seed: int = 0) -> int:
    """Score the gold solutions of n problems and return n; each must earn 1.0 from every reward of the task.

    Raises:
        ValueError: a gold solution earns less; the message names the problem, the reward and what it gave.
    """
    problems = task.problems(split, n, seed)
    rewards = [Reward(name, get_reward(name)) for name in task.rewards]
    solutions = [str(problem.columns["solution"]) for problem in problems]
    scores = call_rewards(rewards, problems=problems, completions=solutions)
    for problem, solution, row in zip(problems, solutions, scores.rows, strict=True):
        for name, value in row.items():
            if value != 1.0:
                raise ValueError(f"gold solution of {problem.id!r} earns {value} from {name!r}, not 1.0: {solution!r}")
    return len(problems)


def get_task(name: str) -> Task:
    """The task called `name`: a built-in one, or `gym:NAME` for one of reasoning-gym.

    Raises:
        ImportError: reasoning-gym is needed and not installed.
        ValueError: there is no such task; the message names the nearest one.
    """
    if name.startswith(gym.PREFIX):
        own = name.removeprefix(gym.PREFIX)
        gym.check_name(own)
        return Task(name, partial(gym.gym_problems, own), gym.REWARDS)
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"there is no task {name!r}; the nearest is {nearest!r}. Tasks: {', '.join(TASKS)}, {gym.PREFIX}NAME"
        )
    return TASKS[name]


def _arithmetic(language: Language, split: Split, count: int, seed: int) -> list[Problem]:
    return generate(language, split, seed, count)


def _arithmetic_mixed(split: Split, count: int, seed: int) -> list[Problem]:
    """Thai, Chinese and English in turn; the problems of each language are those of its own task."""
    languages: tuple[Language, ...] = ("th", "zh", "en")
    each = [generate(language, split, seed, -(-count // 3)) for language in languages]
    return [problem for row in zip(*each, strict=True) for problem in row][:count]


TASKS: dict[str, Task] = {
    "arithmetic_th": Task("arithmetic_th", partial(_arithmetic, "th"), ARITHMETIC_REWARDS),
    "arithmetic_zh": Task("arithmetic_zh", partial(_arithmetic, "zh"), ARITHMETIC_REWARDS),
    "arithmetic_en": Task("arithmetic_en", partial(_arithmetic, "en"), ARITHMETIC_REWARDS),
    "arithmetic_mixed": Task("arithmetic_mixed", _arithmetic_mixed, ARITHMETIC_REWARDS),
}
