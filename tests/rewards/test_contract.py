"""Calling reward functions: cases R1 to R3, D4, D5, and the shapes of TRL's contract."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from groupline.records import Problem
from groupline.rewards import Reward, RewardError, RunState, Scores, call_rewards

PROBLEMS = [Problem(f"p{i}", f"question {i}", str(i)) for i in range(4)]
TEXTS = ["a", "bb", "ccc", "dddd"]


def score(*functions: Callable[..., Any], **kwargs: Any) -> Scores:
    rewards = [Reward(f"f{i}", function) for i, function in enumerate(functions)]
    return call_rewards(rewards, problems=PROBLEMS, completions=TEXTS, **kwargs)


def returns(value: Any) -> Callable[..., Any]:
    return lambda **kwargs: value


def test_a_function_receives_whole_columns_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0]

    talk = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    problems = [Problem("a", "plain", "1", {"level": 1}), Problem("b", talk, "2", {"level": 2})]
    rewards = [Reward("look", look)]
    call_rewards(
        rewards,
        problems=problems,
        completions=["x", "y"],
        completion_ids=[(1, 2), (3,)],
        columns={"prefill": ["", "<"]},
    )
    handed = {name: seen.pop(name) for name in ("log_extra", "log_metric")}
    assert all(map(callable, handed.values()))
    assert seen == {
        "prompts": ["plain", list(talk)],
        "completions": ["x", [{"role": "assistant", "content": "y"}]],
        "completion_ids": [[1, 2], [3]],
        "answer": ["1", "2"],
        "level": [1, 2],
        "prefill": ["", "<"],
    }


def test_weighted_sum() -> None:
    rewards = [
        Reward("right", returns([1, 0, 1, None]), 1.0),
        Reward("format", returns([1, 1, None, None]), 0.3),
        Reward("watched", returns([5, 5, 5, 5]), 0.0),
    ]
    scores = call_rewards(rewards, problems=PROBLEMS, completions=TEXTS)
    assert scores.totals == pytest.approx((1.3, 0.3, 1.0, None))
    assert scores.rows[2] == {"right": 1.0, "format": None, "watched": 5.0}


def test_r1_an_exception_names_function_and_row() -> None:
    def fails_on_third(*, completions: list[str], **kwargs: Any) -> list[float]:
        return [1 / (len(text) - 3) for text in completions]

    with pytest.raises(RewardError, match=r"'f1' raised ZeroDivisionError on row 2 \(problem 'p2'\)") as caught:
        score(returns([0] * 4), fails_on_third)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    scores = score(returns([0.5] * 4), fails_on_third, on_error="skip")
    assert [row["f1"] for row in scores.rows] == [-0.5, -1.0, None, 1.0]
    assert scores.totals == (0.0, -0.5, 0.5, 1.5)
    assert scores.errors == {"f1": 1}


def test_r1_an_exception_that_no_row_causes_alone() -> None:
    def fails_on_many(*, completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise KeyError("whole")
        return [0.0]

    for on_error in ("raise", "skip"):
        with pytest.raises(RewardError, match="'f0' raised KeyError on the whole batch, though on no row alone"):
            score(fails_on_many, on_error=on_error)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0] * 3, "list of 4 numbers or None; it returned 3"),
        ([1.0] * 5, "it returned 5"),
        ([1.0], "it returned 1"),
        (1.0, "it returned float"),
        (None, "it returned NoneType"),
        ("1111", "it returned str"),
        ({0: 1.0}, "it returned dict"),
        (np.float64(1.0), "it returned float"),
        ((1.0 for _ in range(4)), "it returned generator"),
        ([1, 1, "1", 1], r"row 2 \(problem 'p2'\) is '1' \(str\)"),
        ([1, float("nan"), 1, 1], r"row 1 \(problem 'p1'\) is 'nan'"),
        ([1, 1, 1, float("-inf")], r"row 3 \(problem 'p3'\) is '-inf'"),
        ([1, 1j, 1, 1], "row 1"),
        ([[1], 1, 1, 1], "row 0"),
        ([10**400, 1, 1, 1], "row 0"),
        (np.array([1, np.nan, 1, 1]), "row 1"),
        ([torch.ones(2), 1, 1, 1], "row 0"),
        ([1, torch.tensor(float("inf")), 1, 1], "row 1"),
    ],
)
def test_r2_wrong_values_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score(returns(value))
    assert "reward function 'f0' must return a list of 4" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        [True, False, 1, 0.0],
        (1, 0, 1, 0),
        np.array([1, 0, 1, 0]),
        np.array([True, False, True, False]),
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        [np.float32(1), np.bool_(False), torch.tensor(1), Fraction(0)],
    ],
)
def test_r2_numbers_of_every_kind_are_accepted(value: Any) -> None:
    scores = score(returns(value))
    assert scores.totals == (1.0, 0.0, 1.0, 0.0)
    assert all(type(total) is float for total in scores.totals)


def test_r3_nothing_applicable_is_no_reward() -> None:
    scores = score(returns([None, 1, None, 0]), returns([None, None, 0.5, None]))
    assert scores.totals == (None, 1.0, 0.5, 0.0)


def test_async_functions_are_awaited() -> None:
    async def later(**kwargs: Any) -> list[float]:
        return [1.0] * 4

    class Later:
        async def __call__(self, **kwargs: Any) -> list[float]:
            return [2.0] * 4

    def hidden(**kwargs: Any) -> Any:
        return later(**kwargs)

    scores = score(later, Later(), partial(later, extra=1), hidden)
    assert scores.rows == ({"f0": 1.0, "f1": 2.0, "f2": 1.0, "f3": 1.0},) * 4
    assert score(hidden).totals == (1.0,) * 4


def test_functions_written_for_trl_work_unchanged() -> None:
    def reward_correct(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        assert kwargs.keys() == {"prompts", "completion_ids", "level", "log_extra", "log_metric", "trainer_state"}
        return [float(c[0]["content"] == gold) for c, gold in zip(completions, answer, strict=True)]

    def longer(prompts: Any, completions: Any, **kwargs: Any) -> list[float | None]:
        assert kwargs["trainer_state"].global_step == 3
        return [len(c[-1]["content"]) / len(p[-1]["content"]) for p, c in zip(prompts, completions, strict=True)]

    problems = [Problem("p", ({"role": "user", "content": "four"},), "4", {"level": 1})] * 2
    tools = [
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "44"},
    ]
    scores = call_rewards(
        [Reward("correct", reward_correct), Reward("longer", longer)],
        problems=problems,
        completions=["4", tools],
        trainer_state=RunState(global_step=3),
    )
    assert scores.rows == ({"correct": 1.0, "longer": 0.25}, {"correct": 0.0, "longer": 0.5})


def test_the_state_is_handed_to_those_that_ask() -> None:
    def asks(completions: list[str], trainer_state: Any) -> list[float]:
        return [0.0 if trainer_state is None else trainer_state.max_steps] * len(completions)

    assert score(asks).totals == (0.0,) * 4
    assert score(asks, trainer_state=RunState(max_steps=9)).totals == (9.0,) * 4


def test_functions_without_kwargs_get_what_they_name() -> None:
    def lengths(completions: list[str], answer: list[str]) -> list[float]:
        return [len(text) + int(gold) for text, gold in zip(completions, answer, strict=True)]

    def needs_more(completions: list[str], tests: list[str]) -> list[float]:
        return [0.0] * 4

    assert score(lengths).totals == (1.0, 3.0, 5.0, 7.0)
    with pytest.raises(
        RewardError, match="'f0' needs tests; the columns are prompts, completions, completion_ids, answer"
    ):
        score(needs_more)


def test_a_function_cannot_change_what_the_next_one_sees() -> None:
    def spoil(*, completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
        completions[0][0]["content"] = answer[0] = "spoilt"
        completions.clear()
        return [0.0]

    def read(*, completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
        assert completions == [[{"role": "assistant", "content": "x"}]]
        assert answer == ["1"]
        return [1.0]

    problem = Problem("p", ({"role": "user", "content": "u"},), "1")
    assert call_rewards([Reward("s", spoil), Reward("r", read)], problems=[problem], completions=["x"]).totals == (1.0,)


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "answer", "self", "log_extra", "log_metric", "trainer_state"]
)
def test_d4_reserved_columns_are_refused(name: str) -> None:
    with pytest.raises(RewardError, match=f"columns may not be called {name}"):
        call_rewards([], problems=[Problem("p", "q", columns={name: 1})], completions=[""])
    with pytest.raises(RewardError, match=f"columns may not be called {name}"):
        call_rewards([], problems=[Problem("p", "q")], completions=[""], columns={name: [1]})


def test_c44_other_columns_arrive_as_they_are() -> None:
    """Names of the trainer's own fields, names with spaces, and values of any type: nothing is overwritten or lost."""
    columns = {"advantages": {"a": 1}, "reward": None, "step": [1, 2], "seed": 7, "input_ids": (3,), "two words": "x"}
    seen: dict[str, Any] = {}

    class Judge:
        def __call__(self, **kwargs: Any) -> list[float]:
            seen.update(kwargs)
            return [0.0] * 2

    call_rewards([Reward("j", Judge())], problems=[Problem("p", "q", "1", columns)] * 2, completions=["", ""])
    assert {name: seen[name] for name in columns} == {name: [value] * 2 for name, value in columns.items()}


