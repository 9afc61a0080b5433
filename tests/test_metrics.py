import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from groupline.metrics import bootstrap_interval, calibration, maj_at_k, p_no_signal, pass_at_k, wilson_interval


def test_pass_at_k_golden():
    assert pass_at_k(8, 2, 1) == pytest.approx(0.25)
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)
    assert pass_at_k(8, 5, 4) == 1.0  # fewer than k wrong
    assert pass_at_k(8, 0, 8) == 0.0


def test_pass_at_k_against_all_subsets():
    for n in range(1, 8):
        for c in range(n + 1):
            right = [i < c for i in range(n)]
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(right, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_large():
    exact = 1 - math.comb(9_000, 100) / math.comb(10_000, 100)
    assert pass_at_k(10_000, 1_000, 100) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(10**9, 1, 1) == pytest.approx(1e-9, rel=1e-12)
    assert pass_at_k(np.int64(8), np.int64(2), np.int32(1)) == pytest.approx(0.25)


@pytest.mark.parametrize("args", [(4, 5, 1), (4, 1, 5), (4, -1, 1), (4, 1, 0), (0, 0, 1), (-1, 0, 1)])
def test_pass_at_k_refuses(args):
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(*args)


def test_pass_at_k_refuses_fractions():
    with pytest.raises(TypeError):
        pass_at_k(8, 2.5, 1)


def test_maj_at_k_over_all_answers():
    assert maj_at_k(["4", "4", "5"], [True, True, False]) == 1.0
    assert maj_at_k(["4", "5", "5"], [True, False, False]) == 0.0
    assert maj_at_k(["4", "5"], [True, False]) == 0.5  # an even tie
    assert maj_at_k(["4", None, None], [True, False, False]) == 1.0  # no answer, no vote
    assert maj_at_k([None, None], [False, False]) == 0.0
    assert maj_at_k([7, 8, 9, 9], [True, False, False, False], k=1) == 0.25  # k = 1 is pass@1


def test_maj_at_k_of_subsets_by_hand():
    # pairs of a a b (a right): aa 1, ab 1/2, ab 1/2
    assert maj_at_k(["a", "a", "b"], [True, True, False], 2) == pytest.approx(2 / 3)


def test_maj_at_k_drawn_subsets_approach_the_exact_value_and_repeat():
    answers, correct = [*"aaaabbbccd"], [c == "a" for c in "aaaabbbccd"]
    exact = maj_at_k(answers, correct, 5)
    drawn = maj_at_k(answers, correct, 5, exact_up_to=0, samples=4000, seed=1)
    assert drawn == pytest.approx(exact, abs=0.03)
    assert drawn == maj_at_k(answers, correct, 5, exact_up_to=0, samples=4000, seed=1)


def test_maj_at_k_refuses():
    with pytest.raises(ValueError, match="2 answers but 1"):
        maj_at_k(["a", "b"], [True])
    with pytest.raises(ValueError, match="k is 3"):
        maj_at_k(["a", "b"], [True, False], 3)
    with pytest.raises(ValueError, match="both right and wrong"):
        maj_at_k(["a", "a"], [True, False])


def test_wilson_golden_and_against_scipy():
    assert wilson_interval(40, 100) == pytest.approx((0.3094, 0.4980), abs=5e-5)
    for trials in (1, 2, 7, 100, 1319):
        for successes in {0, 1, trials // 3, trials - 1, trials}:
            for confidence in (0.9, 0.95, 0.99):
                ci = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
                got = wilson_interval(successes, trials, confidence)
                assert got == pytest.approx((ci.low, ci.high), abs=1e-12)
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == 1.0


def test_wilson_takes_fractions():
    low, high = wilson_interval(40.5, 100)
    assert wilson_interval(40, 100)[0] < low < wilson_interval(41, 100)[0]
    assert wilson_interval(40, 100)[1] < high < wilson_interval(41, 100)[1]


@pytest.mark.parametrize("args", [(1, 0), (-1, 5), (6, 5), (math.nan, 5), (1, 5, 1.0), (1, 5, 0.0)])
def test_wilson_refuses(args):
    with pytest.raises(ValueError):
        wilson_interval(*args)


def test_bootstrap_interval():
    rng = np.random.default_rng(3)
    x = rng.random(400)
    low, high = bootstrap_interval(x)
    half = 1.96 * x.std() / 20  # the normal approximation of the same interval
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.006)
    assert bootstrap_interval(x) == (low, high)
    assert bootstrap_interval(x, seed=1) != (low, high)
    wider = bootstrap_interval(x, confidence=0.99)
    assert wider[0] < low < high < wider[1]
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5)


def test_bootstrap_interval_refuses():
    for values in ([], [1.0, math.nan], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="flat, non-empty"):
            bootstrap_interval(values)
    with pytest.raises(ValueError, match="resamples"):
        bootstrap_interval([1.0], resamples=0)
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_interval([1.0], confidence=95)


def test_p_no_signal_by_enumeration():
    for p in (0.0, 0.1, 0.5, 1.0):
        for size in (1, 2, 4):
            total = sum(
                math.prod(p if r else 1 - p for r in group)
                for group in itertools.product([0, 1], repeat=size)
                if len(set(group)) == 1
            )
            assert p_no_signal(p, size) == pytest.approx(total, abs=1e-12)
    assert p_no_signal(0.5, 8) == 2 * 0.5**8
    for args in ((1.5, 4), (-0.1, 4), (0.5, 0)):
        with pytest.raises(ValueError, match="p_no_signal"):
            p_no_signal(*args)


def test_calibration_by_hand() -> None:
    """Two bins: 0.2 and 0.4 with no event, 0.9 with one and 0.7 with none."""
    found = calibration([0.2, 0.4, 0.9, 0.7], [0, 0, 1, 0], bins=2)
    assert found["brier"] == pytest.approx((0.04 + 0.16 + 0.01 + 0.49) / 4)
    assert found["ece"] == pytest.approx(0.5 * 0.3 + 0.5 * 0.3)
    assert found["bins"] == [
        {"low": 0.0, "high": 0.5, "count": 2, "probability": pytest.approx(0.3), "share": 0.0},
        {"low": 0.5, "high": 1.0, "count": 2, "probability": pytest.approx(0.8), "share": 0.5},
    ]


def test_calibration_of_what_is_sure_and_of_what_says_nothing() -> None:
    sure = calibration([1.0, 0.0], [1, 0])
    assert (sure["brier"], sure["ece"]) == (0.0, 0.0)
    assert [b["low"] for b in sure["bins"]] == [0.0, 0.9]  # 1 is in the last bin
    even = calibration([0.5] * 4, [1, 0, 1, 0])
    assert (even["brier"], even["ece"]) == (0.25, 0.0)


@pytest.mark.parametrize(("p", "y", "bins"), [([], [], 2), ([0.5], [1, 0], 2), ([1.5], [1], 2), ([0.5], [1], 0)])
def test_calibration_refuses(p: list[float], y: list[float], bins: int) -> None:
    with pytest.raises(ValueError, match="calibration: "):
        calibration(p, y, bins)
