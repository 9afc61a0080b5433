"""Micro-batches, packing, order and skipping cannot change an optimiser step's gradient."""

import copy
import random

import pytest
import torch
from tiny import (
    completion,
    gradients,
    optimiser_settings,
    padded_logprobs,
    random_ids,
    relative_gap,
    stir,
    tiny_lora,
    tiny_model,
)

from groupline.batch import make_batch
from groupline.models.packing import pack
from groupline.models.reference import Reference
from groupline.objective import BNPO, CISPO, DAPO, DR_GRPO, GRPO, GSPO, REINFORCE, RLOO, group_advantages
from groupline.records import Group, Problem, Rollout
from groupline.training.optim import Optimiser
from groupline.training.step import Scorer, fill_reference, train_step

BUDGET, TEMPERATURE = 10, 0.8
PROMPTS = random_ids([9, 1, 14], seed=1)
LENGTHS = [[4, 1, 7, 5], [1, 3, 10, 2], [6, 2, 1, 8]]
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.2], [0.3, 0.7, 0.0, 1.0]]
DEAD = [1.0, 1.0, 1.0, 1.0]
SPLITS = [1, 15, 24, 40, 10_000]  # one answer a row, ... everything in one row


@pytest.fixture(scope="module")
def policy():
    return tiny_model("qwen3", dtype=torch.float64)


def rollouts(policy, prompts=PROMPTS, rewards=REWARDS, cut=(), lengths=LENGTHS):
    """Groups whose log-probs come from other weights, so that ratios are off 1 and clips bind."""
    old = copy.deepcopy(policy)
    stir(old, 5, size=0.05)
    made = []
    for b, (prompt, own, scores) in enumerate(zip(prompts, lengths, rewards, strict=True)):
        answers = random_ids(own, seed=20 + len(prompt))
        with torch.no_grad():
            logp = padded_logprobs(old, pack([prompt], [answers]), TEMPERATURE).split(own)
        made.append(
            Group(
                Problem(f"g{b}", ""),
                tuple(
                    Rollout(
                        completion(prompt, a, "length" if (b, i) in cut else "stop", logprobs=x.tolist()), "", {}, r
                    )
                    for i, (a, x, r) in enumerate(zip(answers, logp, scores, strict=True))
                ),
            )
        )
    return made


class Recorder(Optimiser):
    """Keeps the gradient of the last step, then makes the step."""

    def __init__(self, model, **changes):
        super().__init__(model, optimiser_settings(**changes), 100)
        self.model = model

    def step(self):
        self.gradient = gradients(self.model)
        return super().step()


def gradient(policy, groups, objective, *, tokens=10_000, off_policy=True, skip_idle=True, shared=True):
    """The gradient of one step through make_batch and train_step, on a copy, and its metrics."""
    model = copy.deepcopy(policy)
    batch = make_batch(groups, objective, budget=BUDGET, micro_batch_tokens=tokens, skip_idle=skip_idle)
    scorer = Scorer(TEMPERATURE, shared)
    if objective.needs_reference and objective.kl_place == "loss":
        reference = copy.deepcopy(policy)
        stir(reference, 6, size=0.05)
        fill_reference(batch.micro_batches, Reference(reference), scorer)
    if off_policy:
        for micro in batch.micro_batches:
            micro.old_logp = micro.sampler_logp
    optimiser = Recorder(model)
    facts = train_step(model, optimiser, batch, objective, scorer)
    return optimiser.gradient, facts, len(batch.micro_batches)


OBJECTIVES = [GRPO, DR_GRPO, BNPO, RLOO.replace(beta=0.0), REINFORCE, DAPO, GSPO, CISPO]


