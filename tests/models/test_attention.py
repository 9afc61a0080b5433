"""The attention plans: masks against a rule applied pair by pair, and what they refuse."""

import pytest
import torch
from tiny import WINDOW, tiny_model

from groupline.models.attention import (
    NAME,
    PackedPlan,
    UnsupportedAttention,
    planned,
    set_attention,
    shared_attention,
)
from groupline.models.packing import hidden_states, pack, why_not_shared


def dense(query, key, value, who, where, scaling, window):
    """Attention written out: token i sees token j if j is not later in position, in i's prompt or i's own answer."""
    prompt, answer = who
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    repeat = query.shape[1] // key.shape[1]
    for i in range(len(query)):
        seen = [
            j
            for j in range(len(key))
            if prompt[j] == prompt[i]
            and answer[j] in (None, answer[i])
            and where[j] <= where[i]
            and (window is None or where[i] - where[j] < window)
        ]
        for h in range(query.shape[1]):
            scores = key[seen, h // repeat] @ query[i, h] * scaling
            out[i, h] = torch.softmax(scores, 0) @ value[seen, h // repeat]
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        ([3], [[]]),
        ([4, 4], [[2, 2], [2]]),
        ([5, 1, 3], [[4, 0, 2], [], [1, 6]]),
        ([1], [[0, 0]]),
    ],
)
def test_the_plan_against_the_rule(prompts, answers, window):
    prompt, answer, where = [], [], []
    for b, (n, own) in enumerate(zip(prompts, answers, strict=True)):
        prompt += [b] * n
        answer += [None] * n
        where += range(n)
        for s, m in enumerate(own):
            prompt += [b] * m
            answer += [s] * m
            where += range(n, n + m)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(where), h, d, generator=draw, dtype=torch.float64) for h, d in ((4, 3), (2, 3), (2, 5)))
    q.requires_grad_()
    k.requires_grad_()
    v.requires_grad_()
    got = PackedPlan(prompts, answers).attend(0, q, k, v, scaling=0.7, window=window)
    expected = dense(q, k, v, (prompt, answer), where, 0.7, window)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_keep_receives_the_keys_and_values_of_every_layer():
    model = tiny_model("llama")
    kept = {}
    plan = PackedPlan([3], [[]], keep=lambda layer, k, v: kept.update({layer: (k.shape, v.shape)}))
    with torch.no_grad(), shared_attention(model), planned(plan):
        model.model(input_ids=torch.tensor([[1, 2, 3]]), position_ids=torch.tensor([[0, 1, 2]]), use_cache=False)
    assert kept == {0: ((3, 2, 8), (3, 2, 8)), 1: ((3, 2, 8), (3, 2, 8))}


def test_plans_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match="2 prompts but answers for 1"):
        PackedPlan([1, 2], [[]])
    with pytest.raises(ValueError, match="at least one token"):
        PackedPlan([1, 0], [[], []])
    with pytest.raises(ValueError, match="at least one token"):
        PackedPlan([], [])


def test_without_a_plan_the_attention_refuses_to_run():
    model = tiny_model("llama")
    set_attention(model, NAME)
    with pytest.raises(RuntimeError, match="runs only inside `planned"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_the_models_attention_comes_back_even_after_an_error():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    seen = []

    def fail():
        with shared_attention(model):
            seen.append(model.config._attn_implementation)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == [NAME]
    assert model.config._attn_implementation == before


def test_dropout_in_attention_is_refused_while_it_trains():
    model = tiny_model("llama", attention_dropout=0.1)
    row = pack([[1, 2]], [[[3]]])
    hidden_states(model, row)
    model.train()
    with pytest.raises(UnsupportedAttention, match=r"dropout \(set attention_dropout to 0\)"):
        hidden_states(model, row)


def test_a_batch_of_several_rows_is_refused():
    model = tiny_model("llama")
    with (
        pytest.raises(UnsupportedAttention, match="batch of 2"),
        shared_attention(model),
        planned(PackedPlan([2], [[]])),
    ):
        model(input_ids=torch.tensor([[1, 2], [3, 4]]), use_cache=False)


@pytest.mark.parametrize("told", [None, WINDOW + 1])
def test_a_local_layer_that_does_not_pass_its_window_is_refused(told):
    model = tiny_model("gemma3")
    model.model.layers[2].self_attn.sliding_window = told
    reason = why_not_shared(model)
    assert reason == f"layer 2 is sliding_attention but passes the window {told}"


def test_a_global_layer_that_passes_a_window_is_refused():
    model = tiny_model("gemma3")
    model.model.layers[1].self_attn.sliding_window = 3
    assert why_not_shared(model) == "layer 1 is full_attention but passes the window 3"


def test_a_layer_of_an_unknown_kind_is_refused():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(
        UnsupportedAttention, match="layer 1 is chunked_attention, whose state packed rows do not carry"
    ):
        hidden_states(model, pack([[1, 2]], [[[3]]]))
