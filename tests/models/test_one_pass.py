"""The one-pass head against autograd on whole logits: the loss, its gradient, what they cost, and half precision."""

import pytest
import torch
from tiny import adapted, gradients, relative_gap, stir, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupline.models import logprobs
from groupline.models.logprobs import Head, find_head, token_logprobs
from groupline.models.one_pass import one_pass_loss
from groupline.objective import CISPO, GRPO, REINFORCE, policy_loss

N, H, V = 13, 6, 37
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"softcap": 2.0},
    {"scale": 0.25},
    {"softcap": 1.5, "scale": 3.0, "temperature": 1.7},
]
OBJECTIVES = [GRPO, GRPO.replace(delta=1.5, beta=0.0), GRPO.replace(kl_times_ratio=True), CISPO, REINFORCE]


def rows_at_once(monkeypatch, rows, vocabulary=V):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", rows * vocabulary)


def inputs(dtype=torch.float64, bias=True, tokens=N, vocabulary=V):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=draw, dtype=dtype) for n in (tokens, vocabulary))
    b = torch.randn(vocabulary, generator=draw, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), b, targets


def whole(hidden, weight, bias, targets, temperature=1.0, softcap=None, scale=1.0):
    """The definition: all logits at once, autograd's own backward."""
    z = (hidden @ weight.T + (0 if bias is None else bias)) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def loss_of(objective, near):
    """A second update's loss: old and reference log-probs near the policy's [N], so that clips bind and the KL pulls."""
    draw = torch.Generator().manual_seed(1)
    old, ref = (near + 0.4 * torch.randn(len(near), generator=draw, dtype=near.dtype) for _ in range(2))
    advantages, weights = (torch.randn(len(near), generator=draw, dtype=near.dtype) for _ in range(2))
    sequence = torch.zeros(len(near), dtype=torch.long)

    def per_token(logp, rows=slice(None)):
        loss, facts = policy_loss(
            logp, old[rows], advantages[rows], objective, sequence=sequence[rows], num_sequences=1, ref_logp=ref[rows]
        )
        per_token.clipped += int(facts.clip_low + facts.clip_high)
        return weights[rows] * loss

    per_token.clipped = 0
    return per_token


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_equal_the_definition(settings, bias, rows, monkeypatch):
    rows_at_once(monkeypatch, rows)
    for objective in OBJECTIVES:
        hidden, weight, b, targets = inputs(bias=bias)
        logp, entropy = whole(hidden, weight, b, targets, **settings)
        per_token = loss_of(objective, logp.detach())
        expected = per_token(logp).sum()
        expected_grads = torch.autograd.grad(expected, [hidden, weight, *([b] if bias else [])])
        assert (per_token.clipped > 0) == (objective.form == "surrogate")
        changes = dict(settings)
        head, temperature = Head(weight, b, changes.pop("scale", 1.0), changes.pop("softcap", None)), changes
        loss, *scores = one_pass_loss(hidden, head, targets, temperature.get("temperature", 1.0), per_token)
        loss.backward()
        grads = [hidden.grad, weight.grad, *([b.grad] if bias else [])]
        for got, exact in zip([loss, *scores, *grads], [expected, logp, entropy, *expected_grads], strict=True):
            torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_gradient_is_the_slope_of_the_loss(settings, monkeypatch):
    """Central differences along random directions in everything that trains."""
    rows_at_once(monkeypatch, 2)
    hidden, weight, bias, targets = inputs(tokens=5)
    settings = dict(settings)
    temperature = settings.pop("temperature", 1.0)
    per_token = loss_of(GRPO.replace(beta=0.5), torch.full((5,), -3.0, dtype=torch.float64))

    def loss(move):
        h, w, b = (x + d for x, d in zip((hidden, weight, bias), move, strict=True))
        return one_pass_loss(h, Head(w, b, **settings), targets, temperature, per_token)[0]

    grads = torch.autograd.grad(loss([0, 0, 0]), (hidden, weight, bias))
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        way = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in (hidden, weight, bias)]
        with torch.no_grad():
            slope = (loss([1e-5 * d for d in way]) - loss([-1e-5 * d for d in way])) / 2e-5
        along = sum((g * d).sum() for g, d in zip(grads, way, strict=True))
        torch.testing.assert_close(along, slope, rtol=1e-7, atol=1e-8)


