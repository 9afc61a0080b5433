import math

import pytest
import torch

from groupline.objective import add_kl_to_reward, answer_kl, k1, k2, k3, kl_estimate

D = [0.0, 0.5, -0.5, 1.0, 5.0, 20.0, -100.0]
K3 = [0.0, 0.148721, 0.106531, 0.718282, 142.413159, 4.851652e8, 99.0]


def at(estimator, d, dtype=torch.float32):
    """Value and gradient in logp at ref_logp - logp = d."""
    logp = torch.zeros(1, dtype=dtype, requires_grad=True)
    value = estimator(logp, torch.tensor([d], dtype=dtype))
    value.sum().backward()
    return value.item(), logp.grad.item()


@pytest.mark.parametrize(("d", "expected"), list(zip(D, K3, strict=True)))
def test_k3_values_and_gradients(d, expected):
    value, grad = at(k3, d)
    assert value == pytest.approx(expected, rel=1e-5)
    assert grad == pytest.approx(1 - math.exp(d), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_fp32(dtype):
    for d, expected in zip(D, K3, strict=True):
        assert at(k3, d, dtype)[0] == pytest.approx(expected, rel=1e-5)
    assert k1(torch.zeros(1, dtype=dtype), torch.zeros(1)).dtype == torch.float32


@pytest.mark.parametrize("d", [100.0, 200.0, 1e4, 6e4])
def test_k3_beyond_its_bound_goes_on_along_the_tangent(d):
    value, grad = at(k3, d)
    slope = math.exp(20) - 1
    assert value == pytest.approx(math.exp(20) - 21 + slope * (d - 20), rel=1e-5)
    assert grad == pytest.approx(-slope, rel=1e-5)


def test_k3_is_never_negative_and_exact_near_zero():
    d = torch.cat([torch.linspace(-0.3, 0.3, 20001), torch.logspace(-8, 0, 999), -torch.logspace(-8, 0, 999)])
    got = k3(torch.zeros_like(d), d)
    assert (got >= 0).all()
    exact = torch.tensor([_k3_by_series(x) for x in d.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-30)
    fine = k3(torch.zeros(d.shape, dtype=torch.float64), d.double())
    torch.testing.assert_close(fine, exact, rtol=1e-12, atol=1e-30)


def _k3_by_series(d):
    return math.fsum(d**n / math.factorial(n) for n in range(2, 30))


def test_k1_and_k2():
    assert at(k1, 0.5) == (-0.5, 1.0)
    assert at(k2, 0.5) == (0.125, -0.5)
    assert at(k2, -1e4) == (5e7, 1e4)
    with pytest.raises(ValueError, match='estimator is "none"'):
        kl_estimate(torch.zeros(1), torch.zeros(1), "none")


def test_kl_of_an_answer():
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -3.5])
    got = answer_kl(logp, ref, torch.tensor([0, 2, 0]), 3)
    assert (got.tolist(), got.dtype, got.requires_grad) == ([1.0, 0.0, -1.0], torch.float64, False)
    assert answer_kl(logp, ref, torch.tensor([0, 2, 0]), 3, "k2").tolist() == [0.25, 0.0, 0.5]


def test_kl_in_the_reward():
    logp = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -3.0])
    kl = answer_kl(logp, ref, torch.tensor([0, 2, 0]), 3)  # answer 0: 0.5 + 2.0; answer 2: -1.0
    got = add_kl_to_reward(torch.tensor([1.0, float("nan"), 0.0]), kl, 0.1)
    assert got[0].item() == pytest.approx(0.75)
    assert got[1].isnan()
    assert got[2].item() == pytest.approx(0.1)
    assert (got.dtype, got.requires_grad) == (torch.float32, False)
    assert add_kl_to_reward(torch.tensor([1, 0]), kl[:2], 0.0).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"rewards have shape \(2,\) and kl \(3,\)"):
        add_kl_to_reward(torch.zeros(2), kl, 0.1)
