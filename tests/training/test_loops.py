"""Whole runs: every row, learning, nothing to learn, and the ends a run may come to."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from small import EVEN, LETTERS, config, even_share, rows, run, same, sums, twin, varied, weights
from torch import nn
from transformers import AutoModelForCausalLM

from groupline.models.load import load_model
from groupline.models.lora import add_lora
from groupline.objective import OBJECTIVES
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Reward
from groupline.training.summary import summarise


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_row_runs(name: str, lora: int, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Two steps of two updates; weights move, nothing is NaN, and a KL is there where the row has one."""
    policy = twin(first)
    settings = config(tmp_path / "run", objective=name, beta=None, num_iterations=2, lora_r=lora, learning_rate=5e-3)
    results = run(settings, policy, tokenizer)
    assert results["objective"] == name
    for m in rows(tmp_path / "run" / "metrics.jsonl"):
        assert None not in m.values()
        assert m["ratio/min"] < 1 < m["ratio/max"]
        assert ("kl" in m) == (OBJECTIVES[name].beta > 0)
    changed = [
        k for k, w in weights(policy).items() if "lora_" not in k and not torch.equal(w, weights(first)[plain(k)])
    ]
    assert bool(changed) == (lora == 0)


def plain(name: str) -> str:
    """A weight's name without what PEFT puts around it."""
    return name.replace("base_layer.", "")


