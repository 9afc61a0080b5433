"""PPO's formulas: against sums written out in numpy, cases by hand, and what must hold whatever the numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from groupline.objective import explained_variance, gae, token_rewards, value_loss, whiten

LENGTHS = [3, 1, 5, 2]


def some(lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, sequence."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.randn(n, generator=draw).double(), torch.randn(n, generator=draw).double(), sequence


def double_sum(rewards: Any, values: Any, lengths: list[int], gamma: float, lam: float) -> np.ndarray[Any, Any]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, each answer on its own: no recursion, no padding."""
    found, start = [], 0
    for n in lengths:
        r, v = np.asarray(rewards[start : start + n]), [*np.asarray(values[start : start + n]), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        found += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        start += n
    return np.array(found)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_gae_is_its_double_sum(gamma: float, lam: float) -> None:
    rewards, values, sequence = some()
    advantages, returns = gae(rewards, values, sequence, gamma=gamma, lam=lam)
    expected = double_sum(rewards, values, LENGTHS, gamma, lam)
    assert advantages.numpy() == pytest.approx(expected, abs=1e-12)
    assert returns.numpy() == pytest.approx(expected + values.numpy(), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_gae_of_any_lengths(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values, sequence = some(lengths, seed)
    got, _ = gae(rewards.float(), values.float(), sequence, gamma=gamma, lam=lam)
    assert got.dtype == torch.float32
    expected = double_sum(rewards.float(), values.float(), lengths, gamma, lam)
    assert got.numpy() == pytest.approx(expected, abs=1e-5)


def test_gae_by_hand() -> None:
    """One answer of three tokens, rewarded 1 at its end; values 0.5, 0.25, 0.5; gamma 1, lambda 1/2.

    delta = (0.25 - 0.5, 0.5 - 0.25, 1 - 0.5) = (-0.25, 0.25, 0.5); A_3 = 0.5, A_2 = 0.25 + 0.25, A_1 = -0.25 + 0.25.
    """
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.5]), torch.zeros(3, dtype=torch.long), lam=0.5
    )
    assert advantages.tolist() == [0.0, 0.5, 0.5]
    assert returns.tolist() == [0.5, 0.75, 1.0]


def test_without_values_and_discount_it_is_the_reward_to_go() -> None:
    rewards, _, sequence = some()
    advantages, returns = gae(rewards, torch.zeros_like(rewards), sequence, gamma=1.0, lam=1.0)
    to_go = np.concatenate([np.cumsum(part.numpy()[::-1])[::-1] for part in rewards.split(LENGTHS)])
    assert advantages.numpy() == pytest.approx(to_go, abs=1e-12)
    assert torch.equal(advantages, returns)


def test_values_that_tell_the_future_leave_no_advantage() -> None:
    rewards, _, sequence = some()
    _, to_go = gae(rewards, torch.zeros_like(rewards), sequence, gamma=1.0, lam=1.0)
    for lam in (0.0, 0.5, 1.0):
        advantages, _ = gae(rewards, to_go, sequence, lam=lam)
        assert float(advantages.abs().max()) < 1e-12


def test_no_answer_hears_of_another() -> None:
    rewards, values, sequence = some()
    before, _ = gae(rewards, values, sequence)
    rewards[sequence == 2] += 100
    after, _ = gae(rewards, values, sequence)
    assert torch.equal(before[sequence != 2], after[sequence != 2])
    assert float((after - before)[sequence == 2].min()) > 50


def test_no_tokens() -> None:
    nothing = torch.zeros(0)
    advantages, returns = gae(nothing, nothing, nothing.long())
    assert len(advantages) == len(returns) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, r"gamma is 1\.5; it must be in 0\.\.1"),
        ({"lam": -0.1}, r"lam is -0\.1"),
        ({"values": torch.zeros(3)}, r"rewards have shape \(11,\), values \(3,\)"),
        ({"sequence": torch.tensor([1, 0] + [1] * 9)}, "may not fall"),
    ],
)
def test_what_gae_refuses(changes: dict[str, Any], message: str) -> None:
    rewards, values, sequence = some()
    with pytest.raises(ValueError, match=message):
        gae(**{"rewards": rewards, "values": values, "sequence": sequence} | changes)


