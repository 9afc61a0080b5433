"""From problems and answers to the columns that a reward function receives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from groupline.records import Problem
from groupline.rewards.contract import RewardError, RewardFunction
from groupline.rewards.text import CompletionLike

HANDED = ("log_extra", "log_metric", "trainer_state")  # not columns: one for the whole call
# `self` would be given twice to a function that is an object's method.
RESERVED = ("prompts", "completions", "completion_ids", "answer", "self", *HANDED)

Table = dict[str, list[Any]]


def make_table(
    problems: Sequence[Problem],
    completions: Sequence[CompletionLike],
    completion_ids: Sequence[Sequence[int]] | None,
    columns: Mapping[str, Sequence[Any]],
    missing: str,
) -> Table:
    """Every column that a function may receive, with one value per completion.

    Raises:
        RewardError: a column takes a reserved name, is missing in a row, or has the wrong length.
    """
    given: dict[str, Sequence[Any]] = {"completions": completions, **columns}
    if completion_ids is not None:
        given["completion_ids"] = completion_ids
    for name, column in given.items():
        if len(column) != len(problems):
            raise RewardError(f"{name} has {len(column)} rows for {len(problems)} problems")
    names = column_names(problems, tuple(columns), missing)
    table: Table = {
        "prompts": [[dict(m) for m in p.prompt] if not isinstance(p.prompt, str) else p.prompt for p in problems],
        "completions": [_shaped(p, c) for p, c in zip(problems, completions, strict=True)],
        "completion_ids": [list(ids) for ids in completion_ids] if completion_ids else [[] for _ in problems],
        "answer": [problem.answer for problem in problems],
    }
    for name in names:
        table[name] = [problem.columns.get(name) for problem in problems]
    return table | {name: list(column) for name, column in columns.items()}


def column_names(problems: Sequence[Problem], given: Sequence[str] = (), missing: str = "error") -> list[str]:
    """The columns of these problems. given: those that come from elsewhere.

    Raises:
        RewardError: a column takes a reserved or given name, or is missing in a row.
    """
    names = list(dict.fromkeys(name for problem in problems for name in problem.columns))
    taken = sorted(set(RESERVED) & {*names, *given}) + sorted(set(names) & set(given))
    if taken:
        raise RewardError(f"columns may not be called {', '.join(taken)}: reward functions receive those by themselves")
    for name in names if missing == "error" else ():
        for row, problem in enumerate(problems):
            if name not in problem.columns:
                raise RewardError(
                    f"column {name!r} is missing in row {row} (problem {problem.id!r}), which has "
                    f"{', '.join(problem.columns) or 'no columns'}; fill it in, or ask for None in its place"
                )
    return names


def _shaped(problem: Problem, completion: CompletionLike) -> Any:
    """A text under a plain prompt, and a list of messages under a conversation."""
    if not isinstance(completion, str):
        return [dict(m) for m in completion]
    return completion if isinstance(problem.prompt, str) else [{"role": "assistant", "content": completion}]


def accepted(name: str, function: RewardFunction, table: Table, handed: Mapping[str, Any]) -> dict[str, Any]:
    """What the function takes of the table and of what is handed to it.

    The columns are copies, so that no function can change what the next one sees.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    if missing := needed - set(table) - set(handed):
        raise RewardError(
            f"reward function {name!r} needs {', '.join(sorted(missing))}; the columns are {', '.join(table)}"
        )
    taken = {
        column: copy.deepcopy(values) if column in ("prompts", "completions") else list(values)
        for column, values in table.items()
        if takes_all or column in named
    }
    return taken | {n: v for n, v in handed.items() if n in named or (takes_all and v is not None)}
