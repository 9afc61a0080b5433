"""`log_completions`: answers with their rewards and advantages, as a table on the terminal."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from groupline.records import Group, Problem


def print_completions(groups: Sequence[Group], advantages: Sequence[float], step: int, most: int | None) -> None:
    """A row an answer: prompt, answer, each reward, advantage, and what functions gave to `log_extra`.

    advantages: one an answer, group by group. most: so many, drawn from all; None prints all.
    """
    answers = [(group, rollout) for group in groups for rollout in group.rollouts]
    chosen = list(range(len(answers)))
    if most is not None and most < len(answers):
        chosen = sorted(random.Random(step).sample(chosen, max(0, most)))
    if not chosen:
        return
    names = list(answers[0][1].rewards)
    extras = list(dict.fromkeys(name for _, rollout in answers for name in rollout.extras))
    table = Table("Prompt", "Completion", *names, "Advantage", *extras, expand=True, show_lines=True)
    for place in chosen:
        group, rollout = answers[place]
        scores = ["-" if (value := rollout.rewards[name]) is None else f"{value:.2f}" for name in names]
        more = [Text(str(rollout.extras.get(name, ""))) for name in extras]
        table.add_row(Text(words(group.problem)), Text(rollout.text), *scores, f"{advantages[place]:.2f}", *more)
    Console().print(Panel(table, title=f"Step {step}", expand=False))


def words(problem: Problem) -> str:
    """The prompt as one text, a conversation with its roles."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(f"{m['role'].upper()}\n{m['content']}" for m in problem.prompt)