def test_rewards_token_by_token_by_hand() -> None:
    """beta 0.5; the score stands on top of the penalty at an answer's last token only."""
    kl = torch.tensor([0.2, -0.4, 1.0, 0.0, 0.6])
    got = token_rewards(torch.tensor([2.0, -1.0]), kl, torch.tensor([0, 0, 1, 1, 1]), 0.5)
    assert got.tolist() == pytest.approx([-0.1, 2.2, -0.5, 0.0, -1.3])
    assert token_rewards(torch.tensor([2.0, -1.0]), None, torch.tensor([0, 0, 1, 1, 1]), 0.5).tolist() == [
        0,
        2,
        0,
        0,
        -1,
    ]
    # an answer without tokens among the others
    assert token_rewards(torch.tensor([2.0, 7.0, -1.0]), None, torch.tensor([0, 2]), 0.5).tolist() == [2.0, -1.0]


def test_whitening_by_hand() -> None:
    """1, 2, 3: mean 2, sample variance 1. 0, 4: mean 2, sample variance 8."""
    assert whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1], abs=1e-6)
    assert whiten(torch.tensor([1.0, 2.0, 3.0]), shift_mean=False).tolist() == pytest.approx([1, 2, 3], abs=1e-6)
    root = math.sqrt(2) / 2
    got = whiten(torch.tensor([0.0, 99.0, 4.0]), torch.tensor([True, False, True]))
    assert got.tolist() == pytest.approx([-root, 0, root], abs=1e-6)
    kept = whiten(torch.tensor([0.0, 99.0, 4.0]), torch.tensor([True, False, True]), shift_mean=False)
    assert kept.tolist() == pytest.approx([2 - root, 0, 2 + root], abs=1e-6)


def test_whitening_what_does_not_vary() -> None:
    assert whiten(torch.full((4,), 3.0)).tolist() == [0, 0, 0, 0]
    assert whiten(torch.tensor([3.0])).tolist() == [3.0]  # one token has no variance
    assert len(whiten(torch.zeros(0))) == 0


def test_the_value_loss_by_hand() -> None:
    """clip 0.2, all returns 1. Old 0: V 0.1 stays; V 0.5 is held at 0.2, whose error is larger and counts: no gradient.

    Old 0.9, V 0.5 went the wrong way: held at 0.7 the error would be smaller, so V's own counts.
    """
    values = torch.tensor([0.1, 0.5, 0.5], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 0.9]), torch.ones(3)
    loss, stopped = value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.5 * 0.81, 0.5 * 0.64, 0.5 * 0.25])
    assert stopped.tolist() == [False, True, False]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -0.5])
    plain, none = value_loss(values, old, returns, None)
    assert plain.tolist() == pytest.approx([0.405, 0.125, 0.125])
    assert not none.any()


def test_the_value_loss_against_numpy() -> None:
    returns, values, _ = some()
    old = values + 0.3 * returns.flip(0)
    loss, stopped = value_loss(values, old, returns, 0.1)
    v, o, r = values.numpy(), old.numpy(), returns.numpy()
    expected = 0.5 * np.maximum((v - r) ** 2, (np.clip(v, o - 0.1, o + 0.1) - r) ** 2)
    assert loss.numpy() == pytest.approx(expected, abs=1e-12)
    assert stopped.any()
    assert not stopped.all()


def test_what_the_value_loss_refuses() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"old_values \(3,\)"):
        value_loss(x, torch.zeros(3), x)
    with pytest.raises(ValueError, match="clip is 0"):
        value_loss(x, x, x, 0.0)


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns + 5, returns) == 1  # an offset is not variance
    assert explained_variance(torch.full((3,), 7.0), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)  # R - V = 2 R: four times the variance
    assert explained_variance(torch.tensor([0.5, 0.5, 1.5]), returns) == pytest.approx(
        1 - (2 / 9) / (2 / 3)
    )  # R - V: -1/2, 1/2, 1/2
    assert math.isnan(explained_variance(returns, torch.ones(3)))
