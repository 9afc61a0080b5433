"""Alarms in a run: said, written, kept over a resumption, and ending it only if asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small import config, rows, sums

from groupline.rewards import Reward
from groupline.training.grpo import train
from groupline.training.summary import repeats


def nothing(completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def go(folder: Path, start: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    settings = config(folder, model=str(start), steps=7, **changes)
    problems = sums(6)
    results = train(settings, said.append, problems=problems, rewards=[Reward("nothing", nothing)])
    return results, [line for line in said if line.startswith("ALARM")]


def test_an_alarm_is_said_and_written_and_the_run_goes_on(tmp_path: Path, start: Path) -> None:
    results, said = go(tmp_path / "run", start)
    assert len(results["steps"]) == 7
    assert said[0] == (
        "ALARM  broken at step 5: reward flat at zero: every reward of the last 5 steps was 0. Test the judge: "
        "`groupline audit-reward`; then the prompt and the answers' format."
    )
    written = rows(tmp_path / "run" / "alarms.jsonl")
    assert len(written) == len(said)
    assert (written[0]["step"], written[0]["level"], written[0]["name"]) == (5, "broken", "reward flat at zero")
    assert results["verdict"] == "broken"
    assert results["alarms"] == written
    assert json.loads((tmp_path / "run" / "results.json").read_text())["alarms"] == written


def test_a_broken_run_ends_if_that_was_asked_for(tmp_path: Path, start: Path) -> None:
    results, said = go(tmp_path / "run", start, stop_on_alarm=True)
    assert len(results["steps"]) == 5
    assert len(said) == 1
    assert not results["interrupted"]
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_a_resumed_run_raises_what_the_straight_one_does(tmp_path: Path, start: Path) -> None:
    straight, _ = go(tmp_path / "straight", start)
    go(tmp_path / "run", start, save_steps=3)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")  # so it goes on from step 3, before the alarm
    results, said = go(tmp_path / "run", start, save_steps=3, resume=True)
    assert results["alarms"] == straight["alarms"] == rows(tmp_path / "run" / "alarms.jsonl")
    assert len(said) == len(straight["alarms"])


def test_a_healthy_run_has_an_empty_file(tmp_path: Path, start: Path) -> None:
    def alternating(completions: Any, **columns: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    results = train(
        config(tmp_path / "run", model=str(start)),
        lambda _: None,
        problems=sums(6),
        rewards=[Reward("half", alternating)],
    )
    assert (results["verdict"], results["alarms"], rows(tmp_path / "run" / "alarms.jsonl")) == ("healthy", [], [])


@pytest.mark.parametrize(
    ("ids", "repeated"),
    [
        ([5] * 40, True),
        (list(range(40)), False),
        ([5] * 31, False),  # too short to judge
        ([1, 2, 3, 4, 5, 6] * 7, True),  # 6 of 39 four-grams are new
        ([*range(30), *range(12)], False),  # 33 of 39
    ],
)
def test_repetition(ids: list[int], repeated: bool) -> None:
    assert repeats(ids) is repeated
