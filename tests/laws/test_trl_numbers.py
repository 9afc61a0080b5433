"""GRPOConfig's options against TRL: the same recorded answers, TRL's own loss on a padded batch, gradients in the weights.

Legend: S answers, L longest answer.
"""

import copy
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tiny import gradients, group, optimiser_settings, random_ids, relative_gap, stir, tiny_model

from groupline.batch import make_batch
from groupline.models.reference import Reference
from groupline.records import Completion, Group, Rollout
from groupline.training.optim import Optimiser
from groupline.training.step import Scorer, fill_reference, train_step
from groupline.trl import GRPOConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import nanstd

LENGTHS = [3, 6, 1, 4, 5, 2, 6, 3]
G, S, L, BUDGET = 4, 8, 6, 9
PROMPTS = random_ids([4, 7], seed=1)
ANSWERS = random_ids(LENGTHS, seed=2)
REWARDS = [1.0, 0.3, 0.3, 0.0, 2.0, None, 0.5, 1.0]
TRUNCATED = [1, 6]
BASE = {"num_generations": G, "per_device_train_batch_size": S, "max_completion_length": BUDGET, "temperature": 0.7}


@pytest.fixture(scope="module")
def policy():
    return tiny_model("llama")


def padded(model, temperature):
    """Log-probs and entropies [S, L] of the answers, one right-padded sequence a row; 0 behind an answer's end."""
    logp, entropy = [], []
    for i, answer in enumerate(ANSWERS):
        prompt = PROMPTS[i // G]
        z = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1] / temperature
        full = z.log_softmax(-1)
        room = (0, L - len(answer))
        logp.append(torch.nn.functional.pad(full.gather(-1, torch.tensor(answer)[:, None])[:, 0], room))
        entropy.append(torch.nn.functional.pad(-(full.exp() * full).sum(-1), room))
    return torch.stack(logp), torch.stack(entropy)


class Accelerator:
    num_processes = 1

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, **_):
        return x