@pytest.mark.parametrize("off_policy", [True, False], ids=["off policy", "on policy"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
def test_any_split_into_micro_batches_gives_the_same_gradient(policy, objective, off_policy):
    groups = rollouts(policy)
    expected, facts, count = gradient(policy, groups, objective, off_policy=off_policy)
    assert count == 1
    counts = set()
    for tokens in SPLITS[:-1]:
        got, other, count = gradient(policy, groups, objective, tokens=tokens, off_policy=off_policy)
        counts.add(count)
        assert relative_gap(got, expected) < 1e-6
        for key in facts.keys() - {"skipped_steps"}:
            assert other[key] == pytest.approx(facts[key], rel=1e-6, abs=1e-9), key
    assert max(counts) >= 8
    assert len(counts) >= 3


@pytest.mark.parametrize("objective", [GRPO, DAPO], ids=lambda o: o.name)
def test_plain_rows_give_the_gradient_of_packed_ones(policy, objective):
    groups = rollouts(policy)
    packed, _, _ = gradient(policy, groups, objective, tokens=40)
    plain, _, _ = gradient(policy, groups, objective, tokens=40, shared=False)
    assert relative_gap(packed, plain) < 1e-6


def test_the_step_equals_grpo_written_out(policy):
    """The mean over answers of token means of -min(r A, clip(r) A) + beta k3, on one padded batch, by autograd."""
    groups = rollouts(policy)
    got, _, _ = gradient(policy, groups, GRPO, tokens=24)
    model = copy.deepcopy(policy)
    reference = copy.deepcopy(policy)
    stir(reference, 6, size=0.05)
    answers = [[r.completion.ids for r in g.rollouts] for g in groups]
    row = pack(PROMPTS, answers)
    logp = padded_logprobs(model, row, TEMPERATURE)
    with torch.no_grad():
        ref = padded_logprobs(reference, row, TEMPERATURE)
    old = torch.tensor([x for g in groups for r in g.rollouts for x in r.completion.logprobs], dtype=torch.float64)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantage = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()[row.sequence]
    ratio = (logp - old).exp()
    assert ((ratio > 1.2) | (ratio < 0.8)).sum() > 5
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    per_token = per_token + 0.04 * ((ref - logp).exp() - (ref - logp) - 1)
    means = [per_token[row.sequence == s].mean() for s in range(12)]
    (sum(means) / 12).backward()
    assert relative_gap(got, gradients(model)) < 1e-6


@pytest.mark.parametrize("tokens", SPLITS)
def test_shuffled_groups_keep_each_tokens_own_advantage(policy, tokens):
    groups = rollouts(policy)
    order = list(range(3))
    random.Random(tokens).shuffle(order)
    expected = {
        ids: a
        for g, own in zip(groups, group_advantages(torch.tensor(REWARDS).flatten(), 4).view(3, 4).tolist(), strict=True)
        for ids, a in zip([r.completion.ids for r in g.rollouts], own, strict=True)
    }
    assert len(expected) == 12
    seen = set()
    batch = make_batch([groups[i] for i in order], GRPO, budget=BUDGET, micro_batch_tokens=tokens)
    for micro in random.Random(1).sample(batch.micro_batches, len(batch.micro_batches)):
        answers = [ids for own in micro.row.answers for ids in own]
        for s, ids in enumerate(answers):
            mine = micro.row.sequence == s
            assert tuple(micro.row.targets[mine].tolist()) == ids
            assert micro.advantages[mine].tolist() == pytest.approx([expected[ids]] * len(ids), rel=1e-6)
            seen.add(ids)
    assert seen == expected.keys()


@pytest.mark.parametrize("objective", [GRPO, DAPO, GSPO], ids=lambda o: o.name)
def test_the_order_of_groups_and_of_answers_changes_no_gradient(policy, objective):
    groups = rollouts(policy)
    expected, _, _ = gradient(policy, groups, objective, tokens=24)
    mixed = [Group(g.problem, tuple(random.Random(i).sample(g.rollouts, 4))) for i, g in enumerate(groups)]
    got, _, _ = gradient(policy, mixed[::-1], objective, tokens=24)
    assert relative_gap(got, expected) < 1e-6


# Groups without signal


@pytest.mark.parametrize("objective", [GRPO.replace(beta=0.0), DR_GRPO, DAPO, GSPO, CISPO], ids=lambda o: o.name)
def test_skipping_dead_groups_changes_neither_gradient_nor_moments(policy, objective):
    groups = rollouts(policy, rewards=[REWARDS[0], DEAD, REWARDS[2]])
    results = []
    for skip in (True, False):
        model = copy.deepcopy(policy)
        optimiser = Recorder(model)
        for step in range(3):
            batch = make_batch(groups, objective, budget=BUDGET, micro_batch_tokens=40, skip_idle=skip)
            assert batch.skipped == (sum(1 for a in batch.advantages if a == 0) if skip else 0)
            for micro in batch.micro_batches:
                micro.old_logp = micro.sampler_logp
            train_step(model, optimiser, batch, objective, Scorer(TEMPERATURE))
            if step == 0:
                first = optimiser.gradient
        moments = {n: optimiser.adam.state[p] for n, p in model.named_parameters()}
        results.append((first, moments, {n: p.detach() for n, p in model.named_parameters()}))
    (g, moments, weights), (e, expected, expected_weights) = results
    assert relative_gap(g, e) < 1e-6
    for n, state in expected.items():
        assert state["step"] == moments[n]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments[n][key], state[key], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(weights[n], expected_weights[n], rtol=1e-5, atol=1e-7)


def test_dead_groups_have_a_kl_gradient_while_beta_is_not_0(policy):
    """It is GRPO's definition: the penalty draws every answer back, judged or not."""
    groups = rollouts(policy, rewards=[DEAD] * 3)
    with_kl, _, count = gradient(policy, groups, GRPO)
    assert count == 1
    assert max(float(x.abs().max()) for x in with_kl.values()) > 1e-6
    without, _, count = gradient(policy, groups, GRPO.replace(beta=0.0))
    assert count == 0
    assert not any(x.any() for x in without.values())


@pytest.mark.parametrize("why", ["dead", "truncated"])
@pytest.mark.parametrize("objective", [GRPO.replace(beta=0.0), DAPO, DR_GRPO], ids=lambda o: o.name)
def test_a_step_without_any_gradient_leaves_the_weights_and_counts(policy, objective, why):
    if why == "dead":
        groups = rollouts(policy, rewards=[DEAD] * 3)
    else:
        groups = rollouts(policy, cut=[(b, i) for b in range(3) for i in range(4)])
        objective = objective.replace(mask_truncated=True)
    model = copy.deepcopy(policy)
    optimiser = Recorder(model)
    batch = make_batch(groups, objective, budget=BUDGET, micro_batch_tokens=40)
    facts = train_step(model, optimiser, batch, objective, Scorer(TEMPERATURE))
    assert batch.skipped == 12
    assert facts["loss"] == facts["grad_norm"] == facts["num_trained_tokens"] == 0
    assert not any(x != x for x in facts.values())
    for (n, p), before in zip(model.named_parameters(), policy.parameters(), strict=True):
        assert torch.equal(p, before), n
        state = optimiser.adam.state[p]
        assert state["step"] == 1  # the optimiser made its step
        assert not state["exp_avg"].any()


def test_moments_go_on_through_a_step_without_gradient(policy):
    """A dead step after a live one moves the weights as Adam with a zero gradient does, by its formula."""
    model = copy.deepcopy(policy)
    optimiser = Recorder(model)
    objective = GRPO.replace(beta=0.0)
    live, dead = (
        make_batch(rollouts(policy, rewards=r), objective, budget=BUDGET, micro_batch_tokens=40)
        for r in (REWARDS, [DEAD] * 3)
    )
    train_step(model, optimiser, live, objective, Scorer(TEMPERATURE))
    g = optimiser.gradient
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_step(model, optimiser, dead, objective, Scorer(TEMPERATURE))
    for n, p in model.named_parameters():
        mean = 0.9 * 0.1 * g[n] / (1 - 0.9**2)
        square = 0.999 * 0.001 * g[n] ** 2 / (1 - 0.999**2)
        torch.testing.assert_close(p.detach(), before[n] - 1e-2 * mean / (square.sqrt() + 1e-8), rtol=0, atol=1e-9)


def test_masked_answers_change_nothing_by_their_content(policy):
    """Truncated and masked: another text of theirs, another length, gives the same gradient (per-token weights)."""
    objective = DAPO.replace(mask_truncated=True)
    cut = [(0, 1), (2, 3)]
    expected, facts, _ = gradient(policy, rollouts(policy, cut=cut), objective, off_policy=False)
    lengths = [list(own) for own in LENGTHS]
    lengths[0][1], lengths[2][3] = 9, 2
    groups = rollouts(policy, cut=cut)
    others = rollouts(policy, cut=cut, lengths=lengths)
    mixed = [
        Group(g.problem, tuple(o if (b, i) in cut else r for i, (r, o) in enumerate(zip(g.rollouts, h.rollouts,
                                                                                     strict=True))))
        for b, (g, h) in enumerate(zip(groups, others, strict=True))
    ]  # fmt: skip
    got, other, _ = gradient(policy, mixed, objective, off_policy=False)
    assert relative_gap(got, expected) < 1e-12
    assert facts["num_trained_tokens"] == other["num_trained_tokens"] == sum(map(sum, LENGTHS)) - 1 - 8


# First update and scoring


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bloom"])
def test_the_first_update_has_ratio_1_and_no_kl(kind):
    """Old, reference and trained log-probs come from the same weights by the same road, at the sampling temperature."""
    model = tiny_model(kind)
    groups = rollouts(model)
    scorer, reason = Scorer.for_model(model, TEMPERATURE, torch.float32)
    assert (reason is not None) == (kind == "bloom")
    batch = make_batch(groups, GRPO, budget=BUDGET, micro_batch_tokens=40)
    fill_reference(batch.micro_batches, Reference(model), scorer)
    facts = train_step(model, Recorder(model), batch, GRPO, scorer)
    assert facts["ratio/min"] == facts["ratio/max"] == 1.0
    assert facts["kl"] == 0.0
    assert facts["loss"] == pytest.approx(0.0, abs=1e-6)  # near 0 whatever is learned; the gradient is not
    assert facts["grad_norm"] > 1e-3


def test_scores_are_at_the_sampling_temperature(policy):
    row = pack(PROMPTS, [random_ids(own, 9) for own in LENGTHS])
    with torch.no_grad():
        for t in (0.5, 1.0, 1.6):
            got, _ = Scorer(t)(policy, row)
            torch.testing.assert_close(got, padded_logprobs(policy, row, t), rtol=0, atol=1e-6)


def test_an_adapters_dropout_survives_the_check_of_its_model():
    """With dropout on, two passes differ; the ratio of the first is 1 by construction, later ones are not."""
    policy = tiny_lora("llama", dropout=0.5)
    for name, module in policy.named_modules():
        module.training = "lora_dropout" in name
    scorer, _ = Scorer.for_model(policy, 1.0, torch.float32)
    row = pack(PROMPTS, [random_ids(own, 9) for own in LENGTHS])
    with torch.no_grad():
        assert not torch.equal(scorer(policy, row)[0], scorer(policy, row)[0])


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_point_the_same_way(compute):
    model = tiny_lora("llama")
    groups = rollouts(model)
    results = []
    for dtype in (torch.float32, compute):
        copied = copy.deepcopy(model)
        optimiser = Recorder(copied)
        batch = make_batch(groups, DAPO, budget=BUDGET, micro_batch_tokens=40)
        train_step(copied, optimiser, batch, DAPO, Scorer(TEMPERATURE, compute=dtype))
        results.append(torch.cat([x.flatten() for x in optimiser.gradient.values()]))
    exact, half = results
    assert float(torch.cosine_similarity(exact, half, 0)) > 0.999
    assert float(half.norm() / exact.norm()) == pytest.approx(1, abs=0.02)
