"""Two models' right answers per problem: curves, crossing, flips and the verdict, by hand and by enumeration."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from scipy import stats

from groupline.ability import (
    compare_ability,
    crossing,
    fisher_exact,
    flips,
    gain_by_start,
    paired_difference,
    sign_test,
)


def counts(values: list[int]) -> dict[str, int]:
    return {f"p{i}": c for i, c in enumerate(values)}


def label(before: list[int], after: list[int], n: int = 16) -> str:
    return str(compare_ability(counts(before), counts(after), n, [1, n])["verdict"]["label"])


def test_curves_and_differences_by_enumeration() -> None:
    """Each pass@k is the share of all k-subsets of the answers with a right one."""
    before, after, n = [0, 1, 3], [2, 1, 4], 4
    found = compare_ability(counts(before), counts(after), n, [2, 1, 4, 2])
    assert (found["k"], found["problems"], found["samples"]) == ([1, 2, 4], 3, 4)
    for k in (1, 2, 4):

        def each(right: list[int], k: int = k) -> list[float]:
            answers = [[True] * c + [False] * (n - c) for c in right]
            return [statistics.fmean(any(s) for s in itertools.combinations(a, k)) for a in answers]

        assert found["before"][f"pass@{k}"]["value"] == pytest.approx(statistics.fmean(each(before)))
        assert found["after"][f"pass@{k}"]["value"] == pytest.approx(statistics.fmean(each(after)))
        gaps = [b - a for a, b in zip(each(before), each(after), strict=True)]
        assert found["difference"][f"pass@{k}"]["value"] == pytest.approx(statistics.fmean(gaps))
        # Every resample of three problems there is, instead of drawn ones.
        means = np.sort([statistics.fmean(s) for s in itertools.product(gaps, repeat=3)])
        low, high = found["difference"][f"pass@{k}"]["bootstrap"]
        assert low == pytest.approx(means[0], abs=1e-9)  # 1/27 of the resamples, more than 2.5%
        assert high == pytest.approx(means[-1], abs=1e-9)


def test_a_paired_interval_is_narrow_where_problems_differ_and_changes_agree() -> None:
    before = [i / 40 for i in range(40)]
    after = [x + 0.1 for x in before]
    found = paired_difference(before, after)
    assert found["value"] == pytest.approx(0.1)
    assert found["bootstrap"] == pytest.approx([0.1, 0.1])


def test_the_crossing() -> None:
    """Half of the problems always against all of them in every fourth answer: 1/2 against 1 - C(6,k)/C(8,k)."""
    n = 8
    one, other = [8, 0], [2, 2]
    chances = [1 - (1 if k == 0 else np.prod([(6 - i) / (8 - i) for i in range(k)])) for k in range(1, 9)]
    first = next(k for k, p in enumerate(chances, 1) if p > 0.5)  # 1/4, 13/28, 9/14
    assert first == 3
    assert crossing(one, other, n, 8) == crossing(other, one, n, 8) == 3
    assert crossing(one, other, n, 2) is None
    assert crossing(one, one, n, 8) is None
    assert crossing([8, 4], [8, 5], n, 8) is None  # meets at k = 8, and is not crossed
    assert crossing([4, 4], [8, 0], n, 8) is None  # together at k = 1


def test_the_gain_has_two_parts() -> None:
    gain = gain_by_start([0, 0, 4, 8], [4, 0, 8, 6], 8)
    assert gain["start_never"]["value"] == pytest.approx((4 / 8) / 4)
    assert gain["start_solved"]["value"] == pytest.approx((4 / 8 - 2 / 8) / 4)
    assert gain["all"]["value"] == pytest.approx(gain["start_never"]["value"] + gain["start_solved"]["value"])


def test_flips() -> None:
    before = {"a": 0, "b": 0, "c": 3, "d": 8, "e": 16, "f": 1, "g": 0}
    after = {"a": 12, "b": 1, "c": 0, "d": 16, "e": 2, "f": 7, "g": 0}
    found = flips(before, after, 16)
    assert found["table"] == {
        "never": {"never": 1, "sometimes": 1, "mostly": 1},
        "sometimes": {"never": 1, "sometimes": 1, "mostly": 0},
        "mostly": {"never": 0, "sometimes": 1, "mostly": 1},
    }
    assert [(r["id"], r["before"], r["after"]) for r in found["gained"]] == [("a", 0, 12), ("b", 0, 1)]
    assert [(r["id"], r["before"], r["after"]) for r in found["lost"]] == [("c", 3, 0)]
    assert found["never_by_either"] == 1
    assert found["sign_test"] == 1.0  # 2 against 1 of 3: 2 * (1 + 3) / 8
    # Holm: each p-value against 5% over the number of those not yet rejected.
    p = {i: stats.fisher_exact([[before[i], 16 - before[i]], [after[i], 16 - after[i]]]).pvalue for i in before}
    rejected = set()
    for place, name in enumerate(sorted(p, key=lambda i: p[i])):
        if p[name] > 0.05 / (len(p) - place):
            break
        rejected.add(name)
    assert rejected == {"a", "d", "e"}
    assert [r["beyond_noise"] for r in found["gained"]] == [True, False]
    assert [r["beyond_noise"] for r in found["lost"]] == [False]
    assert (found["clearly_better"], found["clearly_worse"]) == (2, 1)


@pytest.mark.parametrize(("a", "b", "n"), [(0, 0, 5), (0, 5, 5), (3, 4, 8), (0, 6, 64), (64, 60, 64), (1, 0, 1)])
def test_fisher_against_scipy(a: int, b: int, n: int) -> None:
    assert fisher_exact(a, b, n) == pytest.approx(stats.fisher_exact([[a, n - a], [b, n - b]]).pvalue)


@pytest.mark.parametrize(("ups", "downs"), [(0, 0), (1, 0), (5, 0), (6, 0), (3, 9), (4, 4), (20, 7)])
def test_the_sign_test_against_scipy(ups: int, downs: int) -> None:
    expected = stats.binomtest(ups, ups + downs).pvalue if ups + downs else 1.0
    assert sign_test(ups, downs) == pytest.approx(expected)


def test_verdicts() -> None:
    """Forty problems of which the start solves half sometimes, and the other half never."""
    start = [4] * 20 + [0] * 20
    assert label(start, [12] * 20 + [0] * 20) == "sharpened"
    assert label(start, [4] * 20 + [4] * 10 + [0] * 10) == "created"
    assert label(start, [12] * 20 + [4] * 10 + [0] * 10) == "both"
    assert label(start, [12] * 10 + [0] * 10 + [0] * 20) == "lost coverage"
    assert label(start, [2] * 20 + [0] * 20) == "worse"
    assert label(start, start) == "within noise"
    # Three problems from never to always: pass@1 rises, but three flips are too few to speak of new ones.
    assert label([4] * 90 + [0] * 10, [4] * 90 + [16] * 4 + [0] * 6) == "unresolved"


def test_five_flips_are_not_enough_and_six_are() -> None:
    """By the exact test, 2 * 2^-5 = 6.3% and 2 * 2^-6 = 3.1%; the bootstrap alone would have said yes to five."""
    start = [8] * 50 + [0] * 10
    five, six = ([8] * 50 + [1] * m + [0] * (10 - m) for m in (5, 6))
    found = compare_ability(counts(start), counts(five), 16, [1, 16])
    assert found["difference"]["pass@16"]["bootstrap"][0] > 0
    assert found["verdict"]["label"] != "created"
    assert label(start, six) == "created"


def test_noise_alone_gives_a_verdict_of_noise() -> None:
    """Two draws from one model: of 40 such comparisons at most a few may find something (5% each way of looking)."""
    rng = np.random.default_rng(3)
    chances = rng.beta(0.5, 1.0, 60)
    labels = [label(*(rng.binomial(16, chances).tolist() for _ in range(2))) for _ in range(40)]
    assert labels.count("within noise") >= 34


def test_the_words_hold_the_numbers() -> None:
    found = compare_ability(counts([4] * 20 + [0] * 20), counts([12] * 20 + [0] * 20), 16, [1, 16])
    text = found["verdict"]["text"]
    assert text.startswith("sharpened: ")
    assert "pass@1 +25.0 points" in text  # half of the problems by 8/16
    assert "of which +25.0 on problems the start had solved; pass@16 +0.0 points" in text
    assert "gained 0, lost 0 (sign test p = 1); the start left 20 of 40 problems unsolved in 16 answers" in text


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="not given the same problems; one alone has p1, p2"):
        compare_ability({"p0": 1, "p1": 1}, {"p0": 1, "p2": 1}, 4, [1])
    with pytest.raises(ValueError, match="k=8"):
        compare_ability({"p": 1}, {"p": 1}, 4, [8])
    nothing: dict[str, Any] = {}
    with pytest.raises(ValueError, match="no problems"):
        compare_ability(nothing, nothing, 4, [1])
