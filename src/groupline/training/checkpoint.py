"""Checkpoint folders: written whole or not at all, and read only if whole.

`checkpoint-<step>/` holds weights.safetensors (what trains), reference.safetensors (where it cannot be had again),
torch_state.pt (optimiser and random generators), state.json (everything else), manifest.json (size and SHA-256 of each).
Of a model in shares, PyTorch's distributed format (.metadata and *.distcp) takes the place of the safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupline.config import ConfigError, ResumableSettings
from groupline.parallel.mesh import SOLO, World, own_share
from groupline.runlog import finite, fsync
from groupline.sampling.choose import NonFiniteLogits

FORMAT = 1
MANIFEST, STATE, TORCH_STATE = "manifest.json", "state.json", "torch_state.pt"
SHARES = ".metadata"
NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = re.compile(r"\.checkpoint-\d+-(new|gone)")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. state: what state.json holds."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state["step"])

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        """What was saved as `name`.safetensors, on the CPU; None if nothing was."""
        file = self.folder / f"{name}.safetensors"
        return load_file(file) if file.exists() else None

    def shapes(self, name: str) -> dict[str, tuple[int, ...]] | None:
        """Likewise their shapes, without reading them."""
        file = self.folder / f"{name}.safetensors"
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as stored:
            return {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118

    @property
    def in_shares(self) -> bool:
        """Whether its tensors were written by several ranks, each its own."""
        return (self.folder / SHARES).exists()

    def torch_state(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / TORCH_STATE, map_location="cpu", weights_only=True)
        return found


class Saver(ABC):
    """Saves a run's checkpoints at their steps, and deletes old ones. A subclass says what one holds."""

    newest: Path | None = None

    @abstractmethod
    def settings(self) -> ResumableSettings:
        """The run's."""

    def world(self) -> World:
        """The ranks that save together."""
        return SOLO

    @abstractmethod
    def write(self, folder: Path, step: int, results: dict[str, Any]) -> Path:
        """A checkpoint after `step` steps, as a folder in `folder`."""

    def after_step(self, step: int, results: dict[str, Any]) -> None:
        """Save if this step is one to save at. step: steps done."""
        every = self.settings().save_steps
        if every and step % every == 0:
            self.save(step, results)

    def save(self, step: int, results: dict[str, Any]) -> None:
        run = Path(self.settings().output_dir)
        newest = self.newest = self.write(run, step, results)
        self.world().from_main(lambda: prune(run, self.settings().save_total_limit, newest), "deleting old checkpoints")

    def words(self) -> str:
        """Where to go on from, for the message of a run that stops."""
        if self.newest is None:
            return "there is no checkpoint to go back to (save_steps)"
        return f"the newest checkpoint is {self.newest} (--resume)"


def check_finite(tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
    """Raises NonFiniteLogits, naming the weight: nobody could go on from it, and it might push out a good checkpoint."""
    for name, weight in (pair for named in tensors.values() for pair in named.items()):
        if not bool(torch.isfinite(own_share(weight)).all()):
            raise NonFiniteLogits(f"the weight {name} is not finite after step {step}: training has diverged")


def write_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    torch_state: Mapping[str, Any],
    state: Mapping[str, Any],
    shares: Callable[[Path], None] | None = None,
    world: World = SOLO,
) -> Path:
    """Write `checkpoint-<step>` in the folder `run`: all files to a temporary folder, fsynced, then renamed.

    tensors: file name without its end -> tensors. torch_state: plain containers and tensors only. Raises OSError if
    that checkpoint exists. A kill leaves the temporary folder, which the next call removes. Of several ranks all call
    it and one writes; shares: by which every rank writes its own into the folder.
    """
    final = run / f"checkpoint-{step}"
    temporary = run / f".{final.name}-new"

    def begin() -> None:
        remove_unfinished(run)
        temporary.mkdir()

    def complete() -> None:
        for name, named in tensors.items():
            own = {key: value.detach().cpu().contiguous() for key, value in named.items()}
            save_file(own, temporary / f"{name}.safetensors")
        torch.save(dict(torch_state), temporary / TORCH_STATE)
        _write_json(temporary / STATE, {**state, "step": step})
        files = {}
        for file in sorted(temporary.iterdir()):
            os.chmod(file, 0o644)  # safetensors writes files that only their owner may read
            fsync(file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        _write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        fsync(temporary / MANIFEST)
        fsync(temporary)
        os.rename(temporary, final)

    world.from_main(begin, "beginning a checkpoint")
    try:
        if shares is not None:
            shares(temporary)
        world.from_main(complete, "writing a checkpoint")
    except BaseException:
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.main:
        fsync(run)
    return final


def why_torn(folder: Path, checksums: bool = True) -> str | None:
    """Why a checkpoint is not whole; None if it is. checksums: read every byte, not the sizes alone."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, kind = dict(manifest["files"]), manifest["format"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError):  # ValueError: not JSON, or not UTF-8
        return f"its {MANIFEST} is broken"
    if kind != FORMAT:
        return f"it is of format {kind} and this version reads format {FORMAT}"
    for name, told in files.items():
        file = folder / name
        if Path(name).name != name:
            return f"its {MANIFEST} names {name}, which is not a file of the folder"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != told["bytes"]:
            return f"{name} has {file.stat().st_size} bytes of {told['bytes']}"
        if checksums and _sha256(file) != told["sha256"]:
            return f"{name} does not have the contents that were written"
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ConfigError if there is no whole checkpoint in `folder`."""
    if not folder.is_dir():
        raise ConfigError(f"resume: there is no checkpoint folder {folder}")
    reason = why_torn(folder)
    if reason:
        raise ConfigError(f"resume: {folder} is not a whole checkpoint: {reason}")
    return Checkpoint(folder, json.loads((folder / STATE).read_text(encoding="utf-8")))


def newest_whole(run: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """(the newest whole checkpoint of a run, [(torn one passed over, why)], newest first)."""
    torn = []
    if run.is_dir():
        torn = [(p, "its writing was cut short") for p in sorted(run.glob(".checkpoint-*-new"))]
    for folder in reversed(checkpoints(run)):
        reason = why_torn(folder)
        if reason is None:
            return read_checkpoint(folder), torn
        torn.append((folder, reason))
    return None, torn


def checkpoints(run: Path) -> list[Path]:
    """Folders named as checkpoints, whole or not, oldest first."""
    found = [p for p in run.iterdir() if NAME.fullmatch(p.name) and p.is_dir()] if run.is_dir() else []
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    assert match
    return int(match[1])


def prune(run: Path, limit: int | None, written: Path) -> None:
    """Delete the oldest whole checkpoints beyond `limit`; never `written`, which is known to be whole."""
    if limit is None:
        return
    others = [p for p in checkpoints(run) if p != written and why_torn(p, checksums=False) is None]
    for folder in others[: max(0, len(others) - limit + 1)]:
        gone = run / f".{folder.name}-gone"  # renamed first: a kill while deleting leaves no torn checkpoint
        os.rename(folder, gone)
        shutil.rmtree(gone)


def set_aside(run: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps, which a run that goes on from `step` will write anew; their new names."""
    moved = []
    for folder in checkpoints(run):
        if step_of(folder) > step:
            name = f"set-aside-{folder.name}"
            while (run / name).exists():
                name += "-again"
            moved.append(folder.rename(run / name))
    return moved


def remove_unfinished(run: Path) -> None:
    """Remove what a kill in the middle of a save or a deletion left behind."""
    for path in run.iterdir():
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(finite(value), ensure_ascii=False, allow_nan=False), encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
