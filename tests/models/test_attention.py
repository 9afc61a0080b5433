"""The attention plans: masks against a rule applied pair by pair, and what they refuse."""

import itertools
import random

import pytest
import torch
from tiny import WINDOW, tiny_model

from groupline.models import packed_plan
from groupline.models.attention import (
    NAME,
    PackedPlan,
    UnsupportedAttention,
    planned,
    set_attention,
    shared_attention,
)
from groupline.models.packed_blocks import cut
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


def places(prompts, answers):
    """Of every row token: its prompt, its answer (None in the prompt) and its position."""
    prompt, answer, where = [], [], []
    for b, (n, own) in enumerate(zip(prompts, answers, strict=True)):
        prompt += [b] * n
        answer += [None] * n
        where += range(n)
        for s, m in enumerate(own):
            prompt += [b] * m
            answer += [s] * m
            where += range(n, n + m)
    return prompt, answer, where


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
    prompt, answer, where = places(prompts, answers)
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


# The split of attention over segments and its merge

UNEVEN = [16, 16, 16, 32, 32, 48, 96, 256]
ROWS = {
    "uneven answers": ([9], [[1, 2, 3, 4, 4, 9, 31]]),
    "one answer": ([7], [[12]]),
    "empty answers": ([5, 6], [[0, 3, 0, 0, 8], [0, 0]]),
    "one prompt alone": ([6], [[]]),
    "a prompt without answers among others": ([6, 11, 3], [[4, 7], [], [1]]),
    "many prompts of different length": ([3, 1, 12, 5, 5, 8, 30], [[2, 2], [6], [1, 1, 9], [4, 4], [4, 4], [0], [13]]),
    "even groups": ([4, 4, 4], [[3, 3], [3, 3], [3, 3]]),
    "a prompt as long as its answers": ([5, 5], [[5, 5, 2], [5, 1]]),
}


def by_mask(q, k, v, prompts, answers, scaling, window):
    """Attention of all heads under one dense mask [N, N]."""
    prompt, answer, where = places(prompts, answers)
    prompt, where = torch.tensor(prompt), torch.tensor(where)
    answer = torch.tensor([-1 if a is None else a for a in answer])
    gap = where[:, None] - where
    see = (prompt[:, None] == prompt) & ((answer == -1) | (answer[:, None] == answer)) & (gap >= 0)
    if window is not None:
        see &= gap < window
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scaling
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~see, -torch.inf).softmax(-1), v)


def draws(prompts, answers, heads, kv, d=8, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    n = sum(prompts) + sum(map(sum, answers))
    q, k, v, upstream = (torch.randn(n, x, d, generator=draw, dtype=dtype) for x in (heads, kv, kv, heads))
    return [x.requires_grad_() for x in (q, k, v)], upstream


def with_gradients(attend, inputs, upstream):
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


@pytest.mark.parametrize("call", [0, 300, 10**6], ids=["no block is padded", "some blocks are", "one block"])
@pytest.mark.parametrize("window", [None, 4, 20])
@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (3, 3), (4, 1)], ids=["grouped heads", "own heads", "one kv head"])
@pytest.mark.parametrize("row", ROWS)
def test_values_and_gradients_equal_those_under_a_dense_mask(row, heads, kv, window, call, monkeypatch):
    monkeypatch.setattr(packed_plan, "_CALL", call)
    prompts, answers = ROWS[row]
    inputs, upstream = draws(prompts, answers, heads, kv)
    plan = PackedPlan(prompts, answers)
    expected = with_gradients(lambda *x: by_mask(*x, prompts, answers, 0.4, window), inputs, upstream)
    for attend in (plan.attend, lambda _, *x, scaling, window: plan.joined()(*x, scaling, window)):
        got = with_gradients(lambda *x, f=attend: f(0, *x, scaling=0.4, window=window), inputs, upstream)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_the_private_operators_give_what_the_public_one_gives(dtype, close):
    """They exist in this version of torch, are used on CPU, take fewer key heads, and a merged backward is exact."""
    assert packed_plan._flash is not None
    assert packed_plan._flash_backward is not None
    prompts, answers = [75, 40], [UNEVEN, [30, 30, 30, 1]]
    inputs, upstream = draws(prompts, answers, 9, 3, d=64, dtype=dtype)
    plan = PackedPlan(prompts, answers)
    got = with_gradients(lambda *x: plan.attend(0, *x, scaling=0.125, window=None), inputs, upstream)
    assert plan._joined is None
    expected = with_gradients(lambda *x: plan.joined()(*x, 0.125, None), inputs, upstream)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_elsewhere_the_public_operator_does_it_all(monkeypatch):
    monkeypatch.setattr(packed_plan, "_flash", None)
    prompts, answers = ROWS["many prompts of different length"]
    inputs, upstream = draws(prompts, answers, 6, 2)
    plan = PackedPlan(prompts, answers)
    assert not plan.blocks
    got = with_gradients(lambda *x: plan.attend(0, *x, scaling=0.4, window=None), inputs, upstream)
    expected = with_gradients(lambda *x: by_mask(*x, prompts, answers, 0.4, None), inputs, upstream)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_any_layout_of_the_inputs_and_of_the_gradient_will_do():
    prompts, answers = ROWS["uneven answers"]
    inputs, _ = draws(prompts, answers, 6, 2)
    plan = PackedPlan(prompts, answers)
    expected = torch.autograd.grad(by_mask(*inputs, prompts, answers, 0.4, None).sum(), inputs)
    for order in itertools.permutations(range(3)):
        back = [order.index(i) for i in range(3)]
        moved = [x.detach().permute(order).contiguous().permute(back).requires_grad_() for x in inputs]
        out = plan.attend(0, *moved, scaling=0.4, window=None)
        for a, b in zip(torch.autograd.grad(out.sum(), moved), expected, strict=True):  # a gradient of strides 0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_layers_of_different_windows_share_a_plan():
    prompts, answers = ROWS["many prompts of different length"]
    inputs, _ = draws(prompts, answers, 6, 2)
    plan = PackedPlan(prompts, answers)
    for window in (None, 3, 8, None, 3, plan.longest, plan.longest - 1):
        got = plan.attend(0, *inputs, scaling=0.4, window=window)
        torch.testing.assert_close(got, by_mask(*inputs, prompts, answers, 0.4, window), rtol=0, atol=1e-10)


