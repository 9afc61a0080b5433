import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupline.objective import group_advantages

NAN = float("nan")


def advantages(rewards, group_size=None, **settings):
    return group_advantages(torch.tensor(rewards), len(rewards) if group_size is None else group_size, **settings)


def check(got, expected, tol=1e-6):
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tol)


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        ([1.0, 1, 0, 0], {"ddof": 0, "eps": 0}, [1, 1, -1, -1]),
        ([1.0, 0, 0, 0], {"ddof": 0, "eps": 0}, [1.732051, -0.577350, -0.577350, -0.577350]),
        ([1.0, 0, 0, 0], {"eps": 0}, [1.5, -0.5, -0.5, -0.5]),
        ([1.0, 0, 0, 0], {}, [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ([1.0, 0, 0, 0], {"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 0, 0, 0], {"scale": "none", "baseline": "leave_one_out"}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1.0, 1, 2], {"eps": 0}, [-0.577350, -0.577350, 1.154701]),
        ([1.0, 1, 2], {"eps": 0, "ddof": 0}, [-0.707107, -0.707107, 1.414214]),
    ],
)
def test_hand_values(rewards, settings, expected):
    check(advantages(rewards, **settings), expected)


def test_golden_group_of_eight():
    rewards = [1.5, 0.3, 0.5, 1.5, 0.3, 0.0, 0.3, 0.5]
    check(advantages(rewards), [1.56, -0.55, -0.20, 1.56, -0.55, -1.08, -0.55, -0.20], tol=0.005)
    check(advantages(rewards, scale="none"), [r - 0.6125 for r in rewards])


def test_each_group_has_its_own_mean_and_std():
    rewards = [1.0, 0.0, 11.0, 10.0]
    check(advantages(rewards, 2, eps=0), [0.707107, -0.707107, 0.707107, -0.707107])
    # the batch's std is 5.802298: centred on the group's mean, or (baseline "batch") on 5.5
    check(advantages(rewards, 2, scale="batch", eps=0), [s * 0.5 / 5.8022984 for s in (1, -1, 1, -1)])
    both = advantages(rewards, 2, scale="batch", baseline="batch", eps=0)
    check(both, [-0.775555, -0.947900, 0.947900, 0.775555])


def test_small_difference_is_signal():
    got = advantages([0.1, 0.0, 0.0, 0.0])
    assert got[0] > 0
    assert (got[1:] < 0).all()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[0.35] * 8, [0.1 + 0.2] * 8, [1.0] * 4, [0.0] * 2, [-2.5] * 8, [1e8] * 3, [0.1] * 7]
)
def test_equal_rewards_are_exactly_zero(rewards, scale, baseline):
    for eps in (0.0, 1e-4):
        mixed = [*rewards, *[float(i) for i in range(len(rewards))]]
        got = advantages(mixed, len(rewards), scale=scale, baseline=baseline, eps=eps)
        assert (got[: len(rewards)] == 0).all()
        assert torch.isfinite(got).all()
        assert (advantages(rewards, scale=scale, baseline=baseline, eps=eps) == 0).all()


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1():
    rewards = [0.3, 1.0, -0.5, 2.0, 0.0]
    mean = sum(rewards) / 5
    expected = [5 / 4 * (r - mean) for r in rewards]
    check(advantages(rewards, scale="none", baseline="leave_one_out"), expected)


def test_batch_baseline_gives_zero_only_when_the_whole_batch_is_equal():
    check(advantages([1.0, 1, 0, 0], 2, scale="none", baseline="batch"), [0.5, 0.5, -0.5, -0.5])
    assert (advantages([0.35] * 6, 2, scale="batch", baseline="batch", eps=0.0) == 0).all()
    check(advantages([1.0, 0.0, 0.0], 1, scale="none", baseline="batch"), [2 / 3, -1 / 3, -1 / 3])


def test_no_baseline_is_the_reward():
    check(advantages([1.0, NAN, 0.5, 0.5], 2, scale="none", baseline="none"), [1, 0, 0.5, 0.5])


