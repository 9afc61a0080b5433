"""The LoRA layer as one product against PEFT's own forward, and the calls that are left to PEFT."""

import copy

import pytest
import torch
from tiny import adapted, gradients, random_ids, relative_gap, stir, tiny_lora, tiny_model
from torch import nn

from groupline.models.lora_linear import FusedLinear, fuse_lora, lora_product

IDS = torch.tensor(random_ids([14, 14]))


def plain(policy):
    """A copy whose LoRA layers are PEFT's own class again."""
    other = copy.deepcopy(policy)
    for module in other.modules():
        if type(module) is FusedLinear:
            module.__class__ = FusedLinear.__mro__[1]
    return other


def run(policy):
    policy.zero_grad(set_to_none=True)
    logits = policy(IDS).logits
    logits.square().mean().backward()
    return logits.detach(), gradients(policy)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_it_gives_pefts_own_numbers_and_gradients(kind):
    policy = plain(tiny_lora(kind))
    stir(policy, 2, only="lora_")
    layers = sum(isinstance(m, FusedLinear.__mro__[1]) for m in policy.modules())
    assert fuse_lora(policy) == layers > 0
    assert sum(type(m) is FusedLinear for m in policy.modules()) == layers
    assert fuse_lora(policy) == 0
    (ours, mine), (theirs, expected) = run(policy), run(plain(policy))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert set(mine) == set(expected)
    assert relative_gap(mine, expected) < 1e-4


@pytest.mark.parametrize("bias", [False, True])
def test_every_gradient_is_that_of_the_formula(bias):
    draw = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)

    tensors = [leaf(2, 5, 7), leaf(6, 7), leaf(6) if bias else None, leaf(3, 7), leaf(6, 3)]
    assert torch.autograd.gradcheck(lambda *t: lora_product(*t, 0.7), tensors)
    x, w, b, down, up = tensors
    expected = x @ w.T + 0.7 * (x @ down.T) @ up.T + (0 if b is None else b)
    torch.testing.assert_close(lora_product(*tensors, 0.7), expected)


def test_what_is_saved_and_named_does_not_change():
    policy = plain(tiny_lora("llama"))
    names = list(policy.state_dict())
    assert fuse_lora(policy)
    assert list(policy.state_dict()) == names


def test_calls_that_are_not_plain_are_pefts_own(monkeypatch):
    policy = tiny_lora("llama", dropout=0.5)
    stir(policy, 2, only="lora_")
    fuse_lora(policy)
    used = []
    inner = lora_product
    monkeypatch.setattr("groupline.models.lora_linear.lora_product", lambda *a: used.append(1) or inner(*a))
    policy.eval()
    with torch.no_grad():
        evaluated = policy(IDS).logits
        assert used
        used.clear()
        with policy.disable_adapter():
            base = policy(IDS).logits
        policy.train()
        policy(IDS)
        policy.eval()
        with torch.autocast("cpu", torch.bfloat16):
            policy(IDS)
        policy.merge_adapter()
        merged = policy(IDS).logits
        policy.unmerge_adapter()
        assert not used
    torch.testing.assert_close(merged, evaluated, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(base, evaluated)


def test_layers_of_another_kind_stay_as_they_are():
    model = tiny_model("llama")
    policy = adapted(model, target_modules=["q_proj", "embed_tokens"], use_dora=False)
    embedding = next(m for n, m in policy.named_modules() if n.endswith("embed_tokens"))
    kind = type(embedding)
    hooked = next(m for n, m in policy.named_modules() if n.endswith("q_proj"))
    hooked.forward = lambda x: nn.functional.linear(x, hooked.base_layer.weight) * 0  # somebody's own
    assert fuse_lora(policy) == sum(n.endswith("q_proj") for n, _ in model.named_modules()) - 1
    assert type(embedding) is kind
    assert type(hooked) is not FusedLinear
