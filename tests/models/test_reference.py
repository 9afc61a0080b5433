"""The reference of the KL penalty: what the policy was when it was passed in, at step 0 and ever after."""

import pytest
import torch
from tiny import (
    group,
    optimiser_settings,
    plain_logprobs,
    random_ids,
    stir,
    tiny_lora,
    tiny_model,
)

from groupline.batch import make_batch
from groupline.models.lora import add_lora
from groupline.models.reference import Reference
from groupline.objective import GRPO
from groupline.training.optim import Optimiser
from groupline.training.step import Scorer, fill_reference, train_step

ROW = random_ids([14])[0]


@torch.no_grad()
def score(model):
    return plain_logprobs(model, ROW[:4], ROW[4:])


def loaded_adapter(kind="llama", dropout=0.0):
    """As a user passes it in: an adapter that has been trained already."""
    return tiny_lora(kind, dropout=dropout)


def fresh_adapter(kind="llama"):
    return add_lora(tiny_model(kind), 4).eval()


KINDS = [
    (tiny_model, {}, "frozen copy"),
    (loaded_adapter, {}, "starting adapter"),
    (fresh_adapter, {"fresh_adapter": True}, "adapter off"),
]


@pytest.mark.parametrize(("make", "settings", "kind"), KINDS, ids=[k for *_, k in KINDS])
def test_the_reference_is_what_was_passed_in_and_stays_it(make, settings, kind):
    policy = make("llama")
    stir(policy, 9, only="" if kind == "frozen copy" else "lora_A")  # changed in memory after it was made or loaded
    start = score(policy)
    reference = Reference(policy, **settings)
    assert reference.kind == kind
    for seed in range(3):
        with reference.running() as model:
            assert torch.equal(score(model), start)
        stir(policy, seed)
        moved = score(policy)
        assert (moved - start).abs().max() > 0.01
        with reference.running() as model:
            assert torch.equal(score(model), start)
        assert torch.equal(score(policy), moved)  # the policy has its own weights back


@pytest.mark.parametrize(("make", "settings", "kind"), KINDS, ids=[k for *_, k in KINDS])
def test_training_moves_the_policy_and_not_the_reference(make, settings, kind):
    policy = make("llama")
    start = score(policy)
    reference = Reference(policy, **settings)
    prompt, *answers = random_ids([5, 4, 6, 2, 5], 3)
    optimiser = Optimiser(policy, optimiser_settings(), 10)
    kl = []
    for _ in range(10):
        batch = make_batch([group("g", prompt, answers, [1, 0, 0.5, 0])], GRPO, budget=8, micro_batch_tokens=100)
        fill_reference(batch.micro_batches, reference, Scorer())
        kl.append(train_step(policy, optimiser, batch, GRPO, Scorer())["kl"])
    assert kl[0] == 0.0
    assert kl[-1] > 1e-3
    with reference.running() as model:
        assert torch.equal(score(model), start)
    assert (score(policy) - start).abs().max() > 0.01


def test_a_fresh_adapters_reference_is_the_base():
    policy = fresh_adapter()
    base = score(policy)
    stir(policy, 1)
    with Reference(policy, fresh_adapter=True).running() as model:
        assert torch.equal(score(model), base)


def test_an_adapter_passed_in_is_not_switched_off():
    policy = loaded_adapter()
    with policy.disable_adapter():
        base = score(policy)
    with Reference(policy).running() as model:
        assert (score(model) - base).abs().max() > 0.01


def test_the_policy_comes_back_after_an_error():
    policy = loaded_adapter()
    reference = Reference(policy)
    stir(policy, 1)
    moved = score(policy)
    with pytest.raises(RuntimeError, match="inside"), reference.running():
        raise RuntimeError("inside")
    assert torch.equal(score(policy), moved)


def test_a_copy_takes_no_gradient_and_shares_nothing():
    policy = tiny_model("llama")
    with Reference(policy).running() as model:
        assert not any(p.requires_grad for p in model.parameters())
        assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in policy.parameters()}
    assert all(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("fresh", [True, False])
def test_the_reference_has_no_dropout(fresh):
    policy = loaded_adapter(dropout=0.5)
    start = score(policy)
    with policy.disable_adapter():
        base = score(policy)
    reference = Reference(policy, fresh_adapter=fresh)
    policy.train()
    with reference.running() as model:
        assert torch.equal(score(model), base if fresh else start)
    assert all(m.training for m in policy.modules())
    policy = tiny_model("phi", resid_pdrop=0.5, embd_pdrop=0.5)
    start = score(policy)
    with Reference(policy.train()).running() as model:
        assert torch.equal(score(model), start)
