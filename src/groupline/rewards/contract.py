"""Reward functions and the one place that calls them.

The contract is TRL's (https://huggingface.co/docs/trl/grpo_trainer, "Using a custom reward function"): a function is
called with keywords only, each a whole column, and returns one number per completion, or None where it does not apply.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from groupline.records import Problem

RESERVED = ("prompts", "completions", "completion_ids", "answer")


class RewardFunction(Protocol):
    """`function(*, prompts, completions, completion_ids, answer, **columns)`: one value per completion."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class RewardError(ValueError):
    """A reward function failed or broke the contract; the message names the function and, where known, the row."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, the name that it is logged under, and its weight in the sum.

    A function of weight 0 is recorded and does not count in the sum.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.name!r} is {self.weight}; it must be a finite number")


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reward functions said of each completion, in order.

    rows: the value of each function by name, None where it does not apply.
    totals: the weighted sum of each row's values; None where no function of non-zero weight applies.
    errors: how many rows each function failed on, when failing rows were asked to be skipped.
    """

    rows: tuple[Mapping[str, float | None], ...]
    totals: tuple[float | None, ...]
    errors: Mapping[str, int] = field(default_factory=dict)


def call_rewards(
    rewards: Sequence[Reward],
    *,
    problems: Sequence[Problem],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    missing: Literal["error", "none"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
) -> Scores:
    """Score every completion with every function.

    problems: the problem of each completion, repeated for each of its answers. completions: their texts; a function
    receives them as `[{"role": "assistant", "content": text}]` where the prompt is a conversation.
    completion_ids: their token ids. columns: further columns, one value per completion, such as `prefill`.
    missing: a column that only some problems have is an error, or None in the others.
    on_error: an exception in a function stops the run, or makes the rows that raise not applicable and counts them; to
    find those rows the function is called again on each row alone.

    A function receives every column, or, when it does not take `**kwargs`, those that it names.

    Raises:
        RewardError: a function raises, or returns the wrong number of values, or something that is not a finite
            number or None; a column takes a reserved name, is missing in a row, or has the wrong length.
    """
    names = [reward.name for reward in rewards]
    if len(set(names)) != len(names):
        raise RewardError(f"reward names must differ; they are {', '.join(names)}")
    table = _table(problems, completions, completion_ids, columns or {}, missing)
    values: dict[str, list[float | None]] = {}
    errors: dict[str, int] = {}
    for reward in rewards:
        try:
            values[reward.name] = _call(reward, table, problems)
        except _FunctionError as raised:
            by_row, first = _row_by_row(reward, table, problems)
            if on_error == "raise" or first is None:
                where = "on the whole batch, though on no row alone" if first is None else f"on {first[0]}"
                cause = raised.cause if first is None else first[1]
                message = f"reward function {reward.name!r} raised {type(cause).__name__} {where}: {cause}"
                raise RewardError(message) from cause
            values[reward.name], errors[reward.name] = by_row
    rows = tuple({name: values[name][i] for name in names} for i in range(len(completions)))
    return Scores(rows, tuple(_total(rewards, row) for row in rows), errors)


class _FunctionError(Exception):
    """Carries an exception out of a user's function, apart from the contract's own errors."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _table(
    problems: Sequence[Problem],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None,
    columns: Mapping[str, Sequence[Any]],
    missing: str,
) -> dict[str, list[Any]]:
    """Every keyword that a function may receive, as a column with one value per completion."""
    talks = [not isinstance(problem.prompt, str) for problem in problems]
    given: dict[str, Sequence[Any]] = {"completions": completions, **columns}
    if completion_ids is not None:
        given["completion_ids"] = completion_ids
    for name, column in given.items():
        if len(column) != len(problems):
            raise RewardError(f"{name} has {len(column)} rows for {len(problems)} problems")
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    taken = sorted(set(RESERVED) & {*names, *columns}) + sorted(set(names) & set(columns))
    if taken:
        raise RewardError(f"columns may not be called {', '.join(taken)}: reward functions receive those by themselves")
    table: dict[str, list[Any]] = {
        "prompts": [[dict(m) for m in p.prompt] if not isinstance(p.prompt, str) else p.prompt for p in problems],
        "completions": [
            [{"role": "assistant", "content": text}] if talk else text
            for talk, text in zip(talks, completions, strict=True)
        ],
        "completion_ids": [list(ids) for ids in completion_ids] if completion_ids else [[] for _ in problems],
        "answer": [problem.answer for problem in problems],
    }
    for name in names:
        for row, problem in enumerate(problems):
            if missing == "error" and name not in problem.columns:
                raise RewardError(
                    f"column {name!r} is missing in row {row} (problem {problem.id!r}), which has "
                    f"{', '.join(problem.columns) or 'no columns'}; fill it in, or ask for None in its place"
                )
        table[name] = [problem.columns.get(name) for problem in problems]
    return table | {name: list(column) for name, column in columns.items()}


def _call(reward: Reward, table: Mapping[str, list[Any]], problems: Sequence[Problem]) -> list[float | None]:
    columns = _accepted(reward, table)
    try:
        result = reward.function(**columns)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except Exception as cause:
        raise _FunctionError(cause) from cause
    return _checked(reward.name, result, problems)


def _accepted(reward: Reward, table: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Copies of the columns that the function takes, so that no function can change what the next one sees."""
    parameters = inspect.signature(reward.function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    if needed - set(table):
        raise RewardError(
            f"reward function {reward.name!r} needs {', '.join(sorted(needed - set(table)))}; "
            f"the columns are {', '.join(table)}"
        )
    return {
        name: copy.deepcopy(column) if name in ("prompts", "completions") else list(column)
        for name, column in table.items()
        if takes_all or name in named
    }


def _row_by_row(
    reward: Reward, table: Mapping[str, list[Any]], problems: Sequence[Problem]
) -> tuple[tuple[list[float | None], int], tuple[str, Exception] | None]:
    """Call the function on each row alone: (values with None where it raises, how many), and the first that raises."""
    values: list[float | None] = []
    first: tuple[str, Exception] | None = None
    failed = 0
    for row, problem in enumerate(problems):
        try:
            values += _call(reward, {name: [column[row]] for name, column in table.items()}, [problem])
        except _FunctionError as raised:
            first = first or (f"row {row} (problem {problem.id!r})", raised.cause)
            values.append(None)
            failed += 1
    return (values, failed), first


def _checked(name: str, result: Any, problems: Sequence[Problem]) -> list[float | None]:
    expected = f"reward function {name!r} must return a list of {len(problems)} numbers or None"
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"{expected}; it returned {type(result).__name__}")
    if len(result) != len(problems):
        raise RewardError(f"{expected}; it returned {len(result)}")
    values = []
    for row, (value, problem) in enumerate(zip(result, problems, strict=True)):
        try:
            values.append(_number(value))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            where = f"row {row} (problem {problem.id!r})"
            raise RewardError(f"{expected}; {where} is {str(value)[:80]!r} ({type(value).__name__})") from None
    return values


def _number(value: Any) -> float | None:
    """A finite float from any number or scalar (bool, numpy, torch), None from None; raises on all else."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _total(rewards: Sequence[Reward], row: Mapping[str, float | None]) -> float | None:
    terms = [(r.weight, row[r.name]) for r in rewards if r.weight != 0]
    parts = [weight * value for weight, value in terms if value is not None]
    return sum(parts) if parts else None