def nll(logp, rows):
    return -logp * torch.linspace(-1, 2, N, dtype=logp.dtype)[rows]


def test_the_loss_may_stand_inside_another():
    hidden, weight, bias, targets = inputs()
    (one,) = torch.autograd.grad(one_pass_loss(hidden, Head(weight, bias), targets, 1.0, nll)[0], weight)
    loss, logp, entropy = one_pass_loss(hidden, Head(weight, bias), targets, 1.0, nll)
    assert not logp.requires_grad
    assert not entropy.requires_grad
    (three,) = torch.autograd.grad(3 * loss + weight.sum(), weight)
    torch.testing.assert_close(three, 3 * one + 1, rtol=0, atol=1e-12)


def test_a_second_backward_is_refused():
    """The gradients were handed over; a wrong one in silence would be worse."""
    hidden, weight, bias, targets = inputs()
    loss, _, _ = one_pass_loss(hidden, Head(weight, bias), targets, 1.0, nll)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one_pass_loss: its gradient was taken once already"):
        loss.backward()


def test_without_gradients_there_is_still_a_loss():
    hidden, weight, bias, targets = inputs()
    expected = nll(whole(hidden, weight, bias, targets)[0], slice(None)).sum().detach()
    with torch.no_grad():
        loss, _, _ = one_pass_loss(hidden, Head(weight, bias), targets, 1.0, nll)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    frozen = [x.detach() for x in (hidden, weight, bias)]
    loss, _, _ = one_pass_loss(frozen[0], Head(*frozen[1:]), targets, 1.0, nll)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_no_tokens_are_no_trouble():
    hidden, weight, bias, targets = inputs()
    loss, logp, entropy = one_pass_loss(hidden[:0], Head(weight, bias), targets[:0], 1.0, nll)
    assert (loss.item(), logp.shape, entropy.shape) == (0.0, (0,), (0,))
    loss.backward()
    assert not weight.grad.any()


def test_a_temperature_that_is_not_positive_is_refused():
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match=r"temperature is 0.0; .* need a positive one"):
        one_pass_loss(hidden, Head(weight, bias), targets, 0.0, nll)


# What it costs


