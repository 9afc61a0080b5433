"""What docs/traps.md says in numbers. Pure: lists in, numbers out.

A group's answers are right with chance p, and its reward is 1 or 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb, exp, log, sqrt
from typing import Literal

EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")


def dead_chance(p: float, size: int) -> float:
    """p^G + (1-p)^G: the chance that all G rewards are equal."""
    return p**size + (1 - p) ** size


def dead_chance_mean(right: Sequence[int], drawn: int, size: int) -> float:
    """The mean over problems of p^G + (1-p)^G, without bias, from `right` of `drawn` answers to each, drawn >= G.

    C(c, G) / C(n, G) has p^G as its mean (the share of all choices of G answers that are all right); (c / n)^G has not.
    """
    ways = comb(drawn, size)
    return sum(comb(c, size) + comb(drawn - c, size) for c in right) / ways / len(right)


def dead_share(groups: Sequence[Sequence[float]]) -> float:
    """The share of groups whose rewards are all equal."""
    return sum(max(g) == min(g) for g in groups) / len(groups)


def expected_weight(p: float, size: int, divided: bool, eps: float = 1e-4) -> float:
    """The mean of the sum of |A| over a group of G answers, by enumeration of how many are right.

    With k right, the sum of |r - k/G| is 2 k (G-k) / G; divided, it is over the sample std + eps, as GRPO's row has it.
    """
    return sum(comb(size, k) * p**k * (1 - p) ** (size - k) * weight(k, size, divided, eps) for k in range(size + 1))


def weight(right: int, size: int, divided: bool, eps: float = 1e-4) -> float:
    """The sum of |A| over one group of `size` answers, `right` of them right."""
    total = 2 * right * (size - right) / size
    return total / (sqrt(right * (size - right) / size / (size - 1)) + eps) if divided else total


def shares_by_chance(
    chances: Sequence[float], weights: Sequence[float], edges: Sequence[float]
) -> list[tuple[int, float]]:
    """(groups, share of the summed weights) for each bin edges[i] <= chance < edges[i + 1]; the last takes its end too.

    ValueError: a chance in no bin, or weights that sum to 0.
    """
    bins = [[0, 0.0] for _ in edges[:-1]]
    total = sum(weights)
    if total <= 0:
        raise ValueError("shares_by_chance: the weights sum to 0, so there is nothing to share out")
    for chance, own in zip(chances, weights, strict=True):
        inside = [i for i in range(len(bins)) if edges[i] <= chance < edges[i + 1]]
        if not inside and chance != edges[-1]:
            raise ValueError(f"shares_by_chance: chance {chance} is outside {edges[0]} to {edges[-1]}")
        place = inside[0] if inside else len(bins) - 1
        bins[place][0] += 1
        bins[place][1] += own / total
    return [(int(count), share) for count, share in bins]


def blocks(rewards: Sequence[float], size: int) -> list[Sequence[float]]:
    """The answers to one problem cut into groups of `size` that share none; what is left over is left out."""
    return [rewards[i : i + size] for i in range(0, len(rewards) - size + 1, size)]


def thinks_nothing(text: str) -> bool:
    """Whether the answer begins with an empty thought."""
    return EMPTY_THOUGHT.match(text) is not None


def mean_by_step(values: Iterable[tuple[int, float]], width: int = 1) -> list[tuple[float, float, int]]:
    """(middle of the window, mean, count) for each window of `width` steps that has values; steps count from 1."""
    seen: dict[int, list[float]] = defaultdict(list)
    for step, value in values:
        seen[(step - 1) // width].append(value)
    return [(w * width + (width + 1) / 2, sum(v) / len(v), len(v)) for w, v in sorted(seen.items())]


Penalty = Literal["none", "k1 in the loss", "k2 in the loss", "k3 in the loss", "k1 in the reward"]


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    parts = [exp(x - top) for x in logits]
    return [x / sum(parts) for x in parts]


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) in nats."""
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a)


def penalty_gradient(logits: Sequence[float], reference: Sequence[float], penalty: Penalty) -> list[float]:
    """The mean, over tokens drawn from softmax(logits), of the gradient in the logits that a penalty gives.

    In the loss an estimator k(d), d = log ref - log pi, is differentiated with the drawn tokens held fixed, so a token's
    coefficient on grad log pi is dk / dlog pi: 1 for k1, -d for k2, 1 - e^d for k3. In the reward it is the penalty
    itself, by the policy gradient: -d for k1. With grad log pi(x) = onehot(x) - pi, the mean over x is exact here.
    """
    pi = softmax(logits)
    d = [log(r) - log(p) for r, p in zip(reference, pi, strict=True)]
    coefficient = {
        "none": [0.0] * len(pi),
        "k1 in the loss": [1.0] * len(pi),
        "k2 in the loss": [-x for x in d],
        "k3 in the loss": [1 - exp(x) for x in d],
        "k1 in the reward": [-x for x in d],
    }[penalty]
    mean = sum(p * c for p, c in zip(pi, coefficient, strict=True))
    return [p * (c - mean) for p, c in zip(pi, coefficient, strict=True)]


def pull(logits: Sequence[float], reference: Sequence[float], penalty: Penalty, steps: int, rate: float) -> list[float]:
    """The exact KL(policy || reference) before each of `steps` descents on the penalty's mean gradient, and after."""
    now, path = list(logits), []
    for _ in range(steps + 1):
        path.append(kl(softmax(now), reference))
        now = [x - rate * g for x, g in zip(now, penalty_gradient(now, reference, penalty), strict=True)]
    return path
