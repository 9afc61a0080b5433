"""The Python examples of the methods' pages, run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
RUNS = {
    "sft.md": {"sft_example": "model"},
    "preference.md": {"rm_example": "model", "dpo_example": "model"},
    "ppo.md": {"ppo_example": "value_model"},
}


@pytest.mark.parametrize("page", RUNS)
def test_the_example_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints what it says it does, and leaves the runs that it names, whole."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), {})
    assert {p.name for p in (tmp_path / "runs").iterdir()} == RUNS[page].keys()
    for run, made in RUNS[page].items():
        results = json.loads((tmp_path / "runs" / run / "results.json").read_text(encoding="utf-8"))
        assert results["held_out"]["after"]
        assert any((tmp_path / "runs" / run / made).glob("*.safetensors"))
    assert "nan" not in capsys.readouterr().out
