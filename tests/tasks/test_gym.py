"""Tasks of reasoning-gym: made from a seed, split for good, judged by their own scorers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training.small import make_model, make_tokenizer, rows

from groupline import Config, train
from groupline.records import Problem
from groupline.rewards import Reward, call_rewards, get_reward, gym_score
from groupline.tasks import check_gold, get_task


def question(problem: Problem) -> str:
    assert not isinstance(problem.prompt, str)
    return problem.prompt[-1]["content"]


@pytest.mark.parametrize("name", ["leg_counting", "chain_sum", "word_sorting"])
def test_problems_are_reproducible_different_and_split_for_good(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = get_task(f"gym:{name}")
    train = task.problems("train", 40)
    assert task.problems("train", 40) == train
    others = task.problems("train", 40, seed=1)
    held = [p for seed in (0, 1) for p in task.problems("held_out", 40, seed)]
    assert len({question(p) for p in train}) == len(train) == 40
    assert [question(p) for p in others] != [question(p) for p in train]
    assert not {question(p) for p in held} & {question(p) for p in (*train, *others)}
    assert check_gold(task, 40) == 40


def test_the_scorer_is_the_tasks_own() -> None:
    """Its partial credit: the share of a longer answer that is the right one; and nothing for thoughts."""
    gym = pytest.importorskip("reasoning_gym")
    problems = get_task("gym:leg_counting").problems("train", 1) * 6
    gold = problems[0].answer
    texts = [
        f"<think>legs</think>\n<answer>{gold}</answer>",
        f"<think>legs</think>\n{gold} ",
        f"<answer>1</answer> no: <answer> {gold}</answer>",
        f"{gold} legs in all",
        f"<think><answer>{gold}</answer>",
        "<answer></answer>",
    ]
    scores = call_rewards([Reward("gym_score", get_reward("gym_score"))], problems=problems, completions=texts)
    own = gym.get_score_answer_fn("leg_counting")
    entry = problems[0].columns["gym_entry"]
    expected = [own(text, entry) for text in (gold, gold, gold, f"{gold} legs in all", None, "")]
    assert [row["gym_score"] for row in scores.rows] == expected
    assert expected[:3] == [1.0, 1.0, 1.0]
    assert expected[4:] == [0.0, 0.0]


def test_problems_of_other_sources_are_not_judged() -> None:
    assert gym_score(completions=["1", "2"], gym_task=[None, None], gym_entry=[None, None]) == [None, None]


def test_a_run(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    tokenizer = make_tokenizer()
    settings = Config(
        task="gym:leg_counting", steps=1, prompts_per_step=2, num_generations=2, max_completion_length=6, beta=0.0,
        eval_problems=2, eval_samples=1, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    results = train(settings, lambda line: None, model=make_model(tokenizer), tokenizer=tokenizer)
    assert results["held_out"]["after"]["judge"] == "gym_score"
    answers = rows(tmp_path / "run" / "rollouts.jsonl")
    assert [set(a["rewards"]) for a in answers] == [{"gym_score", "think_format"}] * 4
    assert len({a["problem"] for a in answers}) == 2


def test_an_unknown_task_gets_the_nearest_names() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"no task 'leg_count'; the nearest of its \d+ are leg_counting, "):
        get_task("gym:leg_count")


def test_the_extra_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'groupline\[gym\]'"):
        get_task("gym:leg_counting")
