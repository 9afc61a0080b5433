"""Accuracy over several answers, and how sure one may be of it. Pure: numbers in, numbers out."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers is right, estimated without bias from n answers of which c are right.

    1 - C(n-c, k) / C(n, k) (arXiv 2107.03374); 1.0 when n - c < k.
    TypeError for non-integers; ValueError unless n >= 1, 0 <= c <= n and 1 <= k <= n.
    """
    n, c, k = operator.index(n), operator.index(c), operator.index(k)
    if n < 1 or not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k: n={n}, c={c}, k={k}; it needs n >= 1, 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    few, many = min(c, k), max(c, k)  # C(n-c, k) / C(n, k) is symmetric in c and k
    return -math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))


def pass_at_k_curve(right: Sequence[int], n: int, ks: Sequence[int]) -> dict[str, dict[str, Any]]:
    """{"pass@k": {"value", "wilson", "bootstrap"}} for each k, a mean over problems with 95% intervals over problems.

    right: how many of a problem's n answers are right, one number a problem. ValueError: no problems, or as `pass_at_k`.
    """
    if not right:
        raise ValueError("pass_at_k_curve: there are no problems")
    out = {}
    for k in ks:
        values = [pass_at_k(n, c, k) for c in right]
        out[f"pass@{k}"] = {
            "value": math.fsum(values) / len(values),
            "wilson": list(wilson_interval(min(math.fsum(values), len(values)), len(values))),
            "bootstrap": list(bootstrap_interval(values)),
        }
    return out


def maj_at_k(
    answers: Sequence[Hashable | None],
    correct: Sequence[bool],
    k: int | None = None,
    *,
    exact_up_to: int = 10_000,
    samples: int = 2_000,
    seed: int = 0,
) -> float:
    """Chance that the commonest of k answers is right (self-consistency, arXiv 2203.11171).

    answers: each answer's own final value, as judged equal; None is no answer and has no vote. correct: whether it is
    right, the same for equal answers. A tie is broken evenly: the expected value over it is given. k: votes, default
    all n. With k < n the mean over all subsets of k answers, which is unbiased: exact where there are at most
    `exact_up_to` of them, else over `samples` drawn with `seed`. Nobody voting counts as wrong.
    ValueError: lengths that differ, k outside 1..n, or equal answers judged differently.
    """
    n = len(answers)
    votes = n if k is None else operator.index(k)
    if len(correct) != n:
        raise ValueError(f"maj_at_k: {n} answers but {len(correct)} judgements")
    if not 1 <= votes <= n:
        raise ValueError(f"maj_at_k: k is {votes}; it must be in 1..{n}, the number of answers")
    right: dict[Hashable, bool] = {}
    for answer, ok in zip(answers, correct, strict=True):
        if answer is not None and right.setdefault(answer, bool(ok)) != bool(ok):
            raise ValueError(f"maj_at_k: answer {answer!r} is judged both right and wrong")

    def vote(chosen: Sequence[int]) -> float:
        counts = Counter(a for i in chosen if (a := answers[i]) is not None)
        top = max(counts.values(), default=0)
        leaders = [right[a] for a, count in counts.items() if count == top]
        return sum(leaders) / len(leaders) if leaders else 0.0

    subsets = math.comb(n, votes)
    if subsets <= exact_up_to:
        return math.fsum(vote(chosen) for chosen in itertools.combinations(range(n), votes)) / subsets
    rng = np.random.default_rng(seed)
    return math.fsum(vote(rng.permutation(n)[:votes].tolist()) for _ in range(samples)) / samples


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927): (low, high), within 0..1.

    `successes` may be fractional, the sum over problems of a value in 0..1 such as pass@k: its variance is at most
    that of a 0/1 value with the same mean, so the interval is then wider than need be, never narrower.
    ValueError unless trials >= 1, 0 <= successes <= trials and 0 < confidence < 1.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"wilson_interval: {successes} of {trials}; it needs trials >= 1 and 0 <= successes <= trials")
    z = NormalDist().inv_cdf(0.5 + _checked(confidence) / 2)
    p, z2 = successes / trials, z * z
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == trials else min(1.0, centre + half)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap of the mean (Efron 1979): (low, high), in the unit of `values`, one value per problem.

    Problems are drawn again, not answers, so answers to one problem need not be independent.
    ValueError: no values, one that is not finite, or settings out of range.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ValueError("bootstrap_interval: values must be a flat, non-empty list of finite numbers")
    if resamples < 1:
        raise ValueError(f"bootstrap_interval: resamples is {resamples}; it must be at least 1")
    tail = (1 - _checked(confidence)) / 2
    rng = np.random.default_rng(seed)
    most = max(1, (1 << 18) // len(x))  # resamples drawn at once: a few MB
    sizes = [min(most, resamples - i) for i in range(0, resamples, most)]
    means = np.concatenate([x[rng.integers(0, len(x), (size, len(x)))].mean(1) for size in sizes])
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def p_no_signal(p: float, group_size: int) -> float:
    """Chance that a group's 0/1 rewards are all equal, p being the chance of a right answer: p^G + (1-p)^G.

    ValueError unless 0 <= p <= 1 and group_size >= 1.
    """
    if not 0 <= p <= 1 or group_size < 1:
        raise ValueError(f"p_no_signal: p={p}, group_size={group_size}; it needs 0 <= p <= 1 and group_size >= 1")
    return float(p**group_size + (1 - p) ** group_size)


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, 0.95 for example")
    return confidence


def calibration(probabilities: Sequence[float], outcomes: Sequence[float], bins: int = 10) -> dict[str, Any]:
    """Whether what was said to have probability p happened in a share p of the cases.

    probabilities: of the event, in 0..1. outcomes: 1 if it happened, 0 if not, 0.5 for a tie. Returns
    - `brier`, the mean of (probability - outcome)^2 (Brier 1950), 0.25 for one that always says 0.5;
    - `ece`, the expected calibration error (Naeini et al. 2015; Guo et al., arXiv 1706.04599): the bins' gaps between
      mean probability and share of events, each weighted by its part of the cases. It grows with noise where bins hold
      few cases;
    - `bins`, of equal width over 0..1, empty ones left out: `low`, `high`, `count`, `probability` and `share`, the
      means of the two. A bin holds low <= probability < high, the last one 1 too.
    ValueError: no cases, lengths that differ, a number outside 0..1, or bins below 1.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    if p.ndim != 1 or not len(p) or p.shape != y.shape or bins < 1:
        raise ValueError(
            f"calibration: {len(p)} probabilities, {len(y)} outcomes, {bins} bins; it needs as many, and a bin"
        )
    if not ((p >= 0) & (p <= 1) & (y >= 0) & (y <= 1)).all():
        raise ValueError("calibration: probabilities and outcomes must be numbers in 0..1")
    place = np.minimum((p * bins).astype(int), bins - 1)
    found = []
    for k in np.unique(place):
        own = place == k
        found.append(
            {
                "low": float(k) / bins,
                "high": float(k + 1) / bins,
                "count": int(own.sum()),
                "probability": float(p[own].mean()),
                "share": float(y[own].mean()),
            }
        )
    gaps = (b["count"] * abs(b["probability"] - b["share"]) for b in found)
    return {"brier": float(((p - y) ** 2).mean()), "ece": math.fsum(gaps) / len(p), "bins": found}
