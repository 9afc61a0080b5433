"""The optimiser against its formulas, and what it does when there is nothing, or nothing finite, to step on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from groupline.config import Config
from groupline.training.optim import NonFinite, Optimiser


def weight(*values: float) -> nn.Linear:
    """One row of weights."""
    layer = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
    return layer


def optimiser(model: nn.Module, updates: int = 10, scale: bool = False, **settings: Any) -> Optimiser:
    return Optimiser(model, Config(**{"learning_rate": 0.1, "max_grad_norm": 0.0, **settings}), updates, scale)


def push(model: nn.Linear, *gradient: float) -> torch.Tensor:
    """A loss with this gradient."""
    return (model.weight * torch.tensor([gradient])).sum()


def test_adam_by_hand() -> None:
    """Two updates of AdamW (arXiv 1711.05101) in plain arithmetic."""
    model = weight(1.0)
    opt = optimiser(model, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.5)
    w, m, v = 1.0, 0.0, 0.0
    for t, g in ((1, 2.0), (2, -0.5)):
        opt.backward(push(model, g))
        found = opt.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w -= 0.1 * 0.5 * w
        w -= 0.1 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
        assert model.weight.item() == pytest.approx(w, rel=1e-6)
        assert found["grad_norm"] == pytest.approx(abs(g))
    assert model.weight.grad is None


def test_gradients_add_up_until_the_step() -> None:
    model = weight(1.0, 1.0)
    opt = optimiser(model)
    opt.backward(push(model, 3.0, 0.0))
    opt.backward(push(model, 0.0, 4.0))
    assert opt.step()["grad_norm"] == pytest.approx(5.0)


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 0.2), (5.0, 1.0), (0.0, 1.0)])
def test_clipping(limit: float, kept: float) -> None:
    """(3, 4) has norm 5: within a limit of 1 it is a fifth. The norm that is reported is the one before; 0 is no limit."""
    model = weight(0.0, 0.0)
    opt = optimiser(model, max_grad_norm=limit, adam_beta1=0.5)
    opt.backward(push(model, 3.0, 4.0))
    assert opt.step()["grad_norm"] == pytest.approx(5.0)
    first_moment = opt.adam.state[model.weight]["exp_avg"]
    assert first_moment.flatten().tolist() == pytest.approx([0.5 * kept * 3, 0.5 * kept * 4], rel=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules(schedule: str) -> None:
    """Warm-up over 4 of 12 updates, then level, on a line to zero, or on half a cosine."""
    model = weight(1.0)
    opt = optimiser(model, 12, lr_scheduler_type=schedule, warmup_steps=4)
    rates = []
    for _ in range(12):
        opt.backward(push(model, 1.0))
        rates.append(opt.step()["learning_rate"])
    after = {
        "constant": [0.1] * 8,
        "linear": [0.1 * (8 - k) / 8 for k in range(8)],
        "cosine": [0.05 * (1 + math.cos(math.pi * k / 8)) for k in range(8)],
    }[schedule]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, *after])


def test_a_step_without_gradients() -> None:
    """Zero gradients: weights stay, moments shrink, the step is counted."""
    model = weight(1.0)
    opt = optimiser(model)
    assert opt.step() == {"grad_norm": 0.0, "learning_rate": 0.1, "skipped_steps": 0.0}
    assert model.weight.item() == 1.0
    assert opt.adam.state[model.weight]["step"].item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = weight(1.0, 2.0)
    opt = optimiser(model, max_grad_norm=1.0, lr_scheduler_type="linear")
    opt.backward(push(model, 1.0, bad))
    with pytest.raises(NonFinite, match=r"norm is (nan|inf); the weights were left as they were"):
        opt.step()
    assert model.weight.flatten().tolist() == [1.0, 2.0]
    assert not opt.adam.state[model.weight]
    opt.backward(push(model, 1.0, 1.0))
    assert opt.step()["learning_rate"] == 0.1  # the schedule has not moved, and the bad gradient is gone
    assert all(math.isfinite(w) for w in model.weight.flatten().tolist())


def test_nothing_trainable_is_refused() -> None:
    """Case L4."""
    with pytest.raises(ValueError, match=r"every parameter is frozen.*is_trainable=True.*requires_grad_"):
        optimiser(weight(1.0).requires_grad_(False))


def test_frozen_weights_are_left_alone() -> None:
    model = nn.Sequential(weight(1.0), weight(2.0).requires_grad_(False))
    opt = optimiser(model, weight_decay=0.1)
    opt.backward(model(torch.ones(1, 1)).sum())
    opt.step()
    assert len(opt.parameters) == 1
    assert model[0].weight.item() != 1.0
    assert model[1].weight.item() == 2.0


def test_gradient_scaling_gives_the_unscaled_update() -> None:
    """For fp16: the loss is multiplied, the gradient divided, so clipping and Adam see the true one."""
    ends = []
    for scale in (False, True):
        model = weight(1.0, -1.0)
        opt = optimiser(model, scale=scale, max_grad_norm=1.0)
        opt.backward(push(model, 3.0, 4.0))
        assert opt.step()["grad_norm"] == pytest.approx(5.0)
        ends.append(model.weight.flatten().tolist())
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


def test_an_overflow_under_gradient_scaling_is_skipped_and_counted() -> None:
    model = weight(1.0, 2.0)
    opt = optimiser(model, scale=True, lr_scheduler_type="linear")
    assert opt.scaler is not None
    scale = opt.scaler.get_scale()
    opt.backward(push(model, 1.0, math.inf))
    assert opt.step()["skipped_steps"] == 1
    assert model.weight.flatten().tolist() == [1.0, 2.0]
    assert opt.scaler.get_scale() == scale / 2
    opt.backward(push(model, 1.0, 1.0))
    after = opt.step()
    assert (after["skipped_steps"], after["learning_rate"]) == (1, 0.1)
    assert model.weight.flatten().tolist() == pytest.approx([0.9, 1.9])
