"""Arguments of a command: settings from a recipe and from `--key value`, and switches beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from groupline.config import ConfigError, Settings, explain_unknown, read_recipe

S = TypeVar("S", bound=Settings)


def settings(kind: type[S], args: Sequence[str], **defaults: Any) -> S:
    """CONFIG.yaml, if the first argument is one, then `--key value` over it. Wrong keys are named with the right one."""
    values = dict(defaults)
    fast, rest = switch(args, "fast")
    if rest and not rest[0].startswith("-"):
        values |= read_recipe(Path(rest.pop(0)), kind.model_fields, fast)
    elif fast:
        raise ConfigError("--fast takes the fast_settings of a recipe, and no recipe is given")
    for arg in rest:
        key = arg[2:].split("=")[0].split(".")[0].replace("-", "_")
        negated = key.removeprefix("no_")
        if arg.startswith("--") and key not in ("help", *kind.model_fields) and negated not in kind.model_fields:
            raise ConfigError(explain_unknown(key, kind.model_fields))
    if "--resume" in rest and "resume" in kind.model_fields:  # alone it means: from the newest checkpoint
        at = rest.index("--resume") + 1
        if at == len(rest) or rest[at].startswith("--"):
            rest.insert(at, "True")
    plain = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)  # always `--key value`, truth values too
    rest = [arg.capitalize() if arg in ("true", "false") else arg for arg in rest]
    return tyro.cli(kind, default=kind(**values), args=rest, description=kind.__doc__, config=plain)


def switch(args: Sequence[str], name: str) -> tuple[bool | None, list[str]]:
    """(whether `--name` is among the arguments, alone or with true or false; None if not at all), and the others."""
    found, rest, spellings = None, list(args), {"true": True, "false": False}
    for place, arg in enumerate(rest):
        key, equals, value = arg.partition("=")
        if key.replace("_", "-") != f"--{name}":
            continue
        following = rest[place + 1].lower() if not equals and place + 1 < len(rest) else ""
        if equals and value.lower() not in spellings:
            raise ConfigError(f"--{name} is {value!r}; it must be true or false")
        found = spellings.get(value.lower() if equals else following, True)
        del rest[place : place + (2 if following in spellings else 1)]
        break
    return found, rest


def take(args: Sequence[str], name: str, count: int) -> tuple[list[str], list[str]]:
    """(the `count` values after `--name`, each "" if it is not there; the other arguments)."""
    rest = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"--{name}=") else [arg])]
    if f"--{name}" not in rest:
        return [""] * count, rest
    at = rest.index(f"--{name}")
    values = rest[at + 1 : at + 1 + count]
    if len(values) < count or any(v.startswith("--") for v in values):
        raise ConfigError(f"--{name} needs {count} value{'s' * (count > 1)} after it")
    return values, rest[:at] + rest[at + 1 + count :]


def numbers(name: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, sorted, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise ConfigError(f"{name} is {text!r}; it must be whole numbers from 1 with commas between them: 1,8,64")
    return tuple(found)
