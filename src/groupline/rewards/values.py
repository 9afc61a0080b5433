"""From what a reward function returned to one finite number, or None, per row."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from groupline.records import Problem
from groupline.rewards.contract import Reward, RewardError


def checked(name: str, result: Any, problems: Sequence[Problem], first: int = 0) -> list[float | None]:
    """The values as floats. first: the batch's row of the first problem.

    Raises:
        RewardError: not a list, not one value per problem, or a value that is neither a finite number nor None.
    """
    expected = f"reward function {name!r} must return a list of {len(problems)} numbers or None"
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"{expected}; it returned {type(result).__name__}")
    if len(result) != len(problems):
        raise RewardError(f"{expected}; it returned {len(result)}")
    values = []
    for row, (value, problem) in enumerate(zip(result, problems, strict=True), first):
        try:
            values.append(number(value))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            where = f"row {row} (problem {problem.id!r})"
            raise RewardError(f"{expected}; {where} is {str(value)[:80]!r} ({type(value).__name__})") from None
    return values


def number(value: Any) -> float | None:
    """A finite float from any number or scalar (bool, numpy, torch), None from None; raises on all else."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise TypeError
    return float(value)


def total(rewards: Sequence[Reward], row: Mapping[str, float | None]) -> float | None:
    """The weighted sum of a row's values; None where no function of non-zero weight applies."""
    terms = [(r.weight, row[r.name]) for r in rewards if r.weight != 0]
    parts = [weight * value for weight, value in terms if value is not None]
    return sum(parts) if parts else None
