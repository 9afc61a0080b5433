"""The reward functions of a run, and whether the gold answers can be judged by them."""

from __future__ import annotations

from collections.abc import Sequence

from groupline.config import Config, ConfigError
from groupline.records import Problem
from groupline.rewards import MathVerify, Reward, soft_overlong, unreadable_answers
from groupline.rewards.registry import reward_list
from groupline.tasks.task import get_task


def judges_of(config: Config, given: Sequence[Reward] | None = None) -> list[Reward]:
    """What is given, or else what the configuration names, or its task's own; and what it says of length."""
    names = config.rewards
    if names is None:
        names = ("correct_number",) if config.train_file else get_task(config.task).rewards
    if given is None and config.reward_weights is not None and len(config.reward_weights) != len(names):
        raise ConfigError(f"{len(config.reward_weights)} reward_weights for the rewards {', '.join(names)}")
    judges = list(reward_list(names, config.reward_weights, config.reward_timeouts) if given is None else given)
    if config.overlong_buffer:
        judges.append(Reward("soft_overlong", soft_overlong(config.max_completion_length, config.overlong_buffer)))
    return judges


def check_gold(judges: Sequence[Reward], problems: Sequence[Problem]) -> None:
    """ConfigError naming the problems whose gold answer a built-in judge could not read."""
    answers = [p.answer for p in problems]
    for judge in judges:
        if judge.name == "correct_number":
            rows, lack = unreadable_answers(answers), "hold no number"
        elif isinstance(judge.function, MathVerify):
            rows, lack = judge.function.unreadable_answers(answers), "cannot be read as mathematics"
        else:
            continue
        if rows:
            shown = ", ".join(f"{problems[r].id} ({problems[r].answer!r})" for r in rows[:5])
            raise ConfigError(
                f"the gold answers of {len(rows)} problems {lack}, so {judge.name} cannot judge them: {shown}"
            )
