"""The numbers of an optimiser step, each against an ordinary forward pass of one answer at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import EVEN, config, first_gradient, gap, plain_logprobs, rows, run, same, sums, twin, weights
from torch import Tensor, nn

from groupline.batch import Batch, make_batch, rewards_tensor
from groupline.objective import OBJECTIVES, k1, k2
from groupline.records import Group, Rollout
from groupline.training.collect import collect
from groupline.training.method import kl_penalised
from groupline.training.optim import NonFinite
from groupline.training.setup import Setup, prepare
from groupline.training.step import fill_old, fill_reference, train_step

BUDGET = 10


def begin(folder: Path, model: nn.Module, tokenizer: Any, **changes: Any) -> tuple[Setup, list[Group]]:
    """A run's parts and the groups of its first step."""
    setup = prepare(
        config(folder / "run", **changes), lambda line: None,
        model=model, tokenizer=tokenizer, rewards=[EVEN], problems=sums(12), held_out=[],
    )  # fmt: skip
    c = setup.config
    groups, _ = collect(
        setup.stream.take(0, c.prompts_per_step), setup.engine, tokenizer, setup.rewards, c.num_generations,
        setup.sampling, seed=0, label="step 0",
    )  # fmt: skip
    return setup, groups


def batch_of(setup: Setup, groups: list[Group], **given: Any) -> Batch:
    return make_batch(groups, setup.objective, **{"budget": BUDGET, "micro_batch_tokens": 60, **given})


def step(setup: Setup, batch: Batch) -> dict[str, float]:
    return train_step(setup.policy, setup.optimiser, batch, setup.objective, setup.scorer)


def answers_of(groups: list[Group]) -> list[Rollout]:
    return [r for g in groups for r in g.rollouts]


def logps(model: nn.Module, groups: list[Group]) -> list[Tensor]:
    """Per answer, the log-probs of its tokens."""
    with torch.no_grad():
        return [plain_logprobs(model, r.completion.prompt_ids, r.completion.ids) for r in answers_of(groups)]


