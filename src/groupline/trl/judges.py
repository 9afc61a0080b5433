"""Reward functions as TRL's trainer takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from groupline.config import ConfigError
from groupline.rewards import Reward
from groupline.rewards.registry import BUILT_IN


def judges(functions: Any, weights: Sequence[float] | None, state: Callable[[], Any]) -> list[Reward]:
    """Rewards of one function or a list. state: gives the `trainer_state` that functions receive if they take it.

    ConfigError: no function, a reward model in its place, or weights that are not one each.
    """
    given = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not given or given == [None]:
        raise ConfigError("reward_funcs is empty; give at least one function f(completions, **columns)")
    if weights is not None and len(weights) != len(given):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(given)} reward_funcs; give one for each")
    found: list[Reward] = []
    for place, item in enumerate(given):
        function = BUILT_IN.get(item) if isinstance(item, str) else item
        if not callable(function) or hasattr(function, "get_input_embeddings"):
            raise ConfigError(
                f"reward_funcs[{place}] is {item if isinstance(item, str) else type(item).__name__!r}; reward models are "
                f"not taken: give a function that calls the model, or one of {', '.join(BUILT_IN)}"
            )
        name = base = _name(function)
        number = 2
        while name in [r.name for r in found]:
            name, number = f"{base}_{number}", number + 1
        weight = 1.0 if weights is None else float(weights[place])
        found.append(Reward(name, _with_state(function, state), weight))
    return found


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _with_state(function: Any, state: Callable[[], Any]) -> Any:
    """The function, given `trainer_state` if it takes it; its other parameters are the contract's business."""
    signature = inspect.signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_all and "trainer_state" not in signature.parameters:
        return function

    def call(**columns: Any) -> Any:
        return function(**columns | {"trainer_state": state()})

    async def later(**columns: Any) -> Any:
        return await function(**columns | {"trainer_state": state()})

    taken: Any = later if inspect.iscoroutinefunction(function) else call
    rest = [p for name, p in signature.parameters.items() if name != "trainer_state"]
    taken.__signature__ = signature.replace(parameters=rest)
    return taken
