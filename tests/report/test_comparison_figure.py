"""The table and the figure of a comparison, from compare.json alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_curves import picture

from groupline.report.comparison import comparison_table, write_comparison


def mean(value: float, sd: float | None = None) -> dict[str, Any]:
    return {"mean": value, "sd": sd}


def method(name: str, low: float, models: dict[str, int] | None, **changes: float) -> dict[str, Any]:
    numbers = {
        "kl_per_answer": 0.25, "completion_length": 30.0, "gold_solutions": 0, "gold_answers": 0, "pairs": 0,
        "samples": 1024, "generated_tokens": 20000, "policy_updates": 8, "other_updates": 0, "seconds": 12.0,
        "peak_rss_bytes": 600e6,
    } | changes  # fmt: skip
    found: dict[str, Any] = {"method": name, "models": models, **{k: mean(v, 0.5) for k, v in numbers.items()}}
    for k in (1, 8):
        found[f"pass@{k}"] = {
            "mean": low + k / 20, "sd": 0.012, "wilson": [low, low + 0.2], "bootstrap": [low, low + 0.1],
            "seeds": [low + 0.04, low + 0.06],
        }  # fmt: skip
        if name != "start":
            found.setdefault("vs_start", {})[f"pass@{k}"] = {"value": 0.2, "bootstrap": [0.1, 0.3]}
            found.setdefault("vs_grpo", {})[f"pass@{k}"] = {"value": -0.01, "bootstrap": [-0.03, 0.01]}
    return found


def found(low: float = 0.5) -> dict[str, Any]:
    held = {"policy": 4_000_000, "reference": 4_000_000, "value": 4_100_000, "reward": 4_200_000}
    return {
        "config": {"seeds": [0, 1], "eval_problems": 50, "eval_samples": 8, "max_completion_length": 64},
        "budget": {"problems": 128, "samples": 1024, "policy_updates": 8, "answers_per_update": 128},
        "load": {"peak_rss_bytes": 450e6, "peak_device_bytes": None},
        "methods": [
            method("start", 0.3, None),
            method("ppo_reward_model", low, held, pairs=120, other_updates=16),
            method("grpo", 0.6, {"policy": 4_000_000}, gold_answers=128),
            method("sft", 0.6, {"policy": 4_000_000}, gold_solutions=128, samples=0),
        ],
    }


def cells(table: str, name: str) -> list[list[str]]:
    return [
        [c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith(f"| {name} ")
    ]


def test_the_tables() -> None:
    table = comparison_table(found())
    learnt, took = cells(table, "reward model + PPO")
    assert learnt == [
        "reward model + PPO", "55.0% (50.0 to 70.0)", "1.2", "+20.0 (+10.0 to +30.0) \\*", "-1.0 (-3.0 to +1.0)",
        "90.0%", "+20.0 (+10.0 to +30.0) \\*", "0.25 ± 0.50", "30.0",
    ]  # fmt: skip
    assert took == [
        "reward model + PPO", "120 pairs", "none",
        "**4**: policy 4.0, reference 4.0, value 4.1, reward 4.2", "600 (+150)", "1,024", "20,000", "8 + 16", "12 ± 0",
    ]  # fmt: skip
    assert [row[1] for row in cells(table, "GRPO")[1:]] == ["none"]
    assert cells(table, "GRPO")[1][2:4] == ["128", "**1**: policy 4.0"]
    assert cells(table, "SFT, more of it")[1][1] == "128 solutions"
    (start,) = cells(table, "start (SFT)")  # what it took is not known
    assert start[3:5] == ["", ""]
    assert "128 problems, 1,024 answers of at most 64 tokens, 8 updates of the policy on 128 answers each" in table


def test_the_figure_is_that_of_the_file(tmp_path: Path) -> None:
    pictures = []
    for name, low in (("a", 0.5), ("b", 0.5), ("c", 0.2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "compare.json").write_text(json.dumps(found(low)))
        made = write_comparison(folder)
        assert made == [folder / "compare.png", folder / "compare.svg"]
        pictures.append((picture(made[0])[2], made[1].read_text()))
    assert pictures[0] == pictures[1]
    assert pictures[0][0] != pictures[2][0]


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'groupline\[plot\]'"):
        write_comparison(tmp_path)
