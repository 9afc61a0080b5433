"""oneDNN's products against `nn.functional.linear`, with gradients, and where they must not be taken."""

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model
from torch import nn

from groupline.models import products
from groupline.models.products import FastProducts, Prepacked, can_prepack, differentiable, linear, suits, use_linear

SIZES = [(1, 5, 7), (2, 64, 33), (7, 33, 64), (8, 1, 1), (31, 96, 40), (300, 17, 129)]


@pytest.fixture(params=["oneDNN", "none"], autouse=True)
def build(request, monkeypatch):
    """A build with the operators, and one without."""
    if request.param == "none":
        monkeypatch.setattr(products, "_linear", None)
    else:
        assert products._linear is not None, "this torch has no oneDNN operators: they were looked for under old names"
    return request.param


def draw(rows, inputs, outputs, bias, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + inputs)
    x, w, b = (
        torch.randn(s, generator=generator, dtype=dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    return x, w, b if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_linear_in_any_layout(sizes, bias):
    x, w, b = draw(*sizes, bias)
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    for rows in (x, x.t().contiguous().t(), x.repeat(1, 2)[:, : x.shape[1]]):
        for weight in (w, w.t().contiguous().t(), nn.Parameter(w)):
            got = linear(rows, weight.detach() if weight.requires_grad else weight, b)
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    stacked = linear(x.view(1, len(x), 1, -1), w, b)
    torch.testing.assert_close(stacked.view(len(x), -1).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_linear(needed, bias):
    results = []
    for function in (F.linear, differentiable):
        x, w, b = draw(40, 24, 18, bias)
        leaves = [t.requires_grad_(n) for t, n in zip((x, w), needed, strict=True)]
        if bias:
            leaves.append(b.requires_grad_())
        out = function(x.view(4, 10, 24), w, b)
        (out * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_no_gradient_is_asked_for_or_lost_silently():
    x, w, _ = draw(9, 8, 7, False)
    with torch.no_grad():
        assert not differentiable(x.requires_grad_(), w).requires_grad
    assert differentiable(x, w).requires_grad
    assert not differentiable(x.detach(), w).requires_grad


def test_prepacked_layers_are_one_product_and_follow_their_weights(build):
    if build == "none":
        return
    x, w, b = draw(13, 20, 12, True)
    other, more = torch.randn(13, 18), torch.randn(6, 20)
    assert can_prepack(w)
    packed = Prepacked([w, more], [b, torch.zeros(6)])
    for _ in range(2):
        expected = F.linear(x, torch.cat([w, more]), torch.cat([b, torch.zeros(6)]))
        for got, wanted in (
            (packed(x), expected),
            (packed(x, "swish"), F.silu(expected)),
            (packed.with_other(x, other, "add"), expected + other),
            (packed.with_other(x, other, "mul"), expected * other),
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
        w.add_(1.0)
        b.sub_(2.0)
        packed.refresh()


def test_what_onednn_is_not_given(build):
    x, w, _ = draw(3, 4, 5, False)
    assert suits(x, w) == (build == "oneDNN")
    assert not suits(x.double(), w.double())
    assert not suits(x.bfloat16(), w.bfloat16())
    assert not suits(x[:0], w)
    assert not suits(x.to("meta"), w.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not suits(x, w)
        assert linear(x, w).dtype == torch.bfloat16
    assert linear(x[:0], w).shape == (0, 5)
    torch.testing.assert_close(linear(x.double(), w.double()), x.double() @ w.double().T)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_a_model_computes_the_same_inside(kind, build):
    model = tiny_model(kind)
    ids = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    results = []
    for fast in (False, True):
        model.zero_grad()
        with FastProducts() if fast else torch.enable_grad():
            logits = model(ids).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_copy_takes_its_products_this_way_and_the_class_does_not():
    layer = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2, bias=False))
    x = torch.randn(5, 6)
    expected = layer(x).detach()
    use_linear(layer)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
    assert "forward" not in nn.Linear(2, 2).__dict__