@pytest.mark.parametrize(
    ("lora", "kind"),
    [(0, "frozen copy"), (4, "adapter off"), (-1, "starting adapter")],
    ids=["full", "lora", "adapter"],
)
def test_kl_to_where_the_policy_began(lora: int, kind: str, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Cases L2 and L3: the reference is what was passed in, adapter and all; its KL is 0 first and then is not."""
    policy: Any = model
    if lora < 0:
        policy = add_lora(model, 4)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter += 0.1
    said: list[str] = []
    settings = config(tmp_path / "run", beta=0.1, lora_r=max(lora, 0), learning_rate=1e-2, steps=3)
    run(settings, policy, tokenizer, say=said.append)
    assert f"{kind}, beta 0.1 on k3" in said[0]
    kl = [m["kl"] for m in rows(tmp_path / "run" / "metrics.jsonl")]
    assert abs(kl[0]) < 1e-6
    assert min(kl[1:]) > 1e-5


def test_a_policy_is_held_by_a_strong_penalty(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    ends = {}
    for beta in (0.0, 5.0):
        policy = twin(first)
        run(config(tmp_path / str(beta), beta=beta, steps=15, learning_rate=3e-3, stop=()), policy, tokenizer)
        ids = torch.randint(0, 300, (8, 12), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            p = torch.log_softmax(policy(ids).logits, -1)
            q = torch.log_softmax(first(ids).logits, -1)
        ends[beta] = float((p.exp() * (p - q)).sum(-1).mean())
    assert ends[5.0] < 0.6 * ends[0.0]


@pytest.mark.parametrize("lora", [0, 8], ids=["full", "lora"])
def test_training_raises_the_reward(lora: int, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """An easy reward, the share of even token ids, goes far up in 20 steps.

    An adapter does not reach the head, and that of a random model is too flat to prefer any token: it is scaled up.
    """
    if lora:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(4)  # type: ignore[operator]
    settings = config(
        tmp_path / "run", steps=20, prompts_per_step=4, num_generations=8, learning_rate=2e-2, stop=(), lora_r=lora,
    )  # fmt: skip
    results = run(settings, model, tokenizer)
    reward = [s["reward"] for s in results["steps"]]
    assert statistics.fmean(reward[:2]) < 0.6
    assert statistics.fmean(reward[-3:]) > max(0.85, statistics.fmean(reward[:2]) + 0.3)


@pytest.mark.parametrize("value", [0.0, 0.35, 0.1 + 0.2, None])
def test_nothing_to_learn(value: float | None, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Cases N1 and N10: equal rewards, or none at all, leave every weight as it was; counted, and no NaN."""
    policy = twin(first)
    same_for_all = Reward("same", lambda completions, **_: [value for _ in completions])
    run(config(tmp_path / "run", num_iterations=2, weight_decay=0.0), policy, tokenizer, rewards=[same_for_all])
    assert same(weights(policy), weights(first))
    for m in rows(tmp_path / "run" / "metrics.jsonl"):
        assert None not in m.values()
        assert (m["frac_groups_with_signal"], m["frac_reward_zero_std"], m["answers_skipped"]) == (0, 1, 12)
        assert (m["loss"], m["grad_norm"], m["micro_batches"], m["num_trained_tokens"]) == (0, 0, 0, 0)
        assert m["rewards_not_applicable"] == (12 if value is None else 0)
    assert {r["advantage"] for r in rows(tmp_path / "run" / "rollouts.jsonl")} == {0.0}


def test_every_answer_truncated_and_masked(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case N10."""
    policy = twin(first)
    run(config(tmp_path / "run", stop=(), max_completion_length=3, mask_truncated_completions=True), policy, tokenizer)
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [m["completions/clipped_ratio"] for m in metrics] == [1, 1]
    assert [m["answers_skipped"] for m in metrics] == [12, 12]
    assert [m["loss"] for m in metrics] == [0, 0]
    assert same(weights(policy), weights(first))


def test_momentum_goes_on_through_a_step_without_signal(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """The optimiser steps with zero gradients, so its moments evolve as they would."""
    ends = []
    for steps in (1, 2):
        policy = twin(first)
        calls = iter(range(100))

        def once(completion_ids: list[list[int]], calls: Any = calls, **_: Any) -> list[float]:
            return even_share(completion_ids) if next(calls) == 0 else [0.0 for _ in completion_ids]

        run(config(tmp_path / str(steps), steps=steps), policy, tokenizer, rewards=[Reward("once", once)])
        ends.append(weights(policy))
    assert rows(tmp_path / "2" / "metrics.jsonl")[1]["grad_norm"] == 0
    # Adam's second step on a zero gradient moves by m / sqrt(v): rate * (0.9 * 0.1 / 0.19) / sqrt(0.999 * 0.001 / 0.001999)
    name = "model.embed_tokens.weight"
    one, two = ends[0][name] - weights(first)[name], ends[1][name] - ends[0][name]
    moved = one.abs() > 0.99e-3
    factor = (0.09 / 0.19) / (0.000999 / 0.001999) ** 0.5
    assert moved.any()
    assert torch.allclose(two[moved], factor * one[moved], rtol=1e-2)


def test_steps_are_drawn_anew(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case M11: answers of a group differ, and the same problem in another step gets other answers."""
    run(config(tmp_path / "run", steps=3, learning_rate=1e-12), model, tokenizer, problems=sums(3))
    found = rows(tmp_path / "run" / "rollouts.jsonl")
    assert {r["problem"] for r in found} == {"sum-0", "sum-1", "sum-2"}
    assert len({tuple(r["ids"]) for r in found}) > len(found) * 0.9


def test_more_prompts_a_step_than_problems(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run(config(tmp_path / "run", prompts_per_step=5), model, tokenizer, problems=sums(3))
    for step in (1, 2):
        mine = [r for r in rows(tmp_path / "run" / "rollouts.jsonl") if r["step"] == step]
        assert len({r["problem"] for r in mine}) == 3
        assert len({tuple(r["ids"]) for r in mine}) > 15  # twice the same problem, not twice the same answers


def test_interrupted_in_the_second_step(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Ctrl-C anywhere in a step: files of whole steps, the model as it is, and `interrupted` in the results."""
    calls = iter(range(100))

    def stop(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return even_share(completion_ids)

    policy, said = twin(first), []
    results = run(config(tmp_path / "run", steps=5), policy, tokenizer, rewards=[Reward("stop", stop)], say=said.append)
    folder = tmp_path / "run"
    assert said[-1] == "interrupted after 1 steps: saving the model as it is"
    assert results == json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert [s["step"] for s in results["steps"]] == [m["step"] for m in rows(folder / "metrics.jsonl")] == [1]
    assert len(rows(folder / "rollouts.jsonl")) == 12
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert same(weights(loaded), weights(policy))
    assert not same(weights(loaded), weights(first))


def test_interrupted_before_anything_was_learnt(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    def stop(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    results = run(config(tmp_path / "run"), twin(first), tokenizer, rewards=[Reward("stop", stop)], held_out=sums(2))
    assert results["interrupted"]
    assert results["steps"] == []
    assert results["held_out"]["before"] is None
    assert same(weights(load_model(str(tmp_path / "run" / "model"))), weights(first))


def test_half_precision_on_request(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """bf16 passes on fp32 weights: sampler and trainer agree to what bf16 can hold, and the master weights move."""
    policy = twin(first)
    run(config(tmp_path / "run", precision="bf16"), policy, tokenizer)
    for m in rows(tmp_path / "run" / "metrics.jsonl"):
        assert 1e-6 < m["sampling/sampling_logp_difference/mean"] < 0.05
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert not same(weights(policy), weights(first))


def test_metrics_are_means_over_answers() -> None:
    """Case N14: 3 right of 12 and 3 of 4 are 6 of 16, not the mean of two means; case R3: None is no reward."""

    def rollout(reward: float | None, length: int, reason: Any) -> Rollout:
        completion = Completion((1, 2), (5,) * length, (-1.0,) * length, (-1.0,) * length, reason, SamplingParams())
        return Rollout(completion, "", {"judge": reward}, reward)

    few = [rollout(r, 2, "stop") for r in (1.0, 1.0, 1.0, 0.0)] + [rollout(None, 2, "length")] * 8
    many = [rollout(1.0, 4, "stop")] * 3 + [rollout(0.0, 6, "length")] * 9
    found = summarise([Group(Problem("a", "q"), tuple(few)), Group(Problem("b", "q"), tuple(many))], "judge")
    assert found["reward"] == found["rewards/judge/mean"] == 6 / 16
    assert found["reward_std"] == pytest.approx(statistics.stdev([1.0] * 6 + [0.0] * 10))
    assert found["accuracy"] == 6 / 24
    assert found["rewards_not_applicable"] == 8
    assert found["completions/mean_length"] == (12 * 2 + 3 * 4 + 9 * 6) / 24
    assert found["completions/mean_terminated_length"] == (4 * 2 + 3 * 4) / 7
    assert found["completions/clipped_ratio"] == pytest.approx(17 / 24)
    assert found["num_prompt_tokens"] == 4
    assert (found["groups/mixed"], found["groups/all_wrong"], found["groups/all_right"]) == (1, 0, 0)


def test_rewards_that_change_from_step_to_step_are_logged_as_such(
    tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    """A function of weight 0 is recorded by name and counts for nothing."""
    watched = varied(float)
    run(
        config(tmp_path / "run", steps=3), model, tokenizer,
        rewards=[EVEN, Reward(watched.name, watched.function, 0.0)],
    )  # fmt: skip
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [m["rewards/varied/mean"] for m in metrics] == [0, 1, 2]
    assert all(m["reward"] == m["rewards/even_share/mean"] < 1 for m in metrics)


def test_stop_strings_end_answers(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case M7: the text is cut before the stop string; the ids that were drawn are kept."""
    run(config(tmp_path / "run", steps=1), model, tokenizer)
    found = rows(tmp_path / "run" / "rollouts.jsonl")
    assert {r["finish_reason"] for r in found} == {"stop", "length"}
    for r in found:
        assert not set(r["text"]) & set(LETTERS)
        stopped = any(letter in tokenizer.decode(r["ids"]) for letter in LETTERS)
        assert stopped == (r["finish_reason"] == "stop")
