"""Reward functions: what they are, what they are told of the run, and what comes of them.

The contract is TRL's (https://huggingface.co/docs/trl/grpo_trainer, "Using a custom reward function"): a function is
called with keywords only, each a whole column, and returns one number per completion, or None where it does not apply.
`judging.py` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class RewardFunction(Protocol):
    """`function(*, prompts, completions, completion_ids, answer, **columns)`: one value per completion."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class RewardError(ValueError):
    """A reward function failed or broke the contract; the message names the function and, where known, the row."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, the name that it is logged under, its weight in the sum, and how it is called.

    A function of weight 0 is recorded and does not count in the sum.
    timeout: most seconds that one call may take; None is no limit. on_timeout: after it the run stops, or the call's
    rows are not applicable and counted. A sync function's thread cannot be ended and goes on unheard.
    by_group: called once for each group instead of once for the batch, as soon as the group's answers are complete,
    while others are still being decoded.
    main_thread: a sync function that must not run in a thread of its own, such as one that sets signals.

    Raises:
        ValueError: the weight is not finite, the timeout is not positive, or main_thread stands beside one of the two
            that need a thread.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout: float | None = None
    on_timeout: Literal["error", "none"] = "error"
    by_group: bool = False
    main_thread: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.name!r} is {self.weight}; it must be a finite number")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(
                f"the timeout of reward {self.name!r} is {self.timeout}; it must be seconds above 0, or None"
            )
        if self.on_timeout not in ("error", "none"):
            raise ValueError(f"on_timeout of reward {self.name!r} is {self.on_timeout!r}; it must be 'error' or 'none'")
        if self.main_thread and (self.timeout is not None or self.by_group):
            beside = "a timeout" if self.timeout is not None else "by_group"
            raise ValueError(f"reward {self.name!r} has main_thread and {beside}, which needs a thread of its own")


@dataclass(frozen=True, slots=True)
class RunState:
    """Where the run stands, under the names of transformers' `TrainerState`; functions receive it as `trainer_state`.

    global_step: optimiser steps done. epoch: passes over the problems, in fractions.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reward functions said of each completion, in order.

    rows: the value of each function by name, None where it does not apply.
    totals: the weighted sum of each row's values; None where no function of non-zero weight applies.
    errors: how many rows each function failed on, when failing rows were asked to be skipped.
    extras: what the functions gave to `log_extra` for each row, by column.
    metrics: what they gave to `log_metric`, the mean by name.
    timeouts: how many rows each function with on_timeout "none" ran out of time on.
    """

    rows: tuple[Mapping[str, float | None], ...]
    totals: tuple[float | None, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    extras: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