def test_group_of_one_is_refused_with_the_reason():
    for baseline in ("mean", "leave_one_out"):
        with pytest.raises(ValueError, match="at least 2"):
            advantages([1.0, 2.0], 1, baseline=baseline, scale="none")
    with pytest.raises(ValueError, match="at least 2"):
        advantages([1.0], 1, baseline="batch", scale="none")


def test_unscored_answers_are_left_out():
    check(advantages([1.0, NAN, 0.0, 0.0], eps=0), [1.154701, 0, -0.577350, -0.577350])
    check(advantages([1.0, NAN, 0.0, 0.0], scale="none", baseline="leave_one_out"), [1, 0, -0.5, -0.5])
    assert (advantages([NAN, NAN, 1.0, NAN], 2) == 0).all()  # none scored; one scored, with no peer
    got = advantages([1.0, 0.0, NAN, 3.0, NAN, NAN], 2, scale="batch", eps=0)
    check(got, [0.5 / statistics.stdev([1, 0, 3]), -0.5 / statistics.stdev([1, 0, 3]), 0, 0, 0, 0])


def test_c28_rewards_that_do_not_apply():
    """[1, 0, None, 1] alone; with a second function that gives 0.5 to all, None abstains from the sum."""
    check(advantages([1.0, 0.0, NAN, 1.0], eps=0), [0.577350, -1.154701, 0, 0.577350])
    check(advantages([1.5, 0.5, 0.5, 1.5], eps=0), [0.866025, -0.866025, -0.866025, 0.866025])


def test_a_common_offset_changes_nothing():
    base = torch.tensor([1.5, 0.25, 0.5, 1.5, 0.25, 0.0, 0.25, 0.5])
    for setting in ({}, {"scale": "none"}, {"baseline": "leave_one_out", "scale": "none"}, {"scale": "batch"}):
        shifted = group_advantages(base + 1000, 8, **setting)
        torch.testing.assert_close(shifted, group_advantages(base, 8, **setting), rtol=0, atol=1e-4)


def test_dtypes():
    for dtype in (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32):
        got = group_advantages(torch.tensor([1, 1, 0, 0]).to(dtype), 4, ddof=0, eps=0)
        assert got.dtype == torch.float32
        check(got, [1, 1, -1, -1])
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2).dtype == torch.float64
    assert group_advantages(torch.zeros(0), 4).shape == (0,)
    assert group_advantages(torch.zeros(0), 4, baseline="batch", scale="batch").shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "size", "settings", "message"),
    [
        ([1.0, 0.0, 1.0], 2, {}, "groups of 2"),
        ([1.0, 0.0], 0, {}, "groups of 0"),
        ([1.0, math.inf], 2, {}, "reward 1 is inf"),
        ([1.0, 0.0], 2, {"ddof": 2}, "ddof is 2"),
        ([1.0, 0.0], 2, {"eps": -1.0}, "eps is -1.0"),
        ([1.0, 0.0], 2, {"scale": "std"}, 'scale is "std"'),
        ([1.0, 0.0], 2, {"baseline": "median"}, 'baseline is "median"'),
        ([1.0, 0.0], 2, {"baseline": "batch"}, "divide by 0"),
        ([1.0, 0.0], 2, {"baseline": "none", "scale": "batch"}, "needs a baseline"),
    ],
)
def test_refusals(rewards, size, settings, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, size, **settings)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(-8, 8)), min_size=4, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["group", "none"]),
    st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from([0, 1]),
)
def test_against_the_statistics_module(groups, scale, baseline, ddof):
    expected = []
    for group in groups:
        scored = [r for r in group if r is not None]
        for i, r in enumerate(group):
            if r is None or len(set(scored)) < 2:
                expected.append(0.0)
                continue
            others = [x for j, x in enumerate(group) if x is not None and j != i]
            centre = statistics.mean(others if baseline == "leave_one_out" else scored)
            std = (statistics.stdev if ddof else statistics.pstdev)(scored)
            expected.append((r - centre) / (std + 1e-4 if scale == "group" else 1))
    flat = torch.tensor([NAN if r is None else float(r) for g in groups for r in g], dtype=torch.float64)
    check(group_advantages(flat, 4, scale=scale, baseline=baseline, ddof=ddof), expected, tol=1e-9)
