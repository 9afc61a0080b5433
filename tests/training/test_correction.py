"""Weights for tokens that another engine drew, by hand and in a whole step."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import EVEN, config, first_gradient, plain_logprobs, rows, sums, twin
from torch import nn

from groupline.config import Config, ConfigError
from groupline.objective import Correction, effective_share
from groupline.records import Completion
from groupline.sampling import Engine
from groupline.training.correction import correction_of, verdict
from groupline.training.grpo import run
from groupline.training.setup import prepare

TRAINER = [-1.0, -2.0, -0.5, -3.0, -1.0]
SAMPLER = [-1.2, -1.5, -0.5004, -4.5, -0.7]
ANSWER = [0, 0, 0, 1, 1]


def noise(place: int) -> float:
    """What the strange engine's log-probs are off by: for every third token rounding only."""
    return 5e-4 if place % 3 == 0 else -0.9 * math.sin(7.0 * place)


class Strange:
    """The engine, whose log-probs are another one's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, *args: Any, **given: Any) -> list[list[Completion]]:
        found = self.engine.generate(*args, **given)
        return [
            [replace(c, logprobs=tuple(x + noise(i) for i, x in enumerate(c.logprobs))) for c in own] for own in found
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def weights_by_hand(trainer: list[float], sampler: list[float], rule: str, cap: float) -> list[float]:
    """Of one answer's tokens."""
    deltas = [0.0 if abs(t - s) <= 1e-3 else t - s for t, s in zip(trainer, sampler, strict=True)]
    if rule.startswith("sequence"):
        deltas = [sum(deltas)] * len(deltas)
    ratios = [math.exp(d) for d in deltas]
    return [min(r, cap) if rule.endswith("truncate") else r if r <= cap else 0.0 for r in ratios]


@pytest.mark.parametrize("rule", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_of_two_answers(rule: str) -> None:
    level, _, beyond = rule.partition("_")
    got = Correction(level, beyond, 1.4, 1e-3).weights(  # type: ignore[arg-type]
        torch.tensor(TRAINER), torch.tensor(SAMPLER), torch.tensor(ANSWER), 2
    )
    expected = weights_by_hand(TRAINER[:3], SAMPLER[:3], rule, 1.4) + weights_by_hand(
        TRAINER[3:], SAMPLER[3:], rule, 1.4
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
    assert {"token_truncate": 1.4, "token_mask": 0.0, "sequence_truncate": 1.4, "sequence_mask": 0.0}[rule] in [
        pytest.approx(x) for x in got.tolist()
    ]


def test_effective_share_by_hand() -> None:
    assert effective_share(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_share(torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(36 / 42)
    assert effective_share(torch.zeros(0)) == 1.0


def test_bad_rules() -> None:
    with pytest.raises(ValueError, match="cap is 0"):
        Correction(cap=0)
    with pytest.raises(ValueError, match="needs each token's answer"):
        Correction("sequence").weights(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("objective", ["grpo", "gspo", "reinforce"])
@pytest.mark.parametrize("rule", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"])
def test_the_update_is_the_weighted_gradient_by_hand(
    rule: str, objective: str, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    """As for the rows of objectives: Adam's first update with epsilon 1 and rate 1 is g / (|g| + 1)."""
    policy, cap = twin(first), 1.5
    settings = config(
        tmp_path / "run", steps=1, learning_rate=1.0, adam_epsilon=1.0, max_grad_norm=0.0, micro_batch_tokens=60,
        objective=objective, beta=0.0, sampler_correction=rule, sampler_correction_cap=cap,
    )  # fmt: skip
    setup = prepare(
        settings, lambda line: None, model=policy, tokenizer=tokenizer, rewards=[EVEN], problems=sums(12), held_out=[]
    )
    assert isinstance(setup.engine, Engine)
    setup.engine = Strange(setup.engine)  # type: ignore[assignment]
    run(settings, setup, lambda line: None)
    answers = rows(tmp_path / "run" / "rollouts.jsonl")
    by_hand, every, trained = twin(first), [], torch.zeros(())
    total = sum(len(r["ids"]) for r in answers)
    for g in range(3):
        group = [r for r in answers if r["group"] == g]
        rewards = [r["reward"] for r in group]
        for r in group:
            spread = statistics.stdev(rewards) + 1e-4 if objective != "reinforce" else 1.0
            advantage = (r["reward"] - statistics.fmean(rewards)) / spread
            logp = plain_logprobs(by_hand, tokenizer(r["prompt"])["input_ids"], r["ids"])
            n = len(r["ids"])
            # the sampler's are known to 5 decimals from the file; exactly, they are the trainer's and the noise
            sampler = [x + noise(i) for i, x in enumerate(logp.tolist())]
            own = [1.0] * n if rule == "off" else weights_by_hand(logp.tolist(), sampler, rule, cap)
            per_token = 1 / total if objective == "reinforce" else 1 / (len(answers) * n)
            w = torch.tensor(own)
            every += own if advantage else []
            # gspo's ratio is the answer's own, so each token's gradient is spread evenly over the answer
            weighed = w.mean() * logp.sum() if objective == "gspo" else (w * logp).sum()
            trained = trained - per_token * advantage * weighed
    trained.backward()
    expected = torch.cat([p.grad.flatten() for p in by_hand.parameters() if p.grad is not None])
    found = first_gradient(first, policy)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    if rule == "off":
        assert "sampling/effective_sample_share" not in metrics
        return
    assert max(every) > 1.4 or 0.0 in every  # the cap was met
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(statistics.fmean(every), rel=1e-4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(max(every), rel=1e-4)
    squares = sum(x * x for x in every)
    assert metrics["sampling/effective_sample_share"] == pytest.approx(sum(every) ** 2 / squares / len(every), rel=1e-4)
    assert metrics["sampling/corrected_share"] == pytest.approx(sum(x != 1 for x in every) / len(every))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"sampler": "vllm"}, Correction("token", "truncate", 3.0, 1e-3)),
        ({"sampler": "vllm", "sampler_correction": "off"}, None),
        ({"sampler": "vllm", "top_p": 0.9}, None),
        ({"sampler": "vllm", "old_logprobs": "sampler"}, None),
        (
            {"sampler_correction": "sequence_mask", "sampler_correction_cap": 2.0},
            Correction("sequence", "mask", 2.0, 1e-3),
        ),
    ],
)
def test_the_rule_that_settings_ask_for(changes: dict[str, Any], expected: Correction | None) -> None:
    assert correction_of(Config(**changes)) == expected


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"old_logprobs": "sampler"}])
def test_a_correction_that_could_not_be_right(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampler_correction is token_mask, but"):
        Config(sampler_correction="token_mask", **changes)


def test_the_verdict() -> None:
    gap = "sampling/sampling_logp_difference"
    served = Config(sampler="vllm")
    assert "2.0e-05 at most: rounding, nothing is corrected" in verdict(
        {f"{gap}/mean": 1e-6, f"{gap}/max": 2e-5}, served
    )
    strange = {f"{gap}/mean": 0.02, f"{gap}/max": 0.5, "sampling/corrected_share": 0.25,
               "sampling/effective_sample_share": 0.97}  # fmt: skip
    assert "25.0% of the tokens are weighed (token_truncate, cap 3), effective sample 97.0%" in verdict(strange, served)
    off = Config(sampler="vllm", sampler_correction="off")
    assert "more than rounding, and nothing corrects it" in verdict(strange, off)
    assert "were not compared" in verdict({}, served)
