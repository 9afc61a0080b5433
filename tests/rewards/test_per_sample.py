"""verl's per-sample reward functions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from groupline.records import Problem
from groupline.rewards import Reward, RewardError, Scores, call_rewards, reward_notes

TALK = ({"role": "user", "content": "2 + 2 = ?"},)
PROBLEMS = [
    Problem("nested", TALK, "-", {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"},
                                  "extra_info": {"index": 7}}),
    Problem("flat", "plain", "-", {"reward_model.ground_truth": "5"}),
    Problem("column", TALK, "-", {"ground_truth": "6"}),
    Problem("answer", TALK, "7"),
]  # fmt: skip
TEXTS = ["4", "5", "5", "7"]


def score(function: Any, **settings: Any) -> Scores:
    settings = {"missing": "none", **settings}
    return call_rewards([Reward("f", function)], problems=PROBLEMS, completions=TEXTS, **settings)


def test_each_answer_is_judged_with_its_own_ground_truth() -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    assert score(compute_score).totals == (1.0, 1.0, 0.0, 1.0)
    assert seen == [("gsm8k", "4", "4", {"index": 7}), ("", "5", "5", {}), ("", "5", "6", {}), ("", "7", "7", {})]


def test_only_what_it_names_and_defaults_of_its_own() -> None:
    def compute_score(solution_str: str, ground_truth: str, method: str = "strict", score: float = 1.0) -> float:
        assert method == "strict"
        return score if solution_str == ground_truth else 0.0

    assert score(compute_score).totals == (1.0, 1.0, 0.0, 1.0)


def test_a_mapping_gives_its_score_and_records_the_rest() -> None:
    def compute_score(solution_str: str, ground_truth: str, **kwargs: Any) -> Any:
        assert kwargs.keys() == {"data_source", "extra_info"}
        if ground_truth == "6":
            return None
        return {"score": 0.5, "pred": solution_str} if solution_str == "4" else 0.25

    scores = score(compute_score)
    assert scores.totals == (0.5, 0.25, None, 0.25)
    assert scores.extras == tuple({"pred": x} for x in ("4", None, None, None))


def test_an_async_one_judges_all_answers_at_once() -> None:
    here = 0

    async def compute_score(solution_str: str, ground_truth: str) -> float:
        nonlocal here
        here += 1
        while here < len(TEXTS):
            await asyncio.sleep(0)
        return float(solution_str)

    rewards = [Reward("f", compute_score, timeout=20)]
    assert call_rewards(rewards, problems=[Problem("p", "q")] * 4, completions=TEXTS).totals == (4, 5, 5, 7)


def test_what_goes_wrong_is_named() -> None:
    def raises(solution_str: str, ground_truth: str) -> float:
        return 1 / (int(ground_truth) - 6)

    def no_score(solution_str: str) -> Any:
        return {"acc": 1.0, "pred": "x"}

    def needs_more(solution_str: str, ground_truth: str, tokenizer: Any) -> float:
        return 0.0

    with pytest.raises(RewardError, match=r"'f' raised ZeroDivisionError on row 2 \(problem 'column'\)"):
        score(raises)
    with pytest.raises(RewardError, match=r"'f' raised ValueError on row 0 .*without 'score'; its keys are acc, pred"):
        score(no_score)
    with pytest.raises(RewardError, match=r"'f' judges one answer and needs tokenizer; .* give the others a default"):
        score(needs_more)


def test_the_choice_is_said() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
        return 0.0

    def columns(completions: Any, solution_str: Any = None, **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    assert reward_notes([Reward("whole", columns), Reward("mine", compute_score)]) == [
        "reward function 'mine' is called once for each answer, with data_source, solution_str, ground_truth (verl's "
        "form, known by its parameter names)"
    ]
