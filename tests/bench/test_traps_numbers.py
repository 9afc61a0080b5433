"""The figures of docs/traps.md against enumeration, counting and numpy."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from groupline.objective import GRPO, group_advantages, kl_estimate

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import traps_numbers as numbers
import traps_show


@pytest.mark.parametrize(("p", "size"), [(0.3, 2), (0.3, 4), (0.9, 5), (0.0, 3)])
def test_dead_chance_by_enumeration(p, size):
    ways = itertools.product((0, 1), repeat=size)
    chance = sum(math.prod(p if r else 1 - p for r in way) for way in ways if len(set(way)) == 1)
    assert numbers.dead_chance(p, size) == pytest.approx(chance)


def test_dead_chance_mean_is_the_share_of_all_choices():
    """Of the G-element choices out of each problem's answers, those that are all equal."""
    drawn = [[1, 1, 0, 0, 0, 1], [0] * 6, [1, 0, 0, 0, 0, 0]]
    for size in (2, 3, 5):
        shares = [np.mean([len(set(c)) == 1 for c in itertools.combinations(answers, size)]) for answers in drawn]
        assert numbers.dead_chance_mean([3, 0, 1], 6, size) == pytest.approx(np.mean(shares))


def test_dead_chance_mean_is_unbiased():
    """Its mean over all draws of 5 answers is p^3 + (1-p)^3, where that of (c/n)^3 + (1-c/n)^3 is not."""
    p = 0.25
    chances = [math.comb(5, c) * p**c * (1 - p) ** (5 - c) for c in range(6)]
    assert sum(w * numbers.dead_chance_mean([c], 5, 3) for c, w in enumerate(chances)) == pytest.approx(
        p**3 + (1 - p) ** 3
    )
    plain = sum(w * numbers.dead_chance(c / 5, 3) for c, w in enumerate(chances))
    assert plain > p**3 + (1 - p) ** 3 + 0.05


