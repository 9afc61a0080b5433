"""Preference losses against values computed by hand and with the math module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from groupline.objective import bradley_terry_loss, dpo_loss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_without_a_margin_is_log_2() -> None:
    """A policy equal to its reference has no margin, whatever the log-probs and beta."""
    loss, facts = dpo_loss(f64(-3.0), f64(-9.0), f64(-3.0), f64(-9.0), beta=0.7)
    assert loss.tolist() == pytest.approx([math.log(2)], abs=1e-15)
    assert (facts.margins.item(), facts.right.item()) == (0.0, 0.0)  # a tie is not right


def test_dpo_by_hand() -> None:
    """The chosen answer gained 1 nat and the rejected one lost 2: margin 0.5 x 3; then the other way round."""
    loss, facts = dpo_loss(f64(-9, -12), f64(-7, -6), f64(-10, -10), f64(-5, -7), beta=0.5)
    assert facts.chosen.tolist() == pytest.approx([0.5, -1.0])
    assert facts.rejected.tolist() == pytest.approx([-1.0, 0.5])
    assert facts.margins.tolist() == pytest.approx([1.5, -1.5])
    assert facts.right.tolist() == [1.0, 0.0]
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))], abs=1e-12)


def test_the_gradient_of_dpo() -> None:
    """d loss / d log pi(chosen) = -beta sigmoid(-margin), and the opposite for the rejected one (section 4 of the paper)."""
    chosen, rejected = f64(-9).requires_grad_(), f64(-7).requires_grad_()
    loss, facts = dpo_loss(chosen, rejected, f64(-10), f64(-5), beta=0.5)
    loss.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.5 * sigmoid(-1.5), abs=1e-12)
    assert rejected.grad.item() == pytest.approx(0.5 * sigmoid(-1.5), abs=1e-12)
    assert not facts.chosen.requires_grad


def test_label_smoothing_rests_where_the_labels_are_as_sure_as_they_may_be() -> None:
    margin = math.log(0.9 / 0.1)  # sigmoid of it is 1 - 0.1
    chosen = f64(margin).requires_grad_()
    loss, _ = dpo_loss(chosen, f64(0), f64(0), f64(0), beta=1.0, label_smoothing=0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), abs=1e-12)  # their entropy
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_bradley_terry_by_hand() -> None:
    loss, facts = bradley_terry_loss(f64(1.0, 0.5, 2.0), f64(1.0, 1.5, -1.0))
    assert loss.tolist() == pytest.approx([math.log(2), math.log(1 + math.e), math.log(1 + math.exp(-3))], abs=1e-12)
    assert facts.right.tolist() == [0.0, 0.0, 1.0]
    wanted, _ = bradley_terry_loss(f64(1.0, 0.5, 2.0), f64(1.0, 1.5, -1.0), margin=f64(0, 0, 3))
    assert wanted.tolist() == pytest.approx([math.log(2), math.log(1 + math.e), math.log(2)], abs=1e-12)
    centred, _ = bradley_terry_loss(f64(1.0, 0.5, 2.0), f64(1.0, 1.5, -1.0), center=0.25)
    assert (centred - loss).tolist() == pytest.approx([1.0, 1.0, 0.25], abs=1e-12)


def test_extreme_margins_stay_finite() -> None:
    chosen = torch.tensor([3000.0, -3000.0]).requires_grad_()
    for loss in (
        bradley_terry_loss(chosen, torch.zeros(2))[0],
        dpo_loss(chosen, torch.zeros(2), torch.zeros(2), torch.zeros(2), 1.0)[0],
    ):
        assert loss.tolist() == [0.0, 3000.0]
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert gradient.tolist() == [0.0, -1.0]


def test_half_precision_is_computed_in_fp32() -> None:
    loss, facts = dpo_loss(*(torch.tensor([x], dtype=torch.bfloat16) for x in (-1.0, -2.0, -1.5, -1.25)), beta=0.125)
    assert facts.margins.dtype == loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.125 * 1.25)), abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beta": 0.0}, "beta is 0.0; it must be positive"), ({"label_smoothing": 0.5}, r"must be in \[0, 0.5\)")],
)
def test_settings_without_meaning(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(*(f64(0) for _ in range(4)), **settings)
    with pytest.raises(ValueError, match="center is -1; it must be 0 or more"):
        bradley_terry_loss(f64(0), f64(0), center=-1)
