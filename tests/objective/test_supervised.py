"""The loss of supervised fine-tuning by hand."""

from __future__ import annotations

import pytest
import torch

from groupline.objective import supervised_loss


def test_by_hand() -> None:
    logp = torch.tensor([-1.0, -0.5, -2.5], dtype=torch.float64, requires_grad=True)
    loss = supervised_loss(logp, 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(4 / 3, abs=1e-15)
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1 / 3] * 3


def test_micro_batches_add_up_to_the_mean_over_the_step() -> None:
    """Of uneven lengths: means of the parts would give (1 + 3) / 2."""
    one, other = torch.tensor([-1.0]), torch.tensor([-2.0, -3.0, -4.0])
    assert float(supervised_loss(one, 4) + supervised_loss(other, 4)) == 2.5
    assert supervised_loss(torch.zeros(0), 4).item() == 0.0


def test_a_total_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="tokens is 2, but logp alone holds 3; give the step's total"):
        supervised_loss(torch.zeros(3), 2)
    with pytest.raises(ValueError, match="tokens is 0"):
        supervised_loss(torch.zeros(0), 0)
