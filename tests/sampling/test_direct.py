"""The written-out decode step against the modules it stands for, and the models it must not be used on."""

import pytest
import torch
from tiny import SHARED, random_ids, stir, tiny_lora, tiny_model

from groupline.records import SamplingParams
from groupline.sampling import Engine

DIRECT = {"llama", "qwen3"}


@pytest.mark.parametrize("kind", SHARED)
def test_models_of_other_shapes_say_why_their_modules_run(kind):
    engine = Engine(tiny_model(kind), notify=lambda _: None)
    assert (engine.direct is not None) or engine.direct_reason
    assert engine.direct is not None if kind in DIRECT else True


@pytest.mark.parametrize("kind", sorted(DIRECT))
def test_its_answers_and_log_probs_are_the_modules_own(kind):
    model = tiny_model(kind)
    params = SamplingParams(max_new_tokens=9)
    engine = Engine(model, max_rows=5, page_size=3)
    prompts = random_ids((3, 17, 1, 9), seed=3)
    direct = engine.generate(prompts, 3, params, seed=1)
    engine.direct = None
    modules = engine.generate(prompts, 3, params, seed=1)
    for a, b in zip((c for own in direct for c in own), (c for own in modules for c in own), strict=True):
        assert a.ids == b.ids
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)


def test_a_layer_that_computes_something_else_is_found_by_its_numbers():
    model = tiny_model("llama")
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x) * 1.5
    engine = Engine(model)
    assert engine.direct is None
    assert "differs by" in engine.direct_reason


@pytest.mark.parametrize("make", [tiny_model, tiny_lora])
def test_joined_weights_follow_the_policy_and_leave_it_where_it_is(make):
    policy = make("qwen3")
    places = {n: p.data_ptr() for n, p in policy.named_parameters()}
    engine = Engine(policy)
    stir(policy, 3)
    engine.load_weights(policy, version=1)
    fresh = Engine(policy)
    prompts = random_ids((4, 6), seed=5)
    params = SamplingParams(max_new_tokens=6)
    assert engine.direct is not None
    assert [[c.ids for c in own] for own in engine.generate(prompts, 2, params)] == [
        [c.ids for c in own] for own in fresh.generate(prompts, 2, params)
    ]
    assert {n: p.data_ptr() for n, p in policy.named_parameters()} == places


def test_a_released_copy_is_made_anew_and_holds_what_was_loaded():
    policy = tiny_lora("llama")
    stir(policy, 1)
    engine = Engine(policy)
    params = SamplingParams(max_new_tokens=6)
    prompts = random_ids((4, 6), seed=5)
    before = engine.generate(prompts, 2, params)
    engine.release()
    assert engine._packed_head is None
    stir(policy, 3)  # an update that is not published yet
    assert engine.generate(prompts, 2, params) == before
    engine.release()
    engine.load_weights(policy, version=1)
    assert [[c.ids for c in own] for own in engine.generate(prompts, 2, params)] == [
        [c.ids for c in own] for own in Engine(policy).generate(prompts, 2, params)
    ]
