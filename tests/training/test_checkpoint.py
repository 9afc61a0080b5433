"""Checkpoint folders: what was written comes back, what is torn is told apart and named, and what is deleted."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groupline.config import ConfigError
from groupline.training.checkpoint import (
    checkpoints,
    newest_whole,
    prune,
    read_checkpoint,
    set_aside,
    why_torn,
    write_checkpoint,
)


def write(run: Path, step: int) -> Path:
    tensors = {"weights": {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(float(step))}}
    return write_checkpoint(run, step, tensors, {"moment": torch.tensor([float(step)])}, {"seen": 7, "none": None})


def names(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    assert names(tmp_path) == ["checkpoint-4"]
    assert names(folder) == ["manifest.json", "state.json", "torch_state.pt", "weights.safetensors"]
    found = read_checkpoint(folder)
    assert (found.step, dict(found.state)) == (4, {"seen": 7, "none": None, "step": 4})
    weights = found.tensors("weights")
    assert weights is not None
    assert weights["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (weights["b"].item(), found.torch_state()["moment"].item()) == (4, 4)
    assert found.tensors("reference") is None
    with pytest.raises(OSError, match="checkpoint-4"):
        write(tmp_path, 4)  # a whole checkpoint is never written over
    assert names(tmp_path) == ["checkpoint-4"]
    assert read_checkpoint(folder).state["seen"] == 7


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("weights.safetensors", flip_a_bit, r"weights\.safetensors does not have the contents that were written"),
    ("torch_state.pt", cut, r"torch_state\.pt has \d+ bytes of \d+"),
    ("state.json", Path.unlink, r"state\.json is missing"),
    ("manifest.json", Path.unlink, r"it has no manifest\.json"),
    ("manifest.json", cut, r"its manifest\.json is broken"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGE)
def test_a_torn_one_is_passed_over_and_named(
    tmp_path: Path, file: str, damage: Callable[[Path], None], reason: str
) -> None:
    for step in (9, 10, 11):
        write(tmp_path, step)
    for step in (10, 11):
        damage(tmp_path / f"checkpoint-{step}" / file)
    (tmp_path / ".checkpoint-12-new").mkdir()
    found, torn = newest_whole(tmp_path)
    assert found is not None
    assert found.step == 9
    assert [p.name for p, _ in torn] == [".checkpoint-12-new", "checkpoint-11", "checkpoint-10"]
    assert torn[0][1] == "its writing was cut short"
    with pytest.raises(ConfigError, match=rf"checkpoint-10 is not a whole checkpoint: {reason}"):
        read_checkpoint(tmp_path / "checkpoint-10")
    with pytest.raises(ConfigError, match=r"there is no checkpoint folder .*checkpoint-13"):
        read_checkpoint(tmp_path / "checkpoint-13")


def test_a_format_of_another_version_is_not_read(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    assert why_torn(manifest.parent) == "it is of format 2 and this version reads format 1"


def test_none_at_all(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) == (None, [])
    assert newest_whole(tmp_path / "nowhere") == (None, [])


def test_old_ones_are_deleted_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        written = write(tmp_path, step)
    prune(tmp_path, None, written)
    assert len(checkpoints(tmp_path)) == 4
    prune(tmp_path, 2, written)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-100"]  # 10 is newer than 9


def test_the_only_whole_one_is_never_deleted(tmp_path: Path) -> None:
    """Torn ones, newer or older, do not count towards the limit, whatever it is."""
    for step in (5, 20, 30):
        write(tmp_path, step)
        (tmp_path / f"checkpoint-{step}" / "state.json").unlink()
    written = write(tmp_path, 10)
    prune(tmp_path, 1, written)
    found, _ = newest_whole(tmp_path)
    assert found is not None
    assert found.step == 10
    whole = write(tmp_path, 11)
    prune(tmp_path, 1, whole)
    assert [p.name for p in checkpoints(tmp_path) if why_torn(p) is None] == ["checkpoint-11"]


def test_leftovers_of_a_kill_are_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in (".checkpoint-3-new", ".checkpoint-1-gone", ".model-x", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    write(tmp_path, 3)
    assert names(tmp_path) == [".model-x", "checkpoint-3", "checkpoint-best"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, 1)
    assert names(tmp_path) == []


def test_later_ones_are_set_aside_not_deleted(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    (tmp_path / "set-aside-checkpoint-6").mkdir()
    moved = set_aside(tmp_path, 2)
    assert [p.name for p in moved] == ["set-aside-checkpoint-4", "set-aside-checkpoint-6-again"]
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert why_torn(moved[0]) is None


class Bomb:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.trace,))


def test_c68_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """A pickle with a manifest that vouches for it, and a manifest that leads out of the folder."""
    folder = write(tmp_path, 1)
    file = folder / "torch_state.pt"
    torch.save({"random": Bomb(tmp_path / "ran")}, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    told = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest["files"]["torch_state.pt"] = told
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read_checkpoint(folder).torch_state()
    assert not (tmp_path / "ran").exists()
    manifest["files"]["../torch_state.pt"] = told
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"names \.\./torch_state\.pt, which is not a file of the folder"):
        read_checkpoint(folder)
