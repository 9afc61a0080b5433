import math

import pytest
import torch

from groupline.objective import (
    LOG_RATIO_BOUND,
    sequence_product_ratio,
    sequence_ratio,
    token_ratio,
    truncated_importance_weights,
)


def test_token_and_sequence_ratios_of_three_tokens():
    new, old, one = torch.tensor([0.1, -0.2, 0.3]), torch.zeros(3), torch.zeros(3, dtype=torch.long)
    torch.testing.assert_close(token_ratio(new, old), torch.tensor([1.105171, 0.818731, 1.349859]))
    torch.testing.assert_close(sequence_ratio(new, old, one, 1), torch.full((3,), 1.068939))
    torch.testing.assert_close(sequence_product_ratio(new, old, one, 1), torch.full((3,), math.exp(0.2)))


def test_masked_tokens_are_not_part_of_the_sequence():
    # log-ratios 0.1, -0.3 (and 0.5, masked, so not among the trained tokens)
    new, old = torch.tensor([0.1, -0.3]), torch.zeros(2)
    torch.testing.assert_close(
        sequence_ratio(new, old, torch.zeros(2, dtype=torch.long), 1), torch.full((2,), 0.904837)
    )
    torch.testing.assert_close(token_ratio(new, old), torch.tensor([1.105171, 0.740818]))


def test_tokens_may_come_in_any_order_and_answers_may_be_absent():
    new = torch.tensor([0.1, 0.5, -0.3, 0.7, 0.9])
    sequence = torch.tensor([2, 0, 2, 0, 2])  # answer 1 has no token
    means = {0: 0.6, 2: 0.7 / 3}
    expected = torch.tensor([math.exp(means[int(s)]) for s in sequence])
    torch.testing.assert_close(sequence_ratio(new, torch.zeros(5), sequence, 3), expected)


def test_gradient_of_the_sequence_ratio_flows_through_its_mean():
    new = torch.tensor([0.1, -0.3, 0.4], dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0, 0, 1])
    sequence_ratio(new, torch.zeros(3), sequence, 2).sum().backward()
    # answer 0: 2 tokens each hold exp(-0.1); d/dx of 2 exp(mean) is exp(mean) for either token
    expected = torch.tensor([math.exp(-0.1), math.exp(-0.1), math.exp(0.4)], dtype=torch.float64)
    torch.testing.assert_close(new.grad, expected)


@pytest.mark.parametrize("gap", [50.0, 200.0, 1e4, -50.0, -1e4])
def test_far_ratios_and_their_gradients_stay_finite(gap):
    one = torch.zeros(1, dtype=torch.long)
    for ratio in (
        token_ratio,
        lambda a, b: sequence_ratio(a, b, one, 1),
        lambda a, b: sequence_product_ratio(a, b, one, 1),
    ):
        new = torch.tensor([gap], requires_grad=True)
        value = ratio(new, torch.zeros(1))
        value.sum().backward()
        assert value.item() == pytest.approx(math.exp(math.copysign(LOG_RATIO_BOUND, gap)), rel=1e-6)
        assert new.grad.item() == 0


def test_half_precision_is_computed_in_fp32():
    got = token_ratio(torch.tensor([15.0], dtype=torch.float16), torch.tensor([0.0], dtype=torch.float16))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(math.exp(15), rel=1e-6)


def test_truncated_importance_weights():
    got = truncated_importance_weights(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-2.0, -1.5, -2.0]), 2.0)
    torch.testing.assert_close(got, torch.tensor([2.0, 1.648721, 0.367879]))
    assert not got.requires_grad
    with pytest.raises(ValueError, match=r"token 1 has log-probs -0.5.*nan"):
        truncated_importance_weights(torch.tensor([-1.0, -0.5]), torch.tensor([-1.0, math.nan]), 2.0)
    with pytest.raises(ValueError, match="token 0"):
        truncated_importance_weights(torch.tensor([-math.inf]), torch.tensor([-math.inf]), 2.0)
    with pytest.raises(ValueError, match="cap is 0"):
        truncated_importance_weights(torch.zeros(1), torch.zeros(1), 0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="differ in shape"):
        token_ratio(torch.zeros(3), torch.zeros(2))
