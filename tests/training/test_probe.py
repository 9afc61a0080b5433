"""The share of groups that would teach, from answers drawn once."""

from __future__ import annotations

from itertools import combinations
from math import comb
from pathlib import Path

import pytest

from groupline.cli import main
from groupline.config import Config, ConfigError
from groupline.training.probe import chance_of_signal, probe


@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 0, 1, 0], [1, 1, 1, 1], [0.3, 0.3, 1.3, 0.0, 0.3], [1, None, 0, 1, None, 1, 0]]
)
def test_by_enumerating_the_groups(rewards: list[float | None]) -> None:
    scored = [r for r in rewards if r is not None]
    for size in range(2, len(scored) + 1):
        groups = list(combinations(scored, size))
        expected = sum(len(set(g)) > 1 for g in groups) / len(groups)
        assert chance_of_signal(rewards, size) == pytest.approx(expected, abs=1e-12)


def test_it_is_unbiased_for_a_coin() -> None:
    """Its mean over all outcomes of 6 answers, each right with chance p, is 1 - p^G - (1-p)^G."""
    p, n = 0.3, 6
    for size in (2, 4):
        mean = sum(
            comb(n, c) * p**c * (1 - p) ** (n - c) * chance_of_signal([1.0] * c + [0.0] * (n - c), size)
            for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - p**size - (1 - p) ** size, abs=1e-12)


def test_too_few_answers_and_a_group_of_one() -> None:
    assert chance_of_signal([None, None, 1.0], 2) == 0.0
    with pytest.raises(ValueError, match="at least 2 answers"):
        chance_of_signal([1.0, 0.0], 1)


def test_a_model_is_probed_and_nothing_is_written(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Config(model=str(start), max_completion_length=6, output_dir=str(tmp_path / "run"))
    found = probe(settings, samples=4, problems=3, sizes=(2, 4), say=lambda _: None)
    assert (found["problems"], found["samples"]) == (3, 4)
    assert set(found["expected_signal"]) == {2, 4}
    for share in found["expected_signal"].values():
        assert 0 <= share["bootstrap"][0] <= share["value"] <= share["bootstrap"][1] <= 1
    arguments = ["--model", str(start), "--max_completion_length", "6", "--output_dir", str(tmp_path / "run")]
    assert main(["probe", "--samples", "4", "--problems", "3", "--groups", "2,4", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 problems x 4 answers")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="samples is 8, and groups of 16 are asked about"):
        probe(settings, samples=8)