def test_scores_far_above_those_of_the_other_part_do_not_overflow():
    prompts, answers = [4], [[1, 7]]
    inputs, upstream = draws(prompts, answers, 2, 1)
    for row in (0, 6):  # a token of the prompt, one of an answer
        with torch.no_grad():
            scale = torch.ones(12, 1, 1, dtype=torch.float64)
            scale[row] = 1e3
        large = [inputs[0], inputs[1] * scale, inputs[2]]
        got = with_gradients(
            lambda *x: PackedPlan(prompts, answers).attend(0, *x, scaling=1.0, window=None), large, upstream
        )
        expected = with_gradients(lambda *x: by_mask(*x, prompts, answers, 1.0, None), large, upstream)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# What is padded


@pytest.mark.parametrize("seed", range(5))
def test_uneven_lengths_are_hardly_padded(seed):
    draw = random.Random(seed)
    prompts = [75, 60]
    answers = [draw.sample(UNEVEN, 8) for _ in prompts]
    across = sum(p * sum(own) for p, own in zip(prompts, answers, strict=True))
    squares = sum(n * n for n in (*prompts, *itertools.chain(*answers)))
    plan = PackedPlan(prompts, answers)
    assert sum(b.count * b.length**2 for b in plan.blocks) < 1.2 * squares
    assert sum((a.stop - a.start) * (p.stop - p.start) for p, a in plan.groups) == across
    joined = sum(b.count * b.length * (b.width + b.length) for b in plan.joined().blocks)
    assert joined < 1.5 * (across + squares)


def test_segments_that_stand_evenly_are_not_copied():
    for prompts, answers, count in (([75], [[63] * 8], 2), ([9] * 4, [[300] * 3] * 4, 5), ([400], [[7, 300, 7]], 3)):
        plan = PackedPlan(prompts, answers)
        assert all(block.even for block in plan.blocks)
        assert len(plan.blocks) == count


def cost(parts, segments, owners, call, move):
    """What `cut` says that its blocks cost."""
    total = 0.0
    for part in parts:
        rows = [segments[i] for i in part]
        length = max(map(len, rows))
        steps = {b.start - a.start for a, b in itertools.pairwise(rows)}
        widths = {len(owners[i]) for i in part} if owners else {0}
        even = len(steps) < 2 and len(set(map(len, rows))) == len(widths) == 1
        width = max(widths)
        total += call + len(rows) * length * (length + width + (0 if even else move))
    return total


def in_runs(lengths):
    """Every cut of a sorted list into runs."""
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        at = [0, *(i + 1 for i, c in enumerate(cuts) if c), len(lengths)]
        yield [lengths[a:b] for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize("seed", range(30))
def test_the_cut_is_the_cheapest_of_all(seed):
    draw = random.Random(seed)
    call, move, owned = draw.choice([10, 60, 400]), draw.choice([0, 5]), seed % 2
    place, segments, owners = 0, [], []
    for _ in range(7):
        n = draw.choice([1, 2, 3, 5, 8, 13, 20])
        segments.append(range(place, place + n))
        owners.append(range(draw.choice([4, 30])))
        place += n + draw.choice([0, 0, 3])
    owners = owners if owned else None
    parts = cut(segments, owners, call=call, move=move)
    assert sorted(itertools.chain(*parts)) == list(range(7))
    kinds = [(len(s), len(owners[i]) if owners else 0) for i, s in enumerate(segments)]
    cheapest = min(
        cost(cuts, segments, owners, call, move)
        for cuts in in_runs(sorted(range(7), key=lambda i: kinds[i]))
        if all(len({kinds[i] for i in part}) == 1 or closed(part, kinds) for part in cuts)
    )
    assert cost(parts, segments, owners, call, move) <= cheapest


def closed(part, kinds):
    """A block of several lengths holds all segments of each."""
    mine = {kinds[i] for i in part}
    return all(i in part for i, kind in enumerate(kinds) if kind in mine)


# What plans pass on and refuse


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