def test_dead_share_of_blocks():
    cut = numbers.blocks([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0], 2)
    assert cut == [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    assert numbers.dead_share(cut) == pytest.approx(2 / 3)


@pytest.mark.parametrize("divided", [True, False])
def test_weight_is_that_of_the_library(divided):
    """The sum of |A| over a group, as `group_advantages` has it."""
    for right in range(9):
        rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
        scale = "group" if divided else "none"
        advantages = group_advantages(rewards, 8, baseline="mean", scale=scale, ddof=GRPO.ddof, eps=GRPO.eps)
        assert numbers.weight(right, 8, divided) == pytest.approx(float(advantages.abs().sum()), abs=1e-9)


def test_expected_weight():
    """Undivided: the mean of 2 k (G-k) / G is 2 (G-1) p (1-p). Divided, two that differ: (1/2 + 1/2) / sqrt(1/2)."""
    for p in (0.1, 0.5, 0.8):
        assert numbers.expected_weight(p, 8, False) == pytest.approx(14 * p * (1 - p))
        assert numbers.expected_weight(p, 2, True, eps=1e-12) == pytest.approx(2 * p * (1 - p) * math.sqrt(2))
    draws = np.random.default_rng(0).binomial(8, 0.2, 200_000)
    sampled = np.mean([numbers.weight(int(k), 8, True) for k in draws])
    assert numbers.expected_weight(0.2, 8, True) == pytest.approx(sampled, rel=0.01)


def test_shares_by_chance():
    found = numbers.shares_by_chance([0.0, 0.25, 0.3, 1.0], [1.0, 2.0, 3.0, 4.0], (0.0, 0.25, 0.5, 1.0))
    assert found == [(1, pytest.approx(0.1)), (2, pytest.approx(0.5)), (1, pytest.approx(0.4))]
    with pytest.raises(ValueError, match=r"chance 1\.5 is outside 0\.0 to 1\.0"):
        numbers.shares_by_chance([1.5], [1.0], (0.0, 1.0))
    with pytest.raises(ValueError, match="sum to 0"):
        numbers.shares_by_chance([0.5], [0.0], (0.0, 1.0))


@pytest.mark.parametrize(
    ("text", "empty"),
    [
        ("<think></think>\n18", True), ("<think>\n </think>3", True), ("<think>3 + 4</think>\n7", False),
        ("33 + 39 = 72\n<think></think>", False), ("", False),
    ],
)  # fmt: skip
def test_empty_thoughts(text, empty):
    assert numbers.thinks_nothing(text) == empty


def test_mean_by_step():
    values = [(1, 2.0), (2, 4.0), (5, 1.0), (2, 6.0)]
    assert numbers.mean_by_step(values) == [(1.0, 2.0, 1), (2.0, 5.0, 2), (5.0, 1.0, 1)]
    assert numbers.mean_by_step(values, 2) == [(1.5, 4.0, 3), (5.5, 1.0, 1)]


LOGITS, REFERENCE = [1.0, -0.5, 0.2], [0.5, 0.2, 0.3]


def autograd_mean(estimator):
    """The mean over tokens drawn from the policy of the gradient of the library's estimator, by autograd."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    loss = (logp.detach().exp() * kl_estimate(logp, torch.tensor(REFERENCE).double().log(), estimator)).sum()
    return torch.autograd.grad(loss, logits)[0].tolist()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_loss_pulls_as_autograd_says(estimator):
    ours = numbers.penalty_gradient(LOGITS, REFERENCE, f"{estimator} in the loss")
    assert ours == pytest.approx(autograd_mean(estimator), abs=1e-7)


def kl_slope(of):
    """The gradient of `of` at LOGITS, by central differences."""
    slope = []
    for i in range(3):
        at = [[x + h * (i == j) for j, x in enumerate(LOGITS)] for h in (1e-6, -1e-6)]
        slope.append((of(at[0]) - of(at[1])) / 2e-6)
    return slope


def test_what_each_penalty_descends():
    """k1 in the loss: nothing. k2 in the loss and k1 in the reward: KL(policy || ref). k3 in the loss: KL(ref || policy)."""
    to = kl_slope(lambda x: numbers.kl(numbers.softmax(x), REFERENCE))
    back = kl_slope(lambda x: numbers.kl(REFERENCE, numbers.softmax(x)))
    assert numbers.penalty_gradient(LOGITS, REFERENCE, "k1 in the loss") == pytest.approx([0, 0, 0], abs=1e-15)
    assert numbers.penalty_gradient(LOGITS, REFERENCE, "k2 in the loss") == pytest.approx(to, abs=1e-8)
    assert numbers.penalty_gradient(LOGITS, REFERENCE, "k1 in the reward") == pytest.approx(to, abs=1e-8)
    assert numbers.penalty_gradient(LOGITS, REFERENCE, "k3 in the loss") == pytest.approx(back, abs=1e-8)


def test_pull():
    start = numbers.kl(numbers.softmax(LOGITS), REFERENCE)
    flat = numbers.pull(LOGITS, REFERENCE, "k1 in the loss", 5, 0.3)
    assert flat == pytest.approx([start] * 6)
    falling = numbers.pull(LOGITS, REFERENCE, "k3 in the loss", 5, 0.3)
    assert falling[0] == flat[0]
    assert all(a > b for a, b in itertools.pairwise(falling))


def test_a_run_is_read_from_its_files(tmp_path):
    folder = tmp_path / "groups_2"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"python bench/traps\.py run groups_2"):
        traps_show.Run(folder)
    measure = {"before": {"pass@1": {"value": 0.4, "bootstrap": [0.3, 0.5]}}}
    measure["after"] = {"pass@1": {"value": 0.6, "bootstrap": [0.5, 0.7]}}
    (folder / "results.json").write_text(json.dumps({"held_out": measure}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"kl": k / 10}) + "\n" for k in range(20)))
    answers = [{"problem": p, "reward": r, "advantage": -r} for p, r in (("a", 1.0), ("b", 0.0), ("a", 0.5))]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    run = traps_show.Run(folder)
    assert run.held_out == {"before": (0.4, 0.3, 0.5), "after": (0.6, 0.5, 0.7)}
    assert run.at_the_end("kl") == pytest.approx(np.arange(1.0, 2.0, 0.1).mean())
    assert run.by_problem() == {"a": [1.0, 0.5], "b": [0.0]}
    assert run.by_problem("advantage") == {"a": [-1.0, -0.5], "b": [0.0]}