class Watch(TorchDispatchMode):
    """Multiplications and additions of the products that have a vocabulary side, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.operations = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "linear", "matmul"):
            left, right = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 2][-2:]
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
def test_nothing_is_computed_twice_and_no_logits_are_kept(settings, frozen, products, monkeypatch):
    """Products of a token: scores, hidden states' gradient and the weight's. Scoring again would be one more."""
    tokens, vocabulary, rows = 64, 500, 5
    rows_at_once(monkeypatch, rows, vocabulary)
    hidden, weight, _, targets = inputs(torch.float32, bias=False, tokens=tokens, vocabulary=vocabulary)
    weight.requires_grad_(not frozen)
    settings = dict(settings)
    temperature = settings.pop("temperature", 1.0)
    head = Head(weight, None, **settings)
    with Watch() as one:
        one_pass_loss(hidden, head, targets, temperature, lambda logp, rows: -logp)[0].backward()
    assert one.operations == products * 2 * tokens * vocabulary * H
    assert one.largest <= max(rows * vocabulary, weight.numel()) < tokens * vocabulary
    assert hidden.grad is not None
    assert (weight.grad is None) == frozen
    with Watch() as two:
        token_logprobs(hidden, head, targets, temperature)[0].sum().backward()
    assert two.operations == (products + 1) * 2 * tokens * vocabulary * H


# Half precision


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [True, False], ids=["half hidden states", "fp32 hidden states"])
def test_autocast_gives_what_scoring_and_autograd_give(compute, narrow, monkeypatch):
    rows_at_once(monkeypatch, 5)
    results = []
    for one_pass in (True, False):
        hidden, weight, bias, targets = inputs(torch.float32)
        h = hidden.detach().to(compute if narrow else torch.float32).requires_grad_()
        with torch.autocast("cpu", compute):
            if one_pass:
                loss, logp, _ = one_pass_loss(h, Head(weight, bias), targets, 0.8, nll)
            else:
                logp = whole(h, weight, bias, targets, 0.8)[0]
                loss = nll(logp, slice(None)).sum()
        loss.backward()
        assert h.grad.dtype == h.dtype
        assert weight.grad.dtype == bias.grad.dtype == torch.float32
        results.append([logp.detach().float(), h.grad.float(), weight.grad, bias.grad])
    for got, expected in zip(*results, strict=True):
        assert float((got - expected).norm() / expected.norm()) < (2e-2 if compute == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_scale_keeps_small_gradients_in_range(autocast):
    """A weight of 1e-7 a token is below what fp16 can hold; times 2^16 it is not, and is divided out again."""
    hidden, weight, bias, targets = inputs(torch.float64)
    (whole(hidden, weight, bias, targets)[0].sum() * 1e-7).backward()
    errors = {}
    for scale in (1.0, 2.0**16):
        made = [x.detach().to(torch.float32 if autocast else torch.float16) for x in (hidden, weight, bias)]
        h, w, b = (x.requires_grad_() for x in made)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = one_pass_loss(h, Head(w, b), targets, 1.0, lambda logp, rows: logp * 1e-7, scale)[0]
        (loss * scale).backward()
        pairs = [(h, hidden), (w, weight), *([(b, bias)] if autocast else [])]
        errors[scale] = [float((x.grad.double() / scale - y.grad).norm() / y.grad.norm()) for x, y in pairs]
    assert max(errors[2.0**16]) < 0.01
    assert errors[1.0][1] > 0.1
    again = inputs(torch.float64)
    one_pass_loss(again[0], Head(*again[1:3]), targets, 1.0, lambda logp, rows: logp * 1e-7, 3.0)[0].backward()
    for got, expected in zip(again[:3], (hidden, weight, bias), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-18)


def test_a_sure_token_keeps_its_digits_in_half_precision():
    """1 - p is taken before rounding: at p = 0.9999 a rounded p would leave nothing of it."""
    z = torch.tensor([[10.0, 0.0]])
    hidden, weight = torch.ones(1, 1).requires_grad_(), z.T.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        one_pass_loss(hidden, Head(weight), torch.tensor([0]), 1.0, lambda logp, rows: logp)[0].backward()
    expected = 1 - torch.softmax(z.double(), -1)[0, 0].item()
    assert weight.grad[0].item() == pytest.approx(expected, rel=1e-2)
    assert hidden.grad.item() == pytest.approx(10 * expected, rel=1e-2)


# Heads of whole models


def compare(model):
    """Gradients of every weight of an fp64 model, from its own logits and in one pass."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.arange(1, 40, 3)[None]
    logp = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    per_token = loss_of(GRPO, logp.detach())
    expected = per_token(logp).sum()
    model.zero_grad()
    expected.backward()
    by_definition = gradients(model)
    model.zero_grad()
    hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    loss, _, _ = one_pass_loss(hidden, find_head(inner), ids[0, 1:], 1.0, per_token)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    assert relative_gap(gradients(model), by_definition) < 1e-10


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi"])
def test_heads_of_whole_models(kind, monkeypatch):
    """Tied embeddings (Qwen 3, Gemma 3) get both gradients; Phi has a bias; Gemma 3 a cap."""
    rows_at_once(monkeypatch, 5, 101)
    compare(tiny_model(kind, dtype=torch.float64))


def test_an_adapter_on_the_head(monkeypatch):
    rows_at_once(monkeypatch, 5, 101)
    model = adapted(tiny_model("llama"), r=2, lora_alpha=6, target_modules=["lm_head", "q_proj"]).double()
    stir(model, 2)
    compare(model)
