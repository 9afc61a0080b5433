"""verl's form of a reward function, `compute_score(data_source, solution_str, ground_truth, extra_info)`, adapted.

Such a function judges one answer and returns a number, or a mapping whose `score` is the number and whose other
entries are recorded. It is known by its parameter names.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupline.rewards.contract import Reward, RewardError, RewardFunction
from groupline.rewards.running import is_async
from groupline.rewards.text import CompletionLike, completion_text

FILLED = ("data_source", "solution_str", "ground_truth", "extra_info")
GOLD = "reward_model.ground_truth"


def adapted(name: str, function: RewardFunction) -> RewardFunction:
    """The function itself, or, if it judges one answer, one that judges whole columns with it.

    Raises:
        RewardError: it judges one answer and needs a parameter that is none of the four.
    """
    takes = _takes(function)
    if takes is None:
        return function
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty and p.name not in FILLED]
    if needed:
        raise RewardError(
            f"reward function {name!r} judges one answer and needs {', '.join(needed)}; such a function receives "
            f"{', '.join(FILLED)}; give the others a default"
        )
    if is_async(function):

        async def call_async(
            *, completions: Sequence[CompletionLike], answer: Sequence[str], log_extra: Log, **columns: Any
        ) -> list[Any]:
            calls = [function(**s) for s in _samples(takes, completions, answer, columns)]
            return _scores(await asyncio.gather(*calls), log_extra)

        return call_async

    def call(
        *, completions: Sequence[CompletionLike], answer: Sequence[str], log_extra: Log, **columns: Any
    ) -> list[Any]:
        return _scores([function(**s) for s in _samples(takes, completions, answer, columns)], log_extra)

    return call


Log = Callable[[str, Sequence[Any]], None]


def reward_notes(rewards: Sequence[Reward]) -> list[str]:
    """A line for each function that is not called as written, saying how it is."""
    return [
        f"reward function {r.name!r} is called once for each answer, with {', '.join(takes)} (verl's form, known by its "
        "parameter names)"
        for r in rewards
        if (takes := _takes(r.function))
    ]


def _takes(function: RewardFunction) -> tuple[str, ...] | None:
    """Which of the four a per-sample function takes; None for a function of whole columns."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        return None
    if "solution_str" not in names or "completions" in names:
        return None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return tuple(name for name in FILLED if takes_all or name in names)


def _samples(
    takes: Sequence[str], completions: Sequence[CompletionLike], answer: Sequence[str], columns: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The keywords of each answer's own call."""
    rows = []
    for row, completion in enumerate(completions):
        own = {name: values[row] for name, values in columns.items() if isinstance(values, list)}
        judge = own.get("reward_model")
        nested = judge.get("ground_truth") if isinstance(judge, Mapping) else None
        found = (nested, own.get(GOLD), own.get("ground_truth"), answer[row])
        filled = {
            "data_source": own.get("data_source") or "",
            "solution_str": completion_text(completion),
            "ground_truth": next(gold for gold in found if gold is not None),
            "extra_info": dict(own.get("extra_info") or {}),
        }
        rows.append({name: filled[name] for name in takes})
    return rows


def _scores(results: Sequence[Any], log_extra: Log) -> list[Any]:
    """The number of each result; what else the results hold goes to `log_extra`, None where a row has none of it."""
    tables = [r if isinstance(r, Mapping) else {"score": r} for r in results]
    for table in tables:
        if "score" not in table:
            raise ValueError(
                f"it returned a mapping without 'score'; its keys are {', '.join(map(str, table)) or 'none'}"
            )
    for key in dict.fromkeys(key for table in tables for key in table):
        if key != "score":
            log_extra(str(key), [table.get(key) for table in tables])
    return [table["score"] for table in tables]
