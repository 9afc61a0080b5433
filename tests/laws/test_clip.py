"""The clip by hand: which side of which bound stops the gradient, and how it is counted."""

import math

import pytest
import torch

from groupline.objective import CISPO, DAPO, GRPO, REINFORCE, policy_loss


def one(ratio, advantage, row, **given):
    """Loss and gradient (in logp) of one token with this ratio, and the facts."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    logp = (old + math.log(ratio)).requires_grad_()
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, facts = policy_loss(logp, old, a, row, sequence=torch.zeros(1, dtype=torch.long), num_sequences=1, **given)
    loss.sum().backward()
    return loss.item(), logp.grad.item(), facts


ROW = DAPO  # 0.8 .. 1.28


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "low", "high"),
    [
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 0, 1),  # above and good: stopped at 1.28
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # above and bad: pushed down, unbounded
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # below and good: pulled up
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # below and bad: stopped at 0.8
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_surrogate(ratio, advantage, loss, grad, low, high):
    got = one(ratio, advantage, ROW)
    assert got[:2] == pytest.approx((loss, grad), abs=1e-12)
    assert (got[2].clip_low, got[2].clip_high, got[2].delta) == (low, high, 0)
    assert got[2].ratio_sum.item() == pytest.approx(ratio)


def test_delta_bounds_the_ratio_before_the_clip():
    row = ROW.replace(delta=2.0)
    loss, grad, facts = one(5.0, -1.0, row)
    assert (loss, grad, facts.delta) == (pytest.approx(2.0), 0.0, 1)
    assert one(5.0, -1.0, ROW)[0] == pytest.approx(5.0)
    loss, grad, facts = one(5.0, 1.0, row)  # the clip is tighter there
    assert (loss, grad, facts.clip_high, facts.delta) == (pytest.approx(-1.28), 0.0, 1, 0)
    assert one(1.9, -1.0, row)[:2] == pytest.approx((1.9, 1.9))


def test_detached_ratio_is_a_truncated_weight_on_the_log_prob():
    # bound 1 + 4 = 5, for either sign, and the gradient never stops
    for advantage in (2.0, -2.0):
        for ratio, weight, high in ((3.0, 3.0, 0), (8.0, 5.0, 1), (0.1, 0.1, 0)):
            loss, grad, facts = one(ratio, advantage, CISPO)
            assert grad == pytest.approx(-weight * advantage)
            assert loss == pytest.approx(-weight * advantage * (-1.0 + math.log(ratio)))
            assert (facts.clip_low, facts.clip_high) == (0, high)
    loss, grad, facts = one(0.1, 1.0, CISPO.replace(clip_low=0.5))
    assert (grad, facts.clip_low) == (pytest.approx(-0.5), 1)


def test_no_ratio_is_the_log_prob_alone_and_still_measures_the_drift():
    loss, grad, facts = one(3.0, 2.0, REINFORCE)
    assert (loss, grad) == pytest.approx((-2.0 * (-1.0 + math.log(3)), -2.0))
    assert facts.ratio_max.item() == pytest.approx(3.0)
    assert (facts.clip_low, facts.clip_high) == (0, 0)


def test_importance_multiplies_the_policy_term_and_not_the_kl():
    given = {"ref_logp": torch.tensor([-1.0], dtype=torch.float64)}
    weight = torch.tensor([0.5], dtype=torch.float64)
    kl = 1 / 1.1 - math.log(1 / 1.1) - 1
    loss, grad, _ = one(1.1, 2.0, GRPO, importance=weight, **given)
    assert loss == pytest.approx(-1.1 + 0.04 * kl)
    assert grad == pytest.approx(-1.1 + 0.04 * (1 - 1 / 1.1))


def test_kl_is_measured_when_a_reference_is_given_and_absent_otherwise():
    ref = torch.tensor([-1.5], dtype=torch.float64)
    assert one(1.0, 1.0, DAPO)[2].kl_sum is None
    loss, _, facts = one(1.0, 1.0, DAPO, ref_logp=ref)
    assert loss == pytest.approx(-1.0)  # beta 0: measured only
    assert facts.kl_sum.item() == pytest.approx(0.106531, abs=1e-6)
    assert one(1.0, 1.0, DAPO.replace(kl="k1"), ref_logp=ref)[2].kl_sum.item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="needs ref_logp"):
        one(1.0, 1.0, GRPO)
    with pytest.raises(ValueError, match="reference for both or none"):
        one(1.0, 1.0, DAPO)[2] + facts


def test_kl_sum_is_over_tokens_of_all_answers():
    # answers of 1 and 9 tokens, d = 1 and 0.5: the token mean is (0.718282 + 9 * 0.148721) / 10
    d = torch.tensor([1.0] + [0.5] * 9)
    sequence = torch.tensor([0] + [1] * 9)
    _, facts = policy_loss(torch.zeros(10), None, torch.zeros(10), GRPO, sequence=sequence, num_sequences=2, ref_logp=d)
    assert (facts.kl_sum / facts.tokens).item() == pytest.approx(0.2056771, abs=1e-6)


def test_facts_carry_no_gradient_and_half_precision_is_lifted():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    zero = torch.zeros(2, dtype=torch.long)
    loss, facts = policy_loss(logp, None, torch.ones(2), GRPO, sequence=zero, num_sequences=1, ref_logp=logp)
    assert loss.dtype == torch.float32
    for name in facts.__slots__:
        assert not getattr(facts, name).requires_grad


def test_a_nan_log_prob_is_never_a_ratio_of_one():
    nan = torch.tensor([math.nan, -1.0])
    zero = torch.zeros(2, dtype=torch.long)
    loss, facts = policy_loss(torch.tensor([-1.0, -1.0]), nan, torch.ones(2), DAPO, sequence=zero, num_sequences=1)
    assert loss.isnan().tolist() == [True, False]
    assert facts.ratio_sum.isnan()


def test_shapes_must_be_one_per_token():
    with pytest.raises(ValueError, match="advantages has shape"):
        policy_loss(torch.zeros(3), None, torch.zeros(2), DAPO, sequence=torch.zeros(3).long(), num_sequences=1)
    with pytest.raises(ValueError, match="sequence has shape"):
        policy_loss(torch.zeros(3), None, torch.zeros(3), DAPO, sequence=torch.zeros(1).long(), num_sequences=1)
