"""Chunked token log-probs against log_softmax and gather on whole logits; and that whole logits never exist."""

import math

import pytest
import torch
from tiny import adapted, gradients, relative_gap, stir, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupline.models import logprobs
from groupline.models.logprobs import Head, find_head, token_logprobs

N, H, V = 13, 6, 37
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"softcap": 2.0},
    {"scale": 0.25},
    {"softcap": 1.5, "scale": 3.0, "temperature": 1.7},
]


@pytest.fixture(params=[1, V + 1, 3 * V, 1 << 23], ids=["below one row", "one row", "three rows", "all rows"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", request.param)
    return request.param


def inputs(dtype=torch.float64, bias=True, size=1.0, tokens=N, vocabulary=V):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (size * torch.randn(n, H, generator=draw, dtype=dtype) for n in (tokens, vocabulary))
    b = torch.randn(vocabulary, generator=draw, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), b, targets


def whole(hidden, weight, bias, targets, temperature=1.0, softcap=None, scale=1.0):
    """The definition: all logits at once, autograd's own backward."""
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def fused(hidden, weight, bias, targets, temperature=1.0, softcap=None, scale=1.0):
    return token_logprobs(hidden, Head(weight, bias, scale, softcap), targets, temperature)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_and_gradients_equal_the_definition(settings, bias, chunk):
    results = []
    for f in (fused, whole):
        hidden, weight, b, targets = inputs(bias=bias)
        logp, entropy = f(hidden, weight, b, targets, **settings)
        (logp * torch.linspace(-1, 2, N, dtype=logp.dtype)).sum().backward()
        results.append([logp.detach(), entropy.detach(), hidden.grad, weight.grad, *([b.grad] if bias else [])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradcheck_in_fp64(settings, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 14)  # two rows of seven
    hidden, weight, bias, targets = inputs(tokens=3, vocabulary=7)
    assert torch.autograd.gradcheck(lambda h, w, b: fused(h, w, b, targets, **settings)[0], (hidden, weight, bias))


def test_entropy_carries_no_gradient():
    hidden, weight, bias, targets = inputs()
    logp, entropy = fused(hidden, weight, bias, targets)
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_a_known_value():
    """Logits (2, 0), token 0, temperature 0.5: -log(1 + exp(-4)); entropy of (0.982014, 0.017986)."""
    head = Head(torch.tensor([[2.0], [0.0]]))
    logp, entropy = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]), 0.5)
    assert logp.item() == pytest.approx(-0.018150, abs=1e-6)
    p = 1 / (1 + math.exp(-4))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_large_logits_stay_finite():
    hidden, weight, bias, targets = inputs(torch.float32, size=100.0)
    logp, entropy = fused(hidden, weight, bias, targets, temperature=0.01)
    logp.sum().backward()
    assert all(torch.isfinite(x).all() for x in (logp, entropy, hidden.grad, weight.grad, bias.grad))


def test_no_tokens_are_no_trouble():
    hidden, weight, bias, targets = inputs()
    logp, entropy = fused(hidden[:0], weight, bias, targets[:0])
    assert (logp.shape, entropy.shape) == ((0,), (0,))
    logp.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match=rf"temperature is {temperature}; .* need a positive one"):
        fused(hidden, weight, bias, targets, temperature=temperature)


def test_only_what_trains_gets_a_gradient():
    hidden, weight, bias, targets = inputs()
    frozen = weight.detach()
    logp, _ = fused(hidden, frozen, bias.detach(), targets)
    logp.sum().backward()
    assert hidden.grad is not None
    _, weight, _, _ = inputs()
    logp, _ = fused(hidden.detach(), weight, None, targets)
    logp.sum().backward()
    assert weight.grad is not None


class Sizes(TorchDispatchMode):
    """Remembers the size of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_more_than_a_chunk_of_logits_exists(settings, monkeypatch):
    tokens, width, vocabulary, limit = 64, 2, 500, 2000
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", limit)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Sizes() as seen:
        logp, _ = fused(hidden, weight, None, targets, **settings)
        forward = seen.largest
        logp.sum().backward()
    assert forward <= limit < tokens * vocabulary
    assert seen.largest <= limit
    with Sizes() as seen:  # the measure does see whole logits where they are made
        whole(hidden, weight, None, targets, **settings)[0].sum().backward()
    assert seen.largest >= tokens * vocabulary


def test_half_precision_hidden_states_are_scored_in_fp32():
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    logp, entropy = fused(hidden, weight, bias, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    expected, _ = whole(*(x.detach().float() for x in (hidden, weight, bias)), targets)
    torch.testing.assert_close(logp, expected, rtol=0, atol=0.1)


def test_autocast_with_a_half_precision_last_layer():
    """Some models end in a matrix product, whose output is half precision under autocast while the head is fp32."""
    hidden, weight, bias, targets = inputs(torch.float32)
    results = []
    for f in (fused, whole):
        h = hidden.detach().bfloat16().requires_grad_()
        w, b = (x.detach().clone().requires_grad_() for x in (weight, bias))
        with torch.autocast("cpu", torch.bfloat16):
            logp, _ = f(h, w, b, targets) if f is fused else f(h.float(), w, b, targets)
        logp.sum().backward()
        results.append((logp.detach(), h.grad.float(), w.grad, b.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0.02, atol=0.1)


# Heads of models


def score(model, ids, temperature=1.0):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    return token_logprobs(hidden, find_head(inner), ids[0, 1:], temperature)[0]


def compare(model):
    ids = torch.arange(1, 40, 3)[None]
    results = []
    for ours in (True, False):
        model.zero_grad()
        if ours:
            logp = score(model, ids)
        else:
            z = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logp = z.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        (logp * torch.linspace(-1, 2, len(logp))).sum().backward()
        results.append((logp.detach(), gradients(model)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    assert relative_gap(results[0][1], results[1][1]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi", "bloom"])
def test_heads_of_whole_models(kind):
    """Tied embeddings (Qwen 3, Gemma 3, Bloom) get both gradients; Phi has a bias; Gemma 3 a cap."""
    model = tiny_model(kind)
    head = find_head(model)
    assert (head.bias is not None) == (kind == "phi")
    assert head.softcap == (5.0 if kind == "gemma3" else None)
    assert (head.weight is model.get_input_embeddings().weight) == (kind in ("qwen3", "gemma3", "bloom"))
    compare(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"], "lora_bias": True},
        {"target_modules": ["lm_head"], "use_rslora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_adapters_on_the_head(settings):
    model = adapted(tiny_model("llama"), r=2, lora_alpha=6, **settings)
    stir(model, 2)
    compare(model)
    with model.disable_adapter():
        ids = torch.arange(1, 40, 3)[None]
        z = model(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = z.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(score(model, ids), expected, rtol=0, atol=1e-5)


def test_a_variant_of_lora_on_the_head_is_refused():
    """Fresh, it would agree with plain LoRA and be found only after the first update."""
    model = adapted(tiny_model("llama"), target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match="adapter 'default' on the head is a variant of LoRA"):
        find_head(model.get_base_model())


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        find_head(tiny_model("llama").model)
