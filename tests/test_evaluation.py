"""Held-out measures against counting by hand."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from scipy import stats
from torch import nn
from training.small import EVEN, config, make_model, make_tokenizer, sums

from groupline.evaluation import evaluate, is_right, summarise_held_out
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Reward
from groupline.sampling import Engine
from groupline.training.collect import encode_problems
from groupline.training.held_out import evaluate_config


def group(name: str, values: Sequence[float | None], length: int = 2) -> Group:
    rollouts = []
    for i, v in enumerate(values):
        c = Completion(
            (1,), (2,) * length, (-1.0,) * length, (-1.0,) * length, "length" if i == 0 else "stop", SamplingParams(), 7
        )
        rollouts.append(Rollout(c, "", {"judge": v, "form": 0.5}, None if v is None else v + 0.5))
    return Group(Problem(name, "q"), tuple(rollouts))


GROUPS = [
    group("a", [1, 0, 0, 1]),
    group("b", [0, 0, 0.9, None]),
    group("c", [1, 1, 1, 1], length=5),
    group("d", [0, 1, 0, 0]),
]
RIGHT = [[True, False, False, True], [False] * 4, [True] * 4, [False, True, False, False]]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_by_enumeration(k: int) -> None:
    """The share of all k-subsets of a problem's answers with a right one, and intervals over problems."""
    found = summarise_held_out(GROUPS, "judge", [k])[f"pass@{k}"]
    each = [statistics.fmean(any(s) for s in itertools.combinations(r, k)) for r in RIGHT]
    assert found["value"] == pytest.approx(statistics.fmean(each))
    z, n, p = stats.norm.ppf(0.975), len(each), statistics.fmean(each)
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5,
    )
    assert found["wilson"] == pytest.approx([centre - half, centre + half])
    means = sorted(statistics.fmean(s) for s in itertools.product(each, repeat=n))  # every resample there is
    low, high = found["bootstrap"]
    assert low == pytest.approx(means[int(0.025 * len(means))], abs=0.13)
    assert high == pytest.approx(means[int(0.975 * len(means))], abs=0.13)
    assert low <= found["value"] <= high


def test_the_other_measures() -> None:
    found = summarise_held_out(GROUPS, "judge", [1])
    totals = [1.5, 0.5, 0.5, 1.5, 0.5, 0.5, 1.4, 1.5, 1.5, 1.5, 1.5, 0.5, 1.5, 0.5, 0.5]
    assert found["reward"] == pytest.approx(statistics.fmean(totals))  # of the 15 answers that have one
    assert found["rewards/judge"] == pytest.approx((2 + 0.9 + 4 + 1) / 15)
    assert found["rewards/form"] == 0.5
    assert found["completion_length"] == (12 * 2 + 4 * 5) / 16
    assert found["truncated"] == 4 / 16
    assert found["right_per_problem"] == {"a": 2, "b": 0, "c": 4, "d": 1}
    assert (found["judge"], found["policy_version"]) == ("judge", 7)


def test_nothing_applies() -> None:
    found = summarise_held_out([group("a", [None, None])], "judge", [1])
    assert (found["reward"], found["rewards/judge"], found["pass@1"]["value"]) == (None, None, 0)


@pytest.mark.parametrize(("value", "right"), [(1.0, True), (1.5, True), (0.99, False), (0.0, False), (None, False)])
def test_right(value: float | None, right: bool) -> None:
    assert is_right(value) is right


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Engine:
    return Engine(make_model(tokenizer), tokenizer)


def test_the_same_problems_and_seed_give_the_same_answers(engine: Engine, tokenizer: Any, tmp_path: Any) -> None:
    """Measures before and after training are paired; a single problem's answers do not depend on the others."""
    prompted, _ = encode_problems(sums(6), tokenizer, config(tmp_path), None)
    params = SamplingParams(max_new_tokens=6)

    def ids(problems: Any, **given: Any) -> list[list[tuple[int, ...]]]:
        _, groups = evaluate(engine, tokenizer, problems, [EVEN], params, samples=3, **given)
        return [[r.completion.ids for r in g.rollouts] for g in groups]

    once = ids(prompted)
    engine.generate([[1, 2, 3]], 4, params, seed=9)  # whatever is sampled in between
    assert ids(prompted) == once
    assert ids(prompted[::-1]) == once[::-1]
    assert ids(prompted[2:3]) == once[2:3]
    assert ids(prompted, seed=1) != once


def test_which_k(engine: Engine, tokenizer: Any, tmp_path: Any) -> None:
    """Powers of two up to the number of samples, or those asked for; the first reward is the judge."""
    prompted, _ = encode_problems(sums(2), tokenizer, config(tmp_path), None)
    params = SamplingParams(max_new_tokens=4)
    always = Reward("always", lambda completions, **_: [1.0 for _ in completions])
    for samples, ks, expected in ((1, None, [1]), (6, None, [1, 2, 4]), (8, None, [1, 2, 4, 8]), (6, [3, 6], [3, 6])):
        found, _ = evaluate(engine, tokenizer, prompted, [always, EVEN], params, samples=samples, ks=ks)
        assert [k for k in found if k.startswith("pass@")] == [f"pass@{k}" for k in expected]
        assert all(found[f"pass@{k}"]["value"] == 1 for k in expected)
    found, _ = evaluate(engine, tokenizer, prompted, [EVEN, always], params, samples=4)
    assert found["judge"] == "even_share"


def test_greedy_evaluation_gives_equal_answers(tmp_path: Any, engine: Engine, tokenizer: Any) -> None:
    prompted, _ = encode_problems(sums(2), tokenizer, config(tmp_path), None)
    _, groups = evaluate(
        engine, tokenizer, prompted, [EVEN], SamplingParams(temperature=0, max_new_tokens=5), samples=3
    )
    assert [len({r.completion.ids for r in g.rollouts}) for g in groups] == [1, 1]


def test_a_model_by_configuration(tmp_path: Any, tokenizer: Any, engine: Engine) -> None:
    """`evaluate_config` loads what `evaluate` is given by hand."""
    from groupline.models.load import save_model
    from groupline.rewards.registry import reward_list
    from groupline.tasks.task import get_task

    save_model(make_model(tokenizer), tokenizer, tmp_path / "model")
    settings = config(
        tmp_path / "run", model=str(tmp_path / "model"), task="arithmetic_en", eval_problems=3, eval_samples=4, stop=()
    )
    task = get_task("arithmetic_en")
    prompted, _ = encode_problems(task.problems("held_out", 3), tokenizer, settings, None)
    by_hand, _ = evaluate(
        engine, tokenizer, prompted, reward_list(task.rewards), SamplingParams(max_new_tokens=10), samples=4
    )
    found = evaluate_config(settings)
    assert {k: v for k, v in found.items() if k in by_hand and k != "seconds"} == {
        k: v for k, v in by_hand.items() if k != "seconds"
    }
    assert (found["problems"], found["dropped"]) == (3, 0)
    assert not (tmp_path / "run").exists()  # measuring writes nothing


def test_engine_is_left_as_it_was(engine: Engine) -> None:
    model: nn.Module = engine.model
    assert engine.version == 0
    assert not model.training
