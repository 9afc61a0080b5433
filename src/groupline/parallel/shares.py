"""Shares of a model on disk, in PyTorch's distributed checkpoint format: each rank writes its own, any number reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from groupline.parallel.mesh import World

INDEX = ".metadata"  # names, shapes, and where each piece lies


def write_shares(folder: Path, named: Mapping[str, Tensor], world: World) -> None:
    """Every rank writes what it holds of these tensors into the folder, one that all hold whole only once.

    All ranks call it with the same names. Raises OSError on all of them if one cannot write.
    """
    try:
        with world.exchange("the checkpoint's shares"):
            save({name: t.detach() for name, t in named.items()}, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # which is no Exception
        raise OSError(f"{folder}: {_words(error)}") from error


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that was written there."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(m.size) for name, m in found.items() if isinstance(m, TensorStorageMetadata)}


def read_shares(folder: Path, into: Mapping[str, Tensor], world: World) -> None:
    """Fill these tensors, whole ones or shares, with what was written under their names. Only shares are exchanged for.

    All ranks call it with the same names. Raises OSError if something is missing or unreadable.
    """
    targets = {name: t.detach() for name, t in into.items()}
    try:
        with world.exchange("the checkpoint's shares"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
            load(targets, storage_reader=FileSystemReader(folder), no_dist=not world.sharded)
    except CheckpointException as error:
        raise OSError(f"{folder}: {_words(error)}") from error


def _words(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