def theirs(policy, reference, old, options, rows=None):
    """(loss, gradient in the weights) of TRL's `_compute_loss`, its arguments a real `trl.GRPOConfig`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **BASE | options)
    model = copy.deepcopy(policy)
    mask = torch.arange(L) < torch.tensor(LENGTHS)[:, None]  # [S, L]
    if args.mask_truncated_completions:
        mask[TRUNCATED] = False
    rewards = torch.tensor([float("nan") if r is None else r for r in REWARDS]).view(-1, G)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    if args.scale_rewards != "none":
        std = nanstd(rewards, dim=1, keepdim=True) if args.scale_rewards == "group" else nanstd(rewards.flatten())
        centred = centred / (std + 1e-4)
    advantages = centred.flatten().nan_to_num(nan=0.0)
    rows = list(range(S)) if rows is None else rows
    logp, entropy = padded(model, args.temperature)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp[rows], entropy[rows].detach(), None),
        _metrics={"train": defaultdict(list)}, _entropy_bonus_enabled=False, accelerator=Accelerator(), args=args,
        aux_loss_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=BUDGET,
        model=SimpleNamespace(training=True), off_policy_mask_threshold=None, use_vllm=False,
        vllm_importance_sampling_correction=False, beta=args.beta, epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high, loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level, top_entropy_quantile=args.top_entropy_quantile,
    )  # fmt: skip
    stub.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(stub, *a)
    ones = torch.ones(len(rows), 2, dtype=torch.long)
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": torch.ones(len(rows), L, dtype=torch.long),
        "completion_mask": mask[rows].long(), "advantages": advantages[rows], "old_per_token_logps": old[rows],
        "num_items_in_batch": mask.sum(), "ref_per_token_logps": padded(reference, args.temperature)[0].detach()[rows],
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(stub, None, inputs)
    loss.backward()
    return loss.item(), gradients(model), advantages


class Recorder(Optimiser):
    """Keeps the gradient and changes nothing."""

    def __init__(self, model):
        super().__init__(model, optimiser_settings(), 1)
        self.model = model

    def step(self):
        self.gradient = gradients(self.model)
        self.adam.zero_grad()
        return {}


def recorded(old, temperature=0.7):
    groups = []
    for b in range(S // G):
        made = group(str(b), PROMPTS[b], ANSWERS[b * G : (b + 1) * G], REWARDS[b * G : (b + 1) * G])
        rollouts = []
        for i, r in enumerate(made.rollouts, b * G):
            drawn = tuple(old[i, : LENGTHS[i]].tolist())
            c = r.completion
            finish = "length" if i in TRUNCATED else "stop"
            c = Completion(c.prompt_ids, c.ids, drawn, drawn, finish, c.params)
            rollouts.append(Rollout(c, r.text, r.rewards, r.reward))
        groups.append(Group(made.problem, tuple(rollouts)))
    return groups


def ours(policy, reference, old, options, tokens=1000):
    """[(loss, gradient, answers)] of each update of a pass, and the advantages."""
    args = GRPOConfig(**BASE | options)
    model = copy.deepcopy(policy)
    objective = args.objective()
    batch = make_batch(
        recorded(old), objective, budget=BUDGET, micro_batch_tokens=tokens, parts=args.updates_per_pass, seed=5
    )
    scorer = Scorer(args.temperature)
    if args.beta:
        fill_reference(batch.micro_batches, Reference(reference), scorer)
    found = []
    for part in batch.updates():
        for micro in part.micro_batches:
            micro.old_logp = micro.sampler_logp
        optimiser = Recorder(model)
        facts = train_step(model, optimiser, part, objective, scorer)
        found.append((facts["loss"], optimiser.gradient, [i for m in part.micro_batches for i in m.answers]))
    return found, batch.advantages


def models(policy):
    """Reference, and the old log-probs [S, L]: of weights a little away, so that clipping happens."""
    reference, before = copy.deepcopy(policy), copy.deepcopy(policy)
    stir(reference, 6, size=0.05)
    stir(before, 7, size=0.05)
    with torch.no_grad():
        return reference, padded(before, 0.7)[0]


CASES = [
    {},
    *({"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
    {"loss_type": "cispo", "epsilon_high": 1.3},
    {"loss_type": "cispo"},
    *({"loss_type": kind, "mask_truncated_completions": True} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
    *({"loss_type": kind, "importance_sampling_level": "sequence"} for kind in ("grpo", "luspo", "dapo")),
    *({"scale_rewards": scale} for scale in ("group", "batch", "none", True, False)),
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.25, "loss_type": "grpo"},
    *({"top_entropy_quantile": share, "loss_type": kind} for share in (0.2, 0.5) for kind in ("dapo", "grpo")),
    {"top_entropy_quantile": 0.3, "mask_truncated_completions": True, "beta": 0.1},
    *({"beta": 0.2, "loss_type": kind} for kind in ("grpo", "dapo", "cispo")),
    {"beta": 0.2, "use_bias_correction_kl": False},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_advantages_loss_and_gradient_are_those_of_trl(policy, options):
    reference, old = models(policy)
    loss, expected, advantages = theirs(policy, reference, old, options)
    [(found, got, _)], own = ours(policy, reference, old, options)
    torch.testing.assert_close(own.float(), advantages, rtol=1e-5, atol=1e-6)
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert relative_gap(got, expected) < 1e-5


def test_micro_batches_do_not_change_the_tokens_of_high_entropy(policy):
    reference, old = models(policy)
    options = {"top_entropy_quantile": 0.3}
    [(loss, expected, _)], _ = ours(policy, reference, old, options)
    [(found, got, _)], _ = ours(policy, reference, old, options, tokens=15)
    assert found == pytest.approx(loss, rel=1e-5)
    assert relative_gap(got, expected) < 1e-5


@pytest.mark.parametrize("options", [{"loss_type": k} for k in ("grpo", "dr_grpo", "dapo", "luspo")], ids=str)
def test_each_of_the_steps_of_a_generation(policy, options):
    """steps_per_generation 2, accumulation 1: two optimiser steps, each on half of the answers."""
    reference, old = models(policy)
    options = {**options, "per_device_train_batch_size": S // 2, "steps_per_generation": 2, "beta": 0.1}
    found, _ = ours(policy, reference, old, options)
    assert sorted(i for _, _, rows in found for i in rows) == list(range(S))
    for loss, got, rows in found:
        expected, gradient, _ = theirs(policy, reference, old, options, rows)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert relative_gap(got, gradient) < 1e-5


def test_the_reference_follows_the_policy_as_trl_has_it(policy):
    from trl.trainer.callbacks import SyncRefModelCallback

    model, expected = copy.deepcopy(policy), copy.deepcopy(policy)
    reference = Reference(model)
    stir(model, 3)
    SyncRefModelCallback._sync_target_model(model, expected, 0.6)
    reference.mix_in(0.6)
    with reference.running() as held:
        for one, other in zip(held.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
