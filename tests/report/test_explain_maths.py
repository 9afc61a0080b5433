"""math.js against the Python functions: the same inputs through both, so that page and library cannot drift."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from groupline.metrics import p_no_signal, pass_at_k
from groupline.objective import GRPO, group_advantages, kl_estimate, policy_loss, token_weights
from groupline.report.explain import FOLDER

Case = tuple[str, list[Any], Any]


def f64(values: Any, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def advantages() -> Iterator[Case]:
    batches = [
        [[1.0, 1, 0, 0], [1, 0, 0, 0]],
        [[1.5, 0.3, 0.5, 1.5, 0.3, 0.0, 0.3, 0.5], [1.0] * 8],
        [[0.1, 0, 0, 0], [0.7, 0.7, 0.7, 0.7]],
        [[-2.0, 3.25], [1e3, 1e3 + 1e-3]],
    ]
    for groups, baseline, scale, ddof, eps in itertools.product(
        batches, ("mean", "leave_one_out"), ("group", "batch", "none"), (0, 1), (1e-4, 0.5)
    ):
        flat = group_advantages(
            f64(groups).flatten(), len(groups[0]), baseline=baseline, scale=scale, ddof=ddof, eps=eps
        )
        options = {"baseline": baseline, "scale": scale, "ddof": ddof, "eps": eps}
        yield "groupAdvantages", [groups, options], flat.view(len(groups), -1).tolist()


def weights() -> Iterator[Case]:
    for lengths in ([12, 60], [1, 1], [5, 0, 9], [96, 4, 7, 30]):
        for rule in ("per_sequence", "per_token", "per_budget"):
            expected = token_weights(torch.tensor(lengths), rule, budget=96, dtype=torch.float64)
            yield "tokenWeights", [lengths, rule, 96], expected.tolist()
            totals = {"sequences": 128, "tokens": 4000}
            expected = token_weights(torch.tensor(lengths), rule, budget=96, dtype=torch.float64, **totals)
            yield "tokenWeights", [lengths, rule, 96, totals], expected.tolist()


def clipping() -> Iterator[Case]:
    for ratio, advantage, (low, high) in itertools.product(
        (0.05, 0.5, 0.79, 0.81, 1.0, 1.1, 1.19, 1.21, 1.27, 1.9),
        (1.0, -1.0, 2.47, -0.35, 0.0),
        ((0.2, 0.2), (0.2, 0.28)),
    ):
        old = f64([-1.3])
        logp = (old + torch.log(f64([ratio]))).detach().requires_grad_()
        objective = GRPO.replace(kl="none", beta=0.0, clip_low=low, clip_high=high)
        loss, facts = policy_loss(
            logp, old, f64([advantage]), objective, sequence=torch.zeros(1, dtype=torch.long), num_sequences=1
        )
        (slope,) = torch.autograd.grad(loss.sum(), logp)
        expected = {
            "value": -loss.item(), "gradient": -slope.item(), "stopped": bool(facts.clip_low + facts.clip_high),
            "plain": ratio * advantage, "bounded": min(max(ratio, 1 - low), 1 + high) * advantage,
        }  # fmt: skip
        yield "clipped", [ratio, advantage, low, high], expected


def estimators() -> Iterator[Case]:
    for d in (-100.0, -3.0, -0.1001, -0.0999, -1e-4, 0.0, 1e-6, 0.05, 0.0999, 0.1001, 1.0, 5.0, 19.5):
        for name in ("k1", "k2", "k3"):
            logp = f64([-2.0], grad=True)
            value = kl_estimate(logp, f64([-2.0 + d]), name)
            (slope,) = torch.autograd.grad(value.sum(), logp)
            yield name, [-2.0, -2.0 + d], value.item()
            yield f"estimatorGradients.{name}", [-2.0, -2.0 + d], slope.item()


PAIRS = (
    ([1.2, 0.4, -0.4, -1.2], [0.2, 0.6, 0.1, -0.6]),
    ([3.0, -3.0, 0.0, 1.0], [-3.0, 3.0, 0.5, 1.0]),
    ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
)


def categoricals() -> Iterator[Case]:
    for logits, ref in PAIRS:
        p, q = Categorical(logits=f64(logits)), Categorical(logits=f64(ref))
        yield "categoricalKl", [logits, ref], kl_divergence(p, q).item()
        facts, slopes = {}, {}
        for name in ("k1", "k2", "k3"):
            values = kl_estimate(p.logits, q.logits, name)
            average = (p.probs * values).sum()
            facts[name] = {"mean": average.item(), "spread": (p.probs * (values - average) ** 2).sum().sqrt().item()}
            theta = f64(logits, grad=True)
            drawn = torch.log_softmax(theta, 0)
            (slope,) = torch.autograd.grad((p.probs * kl_estimate(drawn, q.logits, name)).sum(), theta)
            slopes[name] = slope.tolist()
        yield "estimatorFacts(categoricalPoints)", [logits, ref], facts
        yield "expectedLogitGradients", [logits, ref], slopes
        exact = {}
        for name, order in (("forward", 1), ("reverse", -1)):
            theta = f64(logits, grad=True)
            kl = kl_divergence(*(Categorical(logits=theta), q)[::order])
            exact[name] = torch.autograd.grad(kl, theta)[0].tolist()
        yield "klLogitGradients", [logits, ref], exact


def gaussians() -> Iterator[Case]:
    grid = torch.linspace(-24, 24, 6001, dtype=torch.float64)
    for m, s in ((0.8, 1.1), (-1.5, 0.9), (1.5, 2.0), (0.0, 1.0)):
        here, ref = Normal(f64(m), f64(s)), Normal(f64(0.0), f64(1.0))
        yield "gaussianKl", [m, s, 0, 1], kl_divergence(here, ref).item()
        mass = here.log_prob(grid).exp() * (grid[1] - grid[0])
        facts, slopes = {}, {}
        for name in ("k1", "k2", "k3"):
            values = kl_estimate(here.log_prob(grid), ref.log_prob(grid), name)
            average = (mass * values).sum()
            facts[name] = {"mean": average.item(), "spread": (mass * (values - average) ** 2).sum().sqrt().item()}
            mean = f64(m, grad=True)
            drawn = kl_estimate(Normal(mean, f64(s)).log_prob(grid), ref.log_prob(grid), name)
            slopes[name] = torch.autograd.grad((mass * drawn).sum(), mean)[0].item()
        assert facts["k1"]["mean"] == pytest.approx(kl_divergence(here, ref).item(), abs=1e-12)  # the grid suffices
        yield "estimatorFacts(gaussianPoints)", [m, s, 0, 1], facts
        yield "expectedMeanGradients", [m, s, 0, 1], slopes
        exact = {}
        for name, order in (("forward", 1), ("reverse", -1)):
            mean = f64(m, grad=True)
            kl = kl_divergence(*(Normal(mean, f64(s)), ref)[::order])
            exact[name] = torch.autograd.grad(kl, mean)[0].item()
        yield "klMeanGradients", [m, s, 0, 1], exact


def counts() -> Iterator[Case]:
    for n in (1, 8, 64):
        for c, k in itertools.product(sorted({0, 1, n // 4, n // 2, n}), sorted({1, n // 2 or 1, n})):
            yield "passAtK", [n, c, k], pass_at_k(n, c, k)
            wrong = (n - c) / n  # k draws with replacement, one after the other
            yield "passAtKNaive", [n, c, k], 1 - float(np.prod([wrong] * k))
    for chances, k in itertools.product(([0.35, 0.25], [0.95, 0.02], [1.0, 0.0]), (1, 8)):
        # the mean of the unbiased estimate over how many of 12 answers are right is the chance itself
        each = [sum(pass_at_k(12, c, k) * binomial(12, c, p) for c in range(13)) for p in chances]
        yield "passAtKOfChances", [chances, [0.5, 0.5], k], sum(each) / 2
    for p, size in itertools.product((0.0, 0.1, 0.5, 1.0), (2, 8, 16)):
        yield "pNoSignal", [p, size], p_no_signal(p, size)


def binomial(n: int, c: int, p: float) -> float:
    from scipy.stats import binom

    return float(binom.pmf(c, n, p))


def bandits() -> Iterator[Case]:
    start = np.log([0.35, 0.3, 0.2, 0.1, 0.05]).tolist()
    for drawn, scale in itertools.product(([0, 0, 1, 2, 1, 0, 4, 2], [3, 3, 3], [1, 2]), ("group", "none")):
        rewards = [0, 0.2, 0.5, 0.8, 1.0]
        theta = f64(start, grad=True)
        advantage = group_advantages(f64([rewards[a] for a in drawn]), len(drawn), scale=scale)
        logp = torch.log_softmax(theta, 0)[drawn]
        objective = GRPO.replace(kl="none", beta=0.0)
        per_token, _ = policy_loss(
            logp, None, advantage, objective, sequence=torch.arange(len(drawn)), num_sequences=len(drawn)
        )
        weight = token_weights(torch.ones(len(drawn)), "per_sequence", dtype=torch.float64)
        optimiser = torch.optim.SGD([theta], lr=0.7)
        (weight * per_token).sum().backward()
        assert theta.grad is not None
        gradient = (-theta.grad).tolist()
        optimiser.step()
        expected = {"advantages": advantage.tolist(), "gradient": gradient, "logits": theta.tolist()}
        yield "banditStep", [start, drawn, rewards, 0.7, {"scale": scale}], expected
    for u in (0.0, 0.349, 0.351, 0.94, 0.96, 0.999999):
        reached = torch.softmax(f64(start), 0).cumsum(0)
        yield "draw", [np.exp(start).tolist(), u], int(torch.searchsorted(reached, f64([u]), right=True))


GROUPS = (advantages, weights, clipping, estimators, categoricals, gaussians, counts, bandits)


@pytest.fixture(scope="module")
def evaluate(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.add_script_tag(path=FOLDER / "math.js")

    def run(cases: list[Case]) -> list[Any]:
        script = """(cases) => cases.map(([name, args]) => {
            const [outer, inner] = name.replace(")", "").split("(");
            if (inner) return math[outer](math[inner](...args));
            return outer.split(".").reduce((found, key) => found[key], math)(...args);
        })"""
        return list(page.evaluate(script, [[name, args] for name, args, _ in cases]))

    yield run
    page.close()


@pytest.mark.parametrize("cases", GROUPS, ids=lambda f: f.__name__)
def test_the_page_computes_what_the_library_does(cases: Any, evaluate: Any) -> None:
    fixtures = list(cases())
    for (name, args, expected), got in zip(fixtures, evaluate(fixtures), strict=True):
        for path, want, have in pairs(expected, got):
            assert have == pytest.approx(want, rel=1e-9, abs=1e-9), f"{name}({args}){path}"


def pairs(want: Any, have: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(where, expected, found) of every number in two nested values of the same shape."""
    if isinstance(want, dict):
        assert want.keys() == have.keys(), path
        for key in want:
            yield from pairs(want[key], have[key], f"{path}.{key}")
    elif isinstance(want, list):
        assert len(want) == len(have), path
        for i, (a, b) in enumerate(zip(want, have, strict=True)):
            yield from pairs(a, b, f"{path}[{i}]")
    else:
        yield path, want, have


def test_normal_numbers_and_uniform_numbers_are_what_they_say(browser: Any) -> None:
    page = browser.new_page()
    page.add_script_tag(path=FOLDER / "math.js")
    uniform, normal, again = page.evaluate("""() => {
        const many = (seed, f) => { const u = math.uniforms(seed); return Array.from({length: 20000}, () => f(u)); };
        return [many(3, (u) => u()), many(3, math.normal), many(3, (u) => u())];
    }""")
    page.close()
    assert uniform == again
    assert 0 <= min(uniform) < 0.001 < 0.999 < max(uniform) < 1
    assert np.histogram(uniform, 10, (0, 1))[0] == pytest.approx(2000, abs=5 * np.sqrt(1800))
    assert np.mean(normal) == pytest.approx(0, abs=5 / np.sqrt(20000))
    assert np.std(normal) == pytest.approx(1, abs=5 / np.sqrt(40000))