def shift(model: nn.Module, size: float = 0.02, part: str = "") -> None:
    """Move every weight (with `part` in its name) a little, so that the policy is no longer the reference."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter += size * torch.randn(parameter.shape, generator=draw)


# What a row divides by and how it weighs a token, from the table of papers; S answers, n an answer's own tokens.
STD = {"grpo", "bnpo", "dapo", "gspo", "cispo"}
WEIGHT: dict[str, Callable[[int, int, int], float]] = {
    "grpo": lambda S, n, total: 1 / (S * n),
    "gspo": lambda S, n, total: 1 / (S * n),
    "rloo": lambda S, n, total: 1 / S,
    "dr_grpo": lambda S, n, total: 1 / (S * BUDGET),
    "bnpo": lambda S, n, total: 1 / total,
    "reinforce": lambda S, n, total: 1 / total,
    "dapo": lambda S, n, total: 1 / total,
    "cispo": lambda S, n, total: 1 / total,
}


def advantages_by_hand(name: str, groups: list[list[float]]) -> list[float]:
    out = []
    for g in groups:
        for i, r in enumerate(g):
            if name == "rloo":
                out.append(r - statistics.fmean(g[:i] + g[i + 1 :]))
            else:
                out.append((r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4 if name in STD else 1))
    return out


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_update_is_the_gradient_by_hand(name: str, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """On policy every row's gradient is the sum of -w A grad log p, whatever its ratio and clip.

    With Adam's epsilon at 1 and rate 1 the gradient is read back from the update.
    """
    policy = twin(first)
    settings = config(
        tmp_path / "run", steps=1, objective=name, beta=None, learning_rate=1.0, adam_epsilon=1.0, max_grad_norm=0.0,
        micro_batch_tokens=60,
    )  # fmt: skip
    run(settings, policy, tokenizer)
    answers = rows(tmp_path / "run" / "rollouts.jsonl")
    groups = [[r["reward"] for r in answers if r["group"] == g] for g in range(3)]
    lengths = [len(r["ids"]) for r in answers]
    assert len(set(lengths)) > 2  # or the ways to weigh a token could not be told apart
    by_hand = twin(first)
    loss = torch.zeros(())
    for r, n, advantage in zip(answers, lengths, advantages_by_hand(name, groups), strict=True):
        logp = plain_logprobs(by_hand, tokenizer(r["prompt"])["input_ids"], r["ids"])
        loss = loss - WEIGHT[name](len(answers), n, sum(lengths)) * advantage * logp.sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in by_hand.parameters() if p.grad is not None])
    found = first_gradient(first, policy)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert ("kl" in metrics) == (name in ("grpo", "rloo"))  # case N18: absent without a reference


def test_sampled_log_probs_are_those_of_the_policy(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case N5: at temperature 0.6 they are those of the logits over 0.6, in sampling and in training alike."""
    run(config(tmp_path / "run", steps=1, temperature=0.6), twin(first), tokenizer)
    for r in rows(tmp_path / "run" / "rollouts.jsonl"):
        prompt = tokenizer(r["prompt"])["input_ids"]
        with torch.no_grad():
            logits = first(input_ids=torch.tensor([[*prompt, *r["ids"]]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / 0.6, -1).gather(-1, torch.tensor(r["ids"])[:, None])[:, 0]
        assert r["logprobs"] == pytest.approx(logp.tolist(), abs=1e-4)
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_filters_make_the_log_probs_incomparable(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case N6: a difference between two distributions is not logged as if it were an error of one."""
    run(config(tmp_path / "run", steps=1, top_k=5), model, tokenizer)
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert not [k for k in metrics if k.startswith("sampling/")]
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1


def test_a_second_update_sees_a_ratio(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case N15: ratios and clip shares of the second pass, from the weights before and after the first one."""
    setup, groups = begin(tmp_path, twin(first), tokenizer, learning_rate=5e-3)
    batch = batch_of(setup, groups)
    assert len(batch.micro_batches) > 1
    one = step(setup, batch)
    assert one["ratio/min"] == one["ratio/max"] == 1
    assert one["clip_ratio/region_mean"] == 0
    new, old = logps(twin(setup.policy), groups), logps(first, groups)
    two = step(setup, batch)
    ratio = torch.cat([(a - b).exp() for a, b in zip(new, old, strict=True)])
    advantage = torch.cat([batch.advantages[i].expand(len(x)) for i, x in enumerate(new)])
    low = (ratio < 0.8) & (advantage < 0)
    high = (ratio > 1.2) & (advantage > 0)
    assert low.any()
    assert high.any()
    assert two["ratio/mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert two["ratio/min"] == pytest.approx(float(ratio.min()), rel=1e-3)
    assert two["ratio/max"] == pytest.approx(float(ratio.max()), rel=1e-3)
    assert two["clip_ratio/low_mean"] == pytest.approx(float(low.double().mean()))
    assert two["clip_ratio/high_mean"] == pytest.approx(float(high.double().mean()))
    assert two["num_trained_tokens"] == len(ratio)


def test_updates_are_counted_in_the_schedule(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """2 steps x 2 updates on a line to zero: the rates are 1, 3/4, 1/2, 1/4 of the first; a step logs its last."""
    run(config(tmp_path / "run", num_iterations=2, lr_scheduler_type="linear"), model, tokenizer)
    rates = [m["learning_rate"] for m in rows(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0.75e-3, 0.25e-3])


def test_entropy_and_kl_are_token_means(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case N13, with answers of different lengths: sums over tokens divided once."""
    setup, groups = begin(tmp_path, model, tokenizer, beta=0.04)
    assert setup.reference is not None
    shift(setup.policy)
    batch = batch_of(setup, groups)
    fill_reference(batch.micro_batches, setup.reference, setup.scorer)
    reference = setup.reference._copy
    kl, entropy, penalised = [], [], 0.0
    with torch.no_grad():
        for i, (now, ref, r) in enumerate(
            zip(logps(setup.policy, groups), logps(reference, groups), answers_of(groups), strict=True)
        ):
            x = (ref - now).double()
            kl += (x.exp() - 1 - x).tolist()
            c = r.completion
            logits = setup.policy(input_ids=torch.tensor([[*c.prompt_ids, *c.ids]])).logits[
                0, len(c.prompt_ids) - 1 : -1
            ]
            p = torch.softmax(logits.double(), -1)
            entropy += (-(p * p.log()).sum(-1)).tolist()
            per_token = -float(batch.advantages[i]) + 0.04 * (x.exp() - 1 - x)
            penalised += float(per_token.mean()) / 12
    facts = step(setup, batch)
    assert facts["kl"] == pytest.approx(statistics.fmean(kl), rel=1e-3)
    assert facts["kl"] > 1e-3
    assert facts["entropy"] == pytest.approx(statistics.fmean(entropy), rel=1e-5)
    assert facts["loss"] == pytest.approx(penalised, abs=1e-6)


def test_kl_taken_from_the_reward(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """RLOO: reward less beta times the sum over the answer of log(pi / pi_ref)."""
    setup, groups = begin(tmp_path, model, tokenizer, objective="rloo", beta=0.1)
    assert setup.reference is not None
    shift(setup.reference._copy)
    whole = batch_of(setup, groups, skip_idle=False)
    fill_reference(whole.micro_batches, setup.reference, setup.scorer)
    rewards, penalty = kl_penalised(whole, rewards_tensor(groups), setup.objective)
    with torch.no_grad():
        sums_ = [
            float((a - b).sum())
            for a, b in zip(logps(setup.policy, groups), logps(setup.reference._copy, groups), strict=True)
        ]
    assert max(map(abs, sums_)) > 0.1
    assert penalty.tolist() == pytest.approx(sums_, abs=1e-4)
    assert rewards.tolist() == pytest.approx(
        [float(r.reward or 0) - 0.1 * k for r, k in zip(answers_of(groups), sums_, strict=True)], abs=1e-4
    )


@pytest.mark.parametrize("kl", ["k1", "k2"])
def test_the_penalised_reward_is_the_objectives(kl: Any, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Over many micro-batches, with a reward that does not apply: bit for bit the sum written out token by token."""
    setup, groups = begin(tmp_path, model, tokenizer, objective="rloo", beta=0.1)
    assert setup.reference is not None
    shift(setup.reference._copy)
    whole = batch_of(setup, groups, skip_idle=False, micro_batch_tokens=40)
    fill_reference(whole.micro_batches, setup.reference, setup.scorer)
    assert len(whole.micro_batches) > 2
    given = rewards_tensor(groups)
    given[1] = math.nan
    rewards, penalty = kl_penalised(whole, given, setup.objective.replace(kl=kl))
    sums_ = [0.0] * len(given)
    for micro in whole.micro_batches:
        assert micro.ref_logp is not None
        per_token = {"k1": k1, "k2": k2}[kl](micro.sampler_logp, micro.ref_logp)
        for place, own in zip(micro.row.sequence.tolist(), per_token.tolist(), strict=True):
            sums_[micro.answers[place]] += own
    assert penalty.tolist() == sums_
    assert penalty.dtype == rewards.dtype == torch.float64
    expected = [r - 0.1 * k for r, k in zip(given.tolist(), sums_, strict=True)]
    assert math.isnan(rewards[1])
    assert [r for r in rewards.tolist() if r == r] == [r for r in expected if r == r]


def test_kl_from_the_reward_in_a_run(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Equal rewards stop being equal once the penalty is taken off: step 2 trains on what step 1 left."""
    run(config(tmp_path / "run", objective="rloo", beta=0.5, steps=2, learning_rate=1e-2), model, tokenizer)
    one, two = rows(tmp_path / "run" / "metrics.jsonl")
    assert abs(one["kl"]) < 1e-5
    assert abs(two["kl"]) > 1e-4


def test_old_log_probs_from_the_sampler_or_recomputed(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    ends, metrics = {}, {}
    for source in ("sampler", "recompute"):
        policy = twin(first)
        run(config(tmp_path / source, old_logprobs=source, num_iterations=2), policy, tokenizer)
        ends[source], metrics[source] = weights(policy), rows(tmp_path / source / "metrics.jsonl")
    for m in metrics["recompute"]:
        assert m["sampling/sampling_logp_difference/max"] > m["sampling/sampling_logp_difference/mean"] > 0
    setup, groups = begin(tmp_path, twin(first), tokenizer)
    batch = batch_of(setup, groups)
    for micro in batch.micro_batches:
        micro.old_logp = micro.sampler_logp
    facts = step(setup, batch)
    assert facts["sampling/sampling_logp_difference/max"] < 1e-4
    assert facts["ratio/max"] == pytest.approx(1, abs=1e-4)
    assert gap(ends["sampler"], ends["recompute"]) < 1e-4
    assert not same(ends["recompute"], weights(first))


def test_micro_batches_do_not_change_the_update(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Cases N4 and N16: sizes need not divide anything, and every token keeps its own answer's advantage."""
    found = {}
    for tokens in (10_000, 57, 1):
        setup, groups = begin(tmp_path, twin(first), tokenizer)
        batch = batch_of(setup, groups, micro_batch_tokens=tokens)
        if tokens == 57:
            batch.micro_batches.reverse()
        facts = step(setup, batch)
        found[tokens] = (len(batch.micro_batches), facts["grad_norm"], setup.optimiser.adam.state_dict()["state"])
    counts = [found[t][0] for t in (10_000, 57, 1)]
    assert counts[0] == 1
    assert 1 < counts[1] < counts[2] == 12  # one answer each
    for tokens in (57, 1):
        assert found[tokens][1] == pytest.approx(found[10_000][1], rel=1e-5)
        for one, other in zip(found[tokens][2].values(), found[10_000][2].values(), strict=True):
            assert torch.allclose(one["exp_avg"], other["exp_avg"], rtol=1e-4, atol=1e-8)


def test_a_log_prob_that_is_not_a_number_is_named(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case N17: never a ratio of 1; the answer and position are named, and no weight has changed."""
    setup, groups = begin(tmp_path, model, tokenizer)
    before = weights(setup.policy)
    batch = batch_of(setup, groups, micro_batch_tokens=10_000)
    (micro,) = batch.micro_batches
    at = int((micro.row.sequence == micro.answers.index(7)).nonzero()[0])
    micro.old_logp = micro.sampler_logp.clone()
    micro.old_logp[at] = math.nan
    with pytest.raises(NonFinite, match=rf"answers \[7\] of the step \(token {at} of its row\)"):
        step(setup, batch)
    assert same(weights(setup.policy), before)
    assert all(p.grad is None for p in setup.policy.parameters())


def test_no_dropout_in_old_and_reference_log_probs(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Case N11: an adapter with dropout 0.5 drops in training passes only."""
    setup, groups = begin(tmp_path, model, tokenizer, lora_r=4, lora_dropout=0.5, beta=0.04)
    assert setup.reference is not None
    shift(setup.policy, 0.1, "lora")
    setup.engine.load_weights(setup.policy, 1)
    groups, _ = collect(
        setup.stream.take(0, 3), setup.engine, tokenizer, setup.rewards, 4, setup.sampling, seed=0, label="again"
    )
    batch = batch_of(setup, groups, micro_batch_tokens=10_000)
    (micro,) = batch.micro_batches
    fill_old(batch.micro_batches, setup.policy, setup.scorer)
    fill_reference(batch.micro_batches, setup.reference, setup.scorer)
    assert micro.old_logp is not None
    assert micro.ref_logp is not None
    assert float((micro.old_logp - micro.sampler_logp).abs().max()) < 1e-4
    with torch.no_grad(), setup.policy.disable_adapter():  # type: ignore[operator]
        base = logps(setup.policy, groups)
    assert torch.allclose(micro.ref_logp, torch.cat([base[i] for i in micro.answers]), atol=1e-4)
    facts = step(setup, batch)
    assert facts["ratio/min"] < 0.99 < 1.01 < facts["ratio/max"]  # the training pass itself drops


def test_a_run_with_dropout_fills_the_old_ones_by_itself(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run(config(tmp_path / "run", lora_r=4, lora_dropout=0.5, steps=3, learning_rate=5e-2), model, tokenizer)
    first_step, *_, last = rows(tmp_path / "run" / "metrics.jsonl")
    assert first_step["ratio/max"] == 1  # the adapter is still zero
    assert last["ratio/max"] > 1.001


def test_dead_groups_keep_their_kl(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case N12: equal rewards have a KL gradient with beta, and are skipped without."""
    for beta, skipped in ((0.04, 0), (0.0, 12)):
        setup, groups = begin(tmp_path / str(beta), twin(first), tokenizer, beta=beta)
        shift(setup.policy)
        equal = [Group(g.problem, tuple(Rollout(r.completion, r.text, {}, 1.0) for r in g.rollouts)) for g in groups]
        batch = batch_of(setup, equal)
        if setup.reference is not None:
            fill_reference(batch.micro_batches, setup.reference, setup.scorer)
        facts = step(setup, batch)
        assert batch.skipped == skipped
        assert (facts["grad_norm"] > 1e-4) == (beta > 0)


def test_truncated_answers_leave_the_denominator(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case N9: masked answers are in neither numerator nor denominator of the loss, yet in their group's mean."""
    setup, groups = begin(tmp_path, twin(first), tokenizer, mask_truncated_completions=True, beta=0.04)
    assert setup.reference is not None
    shift(setup.policy)
    cut = [r.completion.finish_reason == "length" for r in answers_of(groups)]
    assert 0 < sum(cut) < 12
    batch = batch_of(setup, groups)
    fill_reference(batch.micro_batches, setup.reference, setup.scorer)
    with torch.no_grad():
        x = [
            (b - a).double()
            for a, b in zip(logps(setup.policy, groups), logps(setup.reference._copy, groups), strict=True)
        ]
    kept = [i for i in range(12) if not cut[i]]
    expected = sum(
        float((-float(batch.advantages[i]) + 0.04 * (x[i].exp() - 1 - x[i])).mean()) / len(kept) for i in kept
    )
    facts = step(setup, batch)
    assert facts["loss"] == pytest.approx(expected, abs=1e-6)
    assert facts["num_trained_tokens"] == sum(len(x[i]) for i in kept)
    by_hand = advantages_by_hand("grpo", [[float(r.reward or 0) for r in g.rollouts] for g in groups])
    assert batch.advantages.tolist() == pytest.approx(by_hand)
