"""What passes hold in memory: the trace without numbers against the live tensors of real passes and against hand counts."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from tiny import tiny_model
from torch import nn

from groupline.models.checkpointing import checkpoint_layers
from groupline.models.live import LiveBytes
from groupline.models.logprobs import CHUNK_LOGITS, Head, chunk_bytes
from groupline.models.lora import add_lora
from groupline.models.one_pass import one_pass_loss
from groupline.models.packing import hidden_states, pack
from groupline.models.tracing import Group, Line, Untraceable, trace

GROUP = Group(prompt=11, answers=3, answer=9)


def real(policy, row, preset=True):
    """(saved, peak) of a real pass over `row`, in live bytes beyond weights and gradients."""
    for p in policy.parameters():
        p.grad = torch.zeros_like(p) if preset and p.requires_grad else None
    own = [p.grad for p in policy.parameters() if p.grad is not None]
    given = [row.input_ids, row.position_ids, row.score_at, row.targets, row.sequence]
    with LiveBytes([*policy.parameters(), *policy.buffers(), *own, *given]) as live:
        hidden = hidden_states(policy, row)
        saved = live.live
        hidden.backward(torch.ones_like(hidden))
    return saved, live.peak


def test_live_bytes_count_storages_once_and_let_them_go():
    known = torch.zeros(100)
    with LiveBytes([known]) as live:
        a = known + 1  # 400 bytes
        b = a.view(10, 10)[2:]
        assert live.live == 400
        c = torch.cat([a, a])
        assert (live.live, live.peak) == (1200, 1200)
        del a, c
        assert (live.live, live.peak) == (400, 1200)  # the view holds the first
        live.restart()
        assert live.peak == 400
        del b
        known.add_(1)
        assert live.live == 0


def test_a_linear_layer_by_hand():
    """One layer of the trace's own kind is a whole transformer; the counter on one product shows what is kept."""
    layer = nn.Linear(8, 16, bias=False)
    x = torch.zeros(5, 8, requires_grad=True)
    with LiveBytes([*layer.parameters(), x]) as live:
        y = layer(x).relu()
        assert live.live == 5 * 16 * 4  # relu keeps its output; the product's own is let go
        y.sum().backward()
        assert live.live == 5 * 16 * 4 + 8 * 16 * 4 + 5 * 8 * 4  # both gradients have come


@pytest.mark.parametrize(("kind", "lora"), [("llama", 0), ("llama", 4), ("gemma3", 0), ("neox", 4)])
def test_the_trace_holds_what_a_real_pass_holds(kind, lora):
    policy = tiny_model(kind, num_hidden_layers=3, **({"layer_types": None} if kind == "gemma3" else {}))
    if lora:
        policy = add_lora(policy, lora).eval()
    passes = trace(policy, GROUP, torch.float32, split=True)
    for groups in (1, 3):
        row = pack([list(range(11))] * groups, [[[1] * 9] * 3] * groups)
        saved, peak = real(policy, row)
        assert passes.saved(groups * GROUP.tokens) == pytest.approx(saved, rel=0.15)
        assert passes.peak(groups * GROUP.tokens) == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("lora", [0, 4])
def test_layers_that_compute_their_activations_again(lora):
    """Three and six layers: what is kept grows by a layer's input alone."""
    for layers in (3, 6):
        policy = tiny_model("llama", num_hidden_layers=layers)
        if lora:
            policy = add_lora(policy, lora).eval()
        passes = trace(policy, GROUP, torch.float32, split=True, checkpointing=True)
        kept = trace(policy, GROUP, torch.float32, split=True)
        checkpoint_layers(policy)
        for groups in (1, 3):
            saved, peak = real(policy, pack([list(range(11))] * groups, [[[1] * 9] * 3] * groups))
            assert passes.saved(groups * GROUP.tokens) == pytest.approx(saved, rel=0.15)
            assert passes.peak(groups * GROUP.tokens) == pytest.approx(peak, rel=0.15)
            assert peak < 0.7 * kept.peak(groups * GROUP.tokens)


def test_layers_that_are_alike_need_not_all_be_tried():
    """Five layers from one and two, against all five."""
    policy = tiny_model("llama", num_hidden_layers=5)
    unlike = copy.deepcopy(policy)
    unlike.model.layers[4].mlp.gate_proj.weight.requires_grad_(False)  # now they are not, so all five are run
    short, whole = (trace(p, GROUP, torch.float32, split=True) for p in (policy, unlike))
    assert short.saved(500) == pytest.approx(whole.saved(500), rel=0.02)


def test_tracing_leaves_the_model_as_it_is():
    policy = tiny_model("qwen3")
    before = {n: t.clone() for n, t in chain(policy.named_parameters(), policy.named_buffers())}
    trace(policy, GROUP, torch.float32, split=False)
    assert all(torch.equal(t, before[n]) for n, t in chain(policy.named_parameters(), policy.named_buffers()))
    assert all(p.grad is None for p in policy.parameters())
    assert len(policy.model.layers) == 2


def test_half_precision_keeps_half_of_the_products_inputs():
    full, half = (trace(tiny_model("llama"), GROUP, d, split=False) for d in (torch.float32, torch.bfloat16))
    assert half.saved.per_token < 0.9 * full.saved.per_token


def test_dropout_of_an_adapter_is_counted():
    plain, dropped = (add_lora(tiny_model("llama"), 4, dropout=d) for d in (0.0, 0.1))
    plain.eval()
    for name, module in dropped.eval().named_modules():
        if "lora_dropout" in name:
            module.train()
    a, b = (trace(p, GROUP, torch.float32, split=True) for p in (plain, dropped))
    assert b.saved.per_token > 1.1 * a.saved.per_token


def test_a_model_that_needs_numbers_says_so():
    policy = tiny_model("llama")
    layer = policy.model.layers[0]
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: inner(x) if float(x.sum()) > 0 else inner(x) * 2
    with pytest.raises(Untraceable, match="local_scalar"):
        trace(policy, GROUP, torch.float32, split=True)


def test_a_line_is_never_negative():
    assert Line(-10.0, 1.0)(4) == 0
    assert Line(10.0, 2.5)(4) == 20


@pytest.mark.parametrize(("rows", "vocabulary", "softcap"), [(30, 2000, False), (30, 2000, True), (700, 30_000, False)])
def test_the_heads_buffers_by_hand_and_in_a_real_pass(rows, vocabulary, softcap):
    most = max(1, CHUNK_LOGITS // vocabulary)
    chunks = -(-rows // most)
    expected = -(-rows // chunks) * vocabulary * 4 * (3 if softcap else 2)
    assert chunk_bytes(rows, vocabulary, torch.float32, softcap) == expected
    hidden = torch.randn(rows, 16, requires_grad=True)
    head = Head(torch.randn(vocabulary, 16), softcap=5.0 if softcap else None)
    with LiveBytes([hidden, head.weight]) as live:
        one_pass_loss(hidden, head, torch.zeros(rows, dtype=torch.long), 1.0, lambda logp, part: -logp)
    assert live.peak == pytest.approx(expected, rel=0.15)


def test_half_precision_products_have_a_buffer_of_their_own():
    assert chunk_bytes(10, 100, torch.bfloat16) == 10 * 100 * (4 + 4 + 2)
