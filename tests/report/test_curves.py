"""Figures from a run's files alone."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from groupline.report.curves import write_curves

HELD = {"problems": 20, "samples_per_problem": 4, "history": []}


def measured(low: float) -> dict[str, Any]:
    return {
        f"pass@{k}": {"value": low + k / 20, "wilson": [low, low + k / 10], "bootstrap": [low, low + k / 10]}
        for k in (1, 2, 4)
    }


def write_run(folder: Path, steps: int, before: Any, after: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for s in range(1, steps + 1):
        share = s / (steps + 1)
        lines.append(
            json.dumps({
                "step": s, "reward": 0.2 + share, "reward_std": 0.1, "rewards/correct_number/mean": share,
                "rewards/think_format/mean": 0.5, "groups/all_wrong": 1 - share, "groups/mixed": share / 2,
                "groups/all_right": share / 2, "frac_groups_with_signal": 0.7, "completions/mean_length": 30 - s,
                "accuracy": share,
            }) + "\n"
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "results.json").write_text(json.dumps({"held_out": HELD | {"before": before, "after": after}}))
    return folder


def picture(path: Path) -> tuple[int, int, bytes]:
    """Width, height and pixels of a PNG whose checksums are right (https://www.w3.org/TR/png-3)."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, size, pixels, kinds = 8, (0, 0), b"", []
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        pixels += body if kind == b"IDAT" else b""
        kinds.append(kind)
        at += 12 + length
    assert kinds[-1] == b"IEND"
    return *size, zlib.decompress(pixels)


@pytest.mark.parametrize("steps", [1, 12])
def test_a_finished_run(steps: int, tmp_path: Path) -> None:
    made = write_curves(write_run(tmp_path / "run", steps, measured(0.1), measured(0.4)))
    assert [p.name for p in made] == ["reward.png", "groups.png", "length_accuracy.png", "pass_at_k.png"]
    for path in made:
        assert path.parent == tmp_path / "run" / "figures"
        width, height, pixels = picture(path)
        assert 700 <= width <= 1200
        assert 400 <= height <= 800
        assert len(set(pixels)) > 20  # not one flat colour


def test_the_curves_are_the_run_s(tmp_path: Path) -> None:
    """The same files give the same picture, others another."""
    one = write_curves(write_run(tmp_path / "a", 5, measured(0.1), measured(0.4)))
    two = write_curves(write_run(tmp_path / "b", 5, measured(0.1), measured(0.4)))
    other = write_curves(write_run(tmp_path / "c", 9, measured(0.1), measured(0.3)))
    assert [picture(p)[2] for p in one] == [picture(p)[2] for p in two]
    assert all(picture(a)[2] != picture(b)[2] for a, b in zip(one, other, strict=True))


def test_an_interrupted_run_has_no_pass_at_k(tmp_path: Path) -> None:
    made = write_curves(write_run(tmp_path / "run", 3, measured(0.1), None))
    assert [p.name for p in made] == ["reward.png", "groups.png", "length_accuracy.png"]


def test_a_run_without_steps_has_no_figures(tmp_path: Path) -> None:
    assert write_curves(write_run(tmp_path / "run", 0, None, None)) == []
    assert not (tmp_path / "run" / "figures").exists()


def test_again_over_older_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3, measured(0.1), measured(0.4))
    first = write_curves(folder)
    assert write_curves(folder) == first


@pytest.mark.parametrize("name", ["metrics.jsonl", "results.json"])
def test_a_file_that_the_run_lacks_is_named(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3, measured(0.1), measured(0.4))
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        write_curves(folder)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install 'groupline\[plot\]'"):
        write_curves(write_run(tmp_path / "run", 3, measured(0.1), measured(0.4)))
    assert not (tmp_path / "run" / "figures").exists()
    shutil.rmtree(tmp_path / "run")
