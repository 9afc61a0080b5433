"""From a name in a recipe to a reward function."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from groupline.rewards.contract import Reward, RewardFunction
from groupline.rewards.format import naive_think_format, think_format
from groupline.rewards.gym import gym_score
from groupline.rewards.language import language_share
from groupline.rewards.mathematics import math_verify
from groupline.rewards.number import correct_number

BUILT_IN: dict[str, RewardFunction] = {
    "correct_number": correct_number,
    "gym_score": gym_score,
    "language_share": language_share,
    "math_verify": math_verify,
    "naive_think_format": naive_think_format,
    "think_format": think_format,
}


def get_reward(name: str) -> RewardFunction:
    """The reward function called `name`: a built-in, `package.module.function`, or `path/to/file.py:function`.

    The last two import the user's own code, so a recipe that names one must be trusted as code is.

    Raises:
        ValueError: there is no such function; the message names the nearest built-in.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _attribute(_module_from_file(Path(path), name), attribute, name)
    module, _, attribute = name.rpartition(".")
    if module and importlib.util.find_spec(module.partition(".")[0]):
        try:
            return _attribute(importlib.import_module(module), attribute, name)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or ""):
                raise
    nearest = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"there is no reward function {name!r}; the nearest built-in is {nearest!r}. Accepted are "
        f"{', '.join(BUILT_IN)}, 'package.module.function' and 'path/to/file.py:function'"
    )


def _module_from_file(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"groupline_reward_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"reward {name!r}: there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: Any, attribute: str, name: str) -> RewardFunction:
    function = getattr(module, attribute, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"reward {name!r}: {attribute!r} is not a function there; these are: {', '.join(there)}")
    return cast(RewardFunction, function)


CUSTOMARY_WEIGHTS = {"correct_number": 1.0, "think_format": 0.3, "naive_think_format": 0.3, "language_share": 0.2}


def reward_list(
    rewards: Sequence[str | RewardFunction | Reward],
    weights: Sequence[float] | None = None,
    timeouts: Sequence[float | None] | None = None,
) -> list[Reward]:
    """Rewards from names, functions and rewards. Of two functions with one name, the second's ends in `_2`.

    weights: in place of the customary weight of each built-in, and 1 for any other; a `Reward` without weights here
    keeps its own. timeouts: most seconds of one call, None for no limit; a run whose reward takes longer stops.

    Raises:
        ValueError: there is no function of that name, or not one weight or timeout for each.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"{len(weights)} reward weights for {len(rewards)} reward functions; give one for each")
    if timeouts is not None and len(timeouts) != len(rewards):
        raise ValueError(f"{len(timeouts)} reward timeouts for {len(rewards)} reward functions; give one for each")
    made: list[Reward] = []
    for i, given in enumerate(rewards):
        if isinstance(given, Reward):
            made.append(given if weights is None else dataclasses.replace(given, weight=weights[i]))
            continue
        weight = 1.0 if weights is None else weights[i]
        if isinstance(given, str):
            customary = weight if weights is not None else CUSTOMARY_WEIGHTS.get(given, 1.0)
            made.append(Reward(given, get_reward(given), customary))
        else:
            made.append(Reward(_free(_name(given), {r.name for r in made}), given, weight))
    if timeouts is not None:
        made = [dataclasses.replace(reward, timeout=limit) for reward, limit in zip(made, timeouts, strict=True)]
    return made


def _free(name: str, taken: set[str]) -> str:
    """The name, or with a number behind it if it is taken."""
    return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def _name(function: RewardFunction) -> str:
    """A function's own name, that of what a partial calls, or an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
