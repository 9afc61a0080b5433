"""Adapters, and the sampler's view of them."""

import copy

import pytest
import torch
from tiny import adapted, plain_logprobs, random_ids, stir, tiny_lora, tiny_model

from groupline.models.lora import Mirror, add_lora, is_peft
from groupline.models.packing import causal_lm, decoder

ROW = random_ids([14])[0]


@torch.no_grad()
def score(model):
    return plain_logprobs(model, ROW[:4], ROW[4:])


def test_a_fresh_adapter_changes_nothing():
    model = tiny_model("llama")
    before = score(model)
    policy = add_lora(model, 4)
    assert torch.equal(score(policy.eval()), before)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    assert is_peft(policy)
    assert not is_peft(model)
    assert causal_lm(policy) is causal_lm(model) is model
    assert decoder(policy) is model.model


def test_alpha_is_twice_the_rank_unless_given():
    def scaling(policy):
        return policy.get_base_model().model.layers[0].mlp.up_proj.scaling["default"]

    assert scaling(add_lora(tiny_model("llama"), 4)) == 2.0
    assert scaling(add_lora(tiny_model("llama"), 4, 1)) == 0.25
    policy = add_lora(tiny_model("llama"), 4, targets=["q_proj"])
    assert {n.split(".")[-4] for n, p in policy.named_parameters() if p.requires_grad} == {"q_proj"}


@pytest.mark.parametrize(("r", "alpha"), [(0, 8), (-1, None), (8, 0), (8, -2)])
def test_ranks_and_scales_that_do_nothing_are_refused(r, alpha):
    with pytest.raises(ValueError, match=rf"r >= 1 and alpha > 0 .* got r={r}"):
        add_lora(tiny_model("llama"), r, alpha)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 3},
        {"target_modules": ["q_proj"], "lora_bias": True},  # a bias of its own
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},  # not a sum of two products
        {"target_modules": ["embed_tokens", "lm_head"]},  # not a Linear; the head
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 7]},
    ],
    ids=str,
)
def test_the_samplers_view_equals_the_adapter(settings):
    policy = adapted(tiny_model("llama"), r=4, **settings)
    stir(policy, 1)
    mirror = Mirror(policy)
    for seed in range(3):
        torch.testing.assert_close(score(mirror.model), score(policy), rtol=0, atol=1e-5)
        stir(policy, seed + 2)
        mirror.refresh()
    with policy.disable_adapter():
        assert (score(policy) - score(mirror.model)).abs().max() > 0.01


def test_a_half_precision_base_with_its_fp32_adapter():
    policy = tiny_lora("llama", dtype=torch.bfloat16)
    exact = copy.deepcopy(policy).float()
    folded = Mirror(policy).model.model.layers[0].mlp.up_proj.weight
    layer = exact.get_base_model().model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert folded.dtype == torch.bfloat16
    assert torch.equal(folded, expected.bfloat16())  # rounded once, at the end


def test_two_adapters_at_once():
    policy = tiny_lora("llama")
    policy.add_adapter("second", copy.deepcopy(policy.peft_config["default"]))
    for name, p in policy.named_parameters():
        if "second" in name:
            p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    policy.base_model.set_adapter(["default", "second"])
    torch.testing.assert_close(score(Mirror(policy.eval()).model), score(policy), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_refreshes_leave_base_and_adapter_bit_for_bit(dtype):
    """Merging and unmerging would drift; weights are folded afresh from an untouched base."""
    policy = tiny_lora("llama", dtype=dtype)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    mirror = Mirror(policy)
    first = {n: p.clone() for n, p in mirror.model.named_parameters()}
    for _ in range(200):
        mirror.refresh()
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    assert all(torch.equal(p, first[n]) for n, p in mirror.model.named_parameters())


def test_updates_between_refreshes_leave_the_base_bit_for_bit():
    policy = tiny_lora("llama")
    before = {n: p.detach().clone() for n, p in policy.named_parameters() if "lora_" not in n}
    mirror = Mirror(policy)
    for seed in range(100):
        stir(policy, seed)
        mirror.refresh()
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters() if n in before)
    torch.testing.assert_close(score(mirror.model), score(policy), rtol=0, atol=1e-4)


def test_untouched_weights_are_shared_not_copied():
    model = tiny_model("qwen3")
    mirror = Mirror(model)
    assert mirror.model is not model
    assert all(p is q for p, q in zip(mirror.model.parameters(), model.parameters(), strict=True))
    policy = tiny_lora("qwen3")
    own = dict(Mirror(policy).model.named_parameters())
    base = dict(policy.get_base_model().named_parameters())
    folded = [n for n in own if n.endswith("proj.weight")]
    assert len(folded) == 14
    assert all(own[n] is base[n] for n in own if n not in folded)
    assert all(own[n] is not base[n.replace(".weight", ".base_layer.weight")] for n in folded)
    assert not any("lora" in n for n in own)


def test_a_cast_view_keeps_tied_weights_tied_and_the_policy_in_fp32():
    policy = tiny_lora("qwen3")
    mirror = Mirror(policy, torch.bfloat16)
    assert mirror.model.lm_head.weight is mirror.model.model.embed_tokens.weight
    assert {p.dtype for p in mirror.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    full = tiny_model("qwen3")
    mirror = Mirror(full, torch.bfloat16)
    stir(full, 5, size=1.0)
    mirror.refresh()
    for name, p in mirror.model.named_parameters():
        assert torch.equal(p, full.get_parameter(name).bfloat16())


def test_the_view_is_in_evaluation_mode_and_the_policy_is_left_training():
    policy = tiny_lora("llama", dropout=0.5).train()
    mirror = Mirror(policy)
    assert not any(m.training for m in mirror.model.modules())
    assert all(m.training for m in policy.modules())
