"""The table and the figure of two models' curves, from the numbers alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_curves import picture

from groupline.ability import compare_ability
from groupline.metrics import pass_at_k_curve
from groupline.report.ability import ability_table, write_ability


def compared(after: list[int]) -> dict[str, Any]:
    before = [4] * 20 + [0] * 20
    counts = [{f"p{i}": c for i, c in enumerate(row)} for row in (before, after)]
    return {"models": {"before": "one", "after": "two"}, **compare_ability(*counts, 16, [1, 4, 16])}


def test_the_table() -> None:
    found = compared([12] * 20 + [4] * 10 + [0] * 10)
    lines = ability_table(found).splitlines()
    row = next(line for line in lines if line.startswith("pass@1 "))
    low, high = found["difference"]["pass@1"]["bootstrap"]
    assert row.split()[1] == "12.5%"
    assert f"43.8%  {found['after']['pass@1']['bootstrap'][0]:.1%} to" in row
    assert row.endswith(f"+31.2%  ({low:+.1%} to {high:+.1%}) *")
    assert "never                10         10          0" in lines
    assert "sometimes             0          0         20" in lines
    assert any(line.startswith("never solved before, solved after: 10: p20 (0 -> 4)") for line in lines)
    assert any(line.endswith(", and 2 more") for line in lines)
    assert "solved before, never after: 0" in lines
    assert lines[-1] == found["verdict"]["text"]


def test_where_the_interval_holds_0_there_is_no_star() -> None:
    row = next(line for line in ability_table(compared([4] * 20 + [0] * 20)).splitlines() if line.startswith("pass@4"))
    assert not row.endswith("*")


@pytest.mark.parametrize("one", [False, True])
def test_the_figure_is_that_of_the_file(one: bool, tmp_path: Path) -> None:
    """PNG and SVG beside the JSON; the same numbers give the same files, others another picture."""
    pictures = []
    for name, after in (("a", [12] * 40), ("b", [12] * 40), ("c", [5] * 40)):
        found = compared(after)
        if one:
            found = {"model": "two", "problems": 40, "samples": 16, **pass_at_k_curve(after, 16, [1, 4, 16])}
        file = tmp_path / name / "found.json"
        file.parent.mkdir()
        file.write_text(json.dumps(found))
        made = write_ability(file)
        assert made == [file.with_suffix(".png"), file.with_suffix(".svg")]
        svg = made[1].read_text()
        assert svg.startswith("<?xml")
        pictures.append((picture(made[0])[2], svg))
    assert pictures[0] == pictures[1]
    assert pictures[0][0] != pictures[2][0]


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'groupline\[plot\]'"):
        write_ability(tmp_path / "found.json")
