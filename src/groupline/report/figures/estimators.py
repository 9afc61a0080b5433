"""How k1 and k3 converge to the exact KL: both without bias, k1 swinging.

Legend: R repetitions, N tokens of a repetition, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from groupline.objective import kl_estimate
from groupline.report.figure import BLUE, ORANGE

POLICY = (0.40, 0.30, 0.15, 0.10, 0.05)
REFERENCE = (0.25, 0.25, 0.20, 0.20, 0.10)
REPETITIONS, TOKENS = 2000, 1000
SINGLE = 3  # repetitions drawn as lines of their own
BAND = (0.05, 0.95)

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Convergence:
    """Of one estimator, at each of `counts` tokens drawn; nats.

    mean: of all repetitions' running means. low, high: their 5% and 95% quantiles. single: a few of them, a row each.
    spread: the exact standard deviation of the estimator on one token.
    """

    counts: Floats
    mean: Floats
    low: Floats
    high: Floats
    single: Floats
    spread: float


def exact_kl(policy: tuple[float, ...] = POLICY, reference: tuple[float, ...] = REFERENCE) -> float:
    """KL(policy || reference) = sum over the vocabulary of p log(p / q), nats."""
    p, q = np.array(policy), np.array(reference)
    return float((p * np.log(p / q)).sum())


def converge(
    estimator: Literal["k1", "k3"], repetitions: int = REPETITIONS, tokens: int = TOKENS, seed: int = 0
) -> Convergence:
    """Running means of the estimator over tokens drawn from the policy, many times over. The same draws for each."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (POLICY, REFERENCE))
    values = kl_estimate(p.log(), q.log(), estimator).numpy()  # [V]
    drawn = np.random.default_rng(seed).choice(len(POLICY), size=(repetitions, tokens), p=POLICY)  # [R, N]
    counts = np.unique(np.geomspace(1, tokens, 60).round().astype(int))
    running = values[drawn].cumsum(1)[:, counts - 1] / counts  # [R, counts]
    low, high = np.quantile(running, BAND, axis=0)
    variance = float((p.numpy() * values**2).sum() - (p.numpy() * values).sum() ** 2)
    return Convergence(counts.astype(float), running.mean(0), low, high, running[:SINGLE], variance**0.5)


def draw_estimators(pyplot: Any) -> Any:
    """k1 on the left and k3 on the right, on the same axes."""
    figure, axes = pyplot.subplots(1, 2, figsize=(7.4, 4.0), sharey=True)
    for axis, name, formula, colour in (
        (axes[0], "k1", "log p/q", BLUE),
        (axes[1], "k3", "q/p - 1 - log q/p", ORANGE),
    ):
        found = converge(name)  # type: ignore[arg-type]
        axis.fill_between(found.counts, found.low, found.high, color=colour, alpha=0.22, linewidth=0,
                          label=f"90% of {REPETITIONS:,} repetitions")  # fmt: skip
        for number, line in enumerate(found.single):
            axis.plot(found.counts, line, color=colour, linewidth=0.9, alpha=0.8,
                      label=f"{SINGLE} of them" if number == 0 else None)  # fmt: skip
        axis.plot(found.counts, found.mean, color=colour, linewidth=2.6, label="mean of all: no bias")
        axis.axhline(exact_kl(), color="black", linestyle="--", linewidth=1.2, label=f"exact KL, {exact_kl():.4f} nats")
        axis.set_xscale("log")
        axis.set_xlim(1, TOKENS)
        axis.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        axis.set_title(f"{name} = {formula}\nsd of one token {found.spread:.3f}", fontsize=10)
        axis.set_xlabel("tokens drawn from the policy p")
        axis.legend(fontsize=8, frameon=False, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("running mean, nats")
    return figure
