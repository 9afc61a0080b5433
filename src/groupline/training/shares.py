"""A checkpoint of a model in shares: what every rank writes for itself, and how any number of ranks takes it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupline.parallel.mesh import World
from groupline.training.checkpoint import Checkpoint

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, of the shape of the weight
Named = dict[str, dict[str, Tensor]]  # group -> name -> tensor; on disk "group/name"


def writer_of(groups: Named, world: World) -> Callable[[Path], None]:
    """For `write_checkpoint`: writes this rank's shares into a folder."""
    from groupline.parallel.shares import write_shares

    flat = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    return lambda folder: write_shares(folder, flat, world)


def split_moments(optimiser: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Named]:
    """(the optimiser's state without its moments, these by kind and by the names of its parameters, in their order)."""
    adam = optimiser["adam"]
    moments = {kind: {names[i]: own[kind] for i, own in adam["state"].items()} for kind in MOMENTS}
    rest = {i: {k: v for k, v in own.items() if k not in MOMENTS} for i, own in adam["state"].items()}
    return {**optimiser, "adam": {**adam, "state": rest}}, moments


def shapes_in(found: Checkpoint) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the checkpoint's tensors, by group and name."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    if found.in_shares:
        from groupline.parallel.shares import shapes_of

        for key, shape in shapes_of(found.folder).items():
            group, _, name = key.partition("/")
            out.setdefault(group, {})[name] = shape
        return out
    for group in ("weights", "reference"):
        shapes = found.shapes(group)
        if shapes is not None:
            out[group] = shapes
    return out


def take_up(found: Checkpoint, group: str, into: Mapping[str, Tensor], world: World) -> None:
    """Fill tensors, whole or shares, with the checkpoint's of the same names, whichever way it was written."""
    if found.in_shares:
        from groupline.parallel.shares import read_shares

        read_shares(found.folder, {f"{group}/{name}": tensor for name, tensor in into.items()}, world)
        return
    saved = found.tensors(group) or {}
    with torch.no_grad():
        for name, tensor in into.items():
            _fill(tensor, saved[name], world)


def read_moments(
    found: Checkpoint, optimiser: dict[str, Any], weights: Mapping[str, Tensor], world: World
) -> dict[str, Any]:
    """The optimiser's state as it is to be loaded: moments as whole or as shared out as the weights are now."""
    if not found.in_shares and not world.sharded:
        return optimiser
    adam = optimiser["adam"]
    own = list(weights.items())
    state: dict[int, dict[str, Any]] = {i: dict(held) for i, held in adam["state"].items()}
    for kind in MOMENTS:
        empty = {own[i][0]: torch.zeros_like(own[i][1], requires_grad=False) for i in state}
        if found.in_shares:
            take_up(found, kind, empty, world)
        else:
            for i in state:
                _fill(empty[own[i][0]], state[i][kind], world)
        for i in state:
            state[i][kind] = empty[own[i][0]]
    return {**optimiser, "adam": {**adam, "state": state}}


def _fill(target: Tensor, value: Tensor, world: World) -> None:
    if world.sharded:
        from groupline.parallel.shard import assign

        assign(target, value)
    else:
        target.copy_(value)