def test_c29_failures_are_counted_and_never_all_of_them() -> None:
    """One of four rows is counted; a function that raises on every row stops the run, whatever was asked for."""

    def raises(*, completions: list[str], **kwargs: Any) -> list[float]:
        return [1 / (len(text) - 2) for text in completions]

    assert score(raises, on_error="skip").errors == {"f0": 1}
    with pytest.raises(RewardError, match="'f1' raised on every one of 4 rows"):
        score(raises, lambda **kwargs: [1 / 0], on_error="skip")


def test_d5_column_missing_in_some_rows() -> None:
    problems = [Problem("p", "q", columns={"level": 1, "kind": "x"}), Problem("r", "q", columns={"kind": "y"})]

    def level(*, level: list[int | None], **kwargs: Any) -> list[int | None]:
        return level

    rewards = [Reward("level", level)]
    with pytest.raises(RewardError, match=r"'level' is missing in row 1 \(problem 'r'\), which has kind"):
        call_rewards(rewards, problems=problems, completions=["", ""])
    assert call_rewards(rewards, problems=problems, completions=["", ""], missing="none").totals == (1.0, None)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(RewardError, match="completions has 3 rows for 4 problems"):
        call_rewards([], problems=PROBLEMS, completions=TEXTS[:3])
    with pytest.raises(RewardError, match="completion_ids has 1 rows for 4 problems"):
        score(completion_ids=[[1]])
    with pytest.raises(RewardError, match="reward names must differ; they are same, same"):
        call_rewards([Reward("same", returns([])), Reward("same", returns([]))], problems=[], completions=[])
    with pytest.raises(RewardError, match="4 completions are not whole groups of 3"):
        score(group_size=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": float("nan")}, "weight of reward 'f' is nan"),
        ({"timeout": 0}, "timeout of reward 'f' is 0; it must be seconds above 0, or None"),
        ({"timeout": float("inf")}, "timeout of reward 'f' is inf"),
        ({"on_timeout": "zero"}, "on_timeout of reward 'f' is 'zero'; it must be 'error' or 'none'"),
        ({"main_thread": True, "timeout": 1}, "reward 'f' has main_thread and a timeout"),
        ({"main_thread": True, "by_group": True}, "reward 'f' has main_thread and by_group"),
    ],
)
def test_settings_of_a_reward_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reward("f", returns([]), **settings)
