"""The KL estimators against exact categorical KL: every token, weighted by its probability."""

import pytest
import torch

from groupline.objective import GRPO, k1, k2, k3, policy_loss


def distributions(seed, size=5, gap=0.7):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=rng, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(
        logits.detach() + gap * torch.randn(size, generator=rng, dtype=torch.float64), -1
    )


def exact_kl(logp, ref_logp):
    return (logp.exp() * (logp - ref_logp)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_k1_and_k3_have_the_kl_as_their_mean_and_k2_has_not(seed):
    logits, ref = distributions(seed)
    logp = torch.log_softmax(logits, -1).detach()
    kl = exact_kl(logp, ref)
    for estimator in (k1, k3):
        torch.testing.assert_close((logp.exp() * estimator(logp, ref)).sum(), kl, rtol=1e-10, atol=1e-12)
    assert abs((logp.exp() * k2(logp, ref)).sum() - kl) > 1e-4 * kl
    assert (k1(logp, ref) < 0).any()
    assert (k3(logp, ref) >= 0).all()


def test_k2_is_close_when_the_two_are_close():
    logits, ref = distributions(1, gap=1e-3)
    logp = torch.log_softmax(logits, -1).detach()
    torch.testing.assert_close((logp.exp() * k2(logp, ref)).sum(), exact_kl(logp, ref), rtol=1e-2, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_mean_gradient_of_each_estimator_as_a_loss(seed):
    """Tokens are drawn from the policy, so their probabilities are constants of the loss."""
    logits, ref = distributions(seed)

    def mean_gradient(estimator):
        logp = torch.log_softmax(logits, -1)
        (grad,) = torch.autograd.grad((logp.detach().exp() * estimator(logp)).sum(), logits)
        return grad

    (kl,) = torch.autograd.grad(exact_kl(torch.log_softmax(logits, -1), ref), logits)
    forward = (ref.exp() * (ref - torch.log_softmax(logits, -1))).sum()
    (reverse,) = torch.autograd.grad(forward, logits)

    def close(got, expected):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)

    close(mean_gradient(lambda logp: k1(logp, ref)), torch.zeros_like(kl))
    close(mean_gradient(lambda logp: k2(logp, ref)), kl)
    close(mean_gradient(lambda logp: k3(logp, ref)), reverse)

    row = GRPO.replace(beta=1.0, kl_times_ratio=True)
    one_each = torch.arange(len(ref))

    def through_the_loss(logp):
        zero = torch.zeros_like(logp)
        return policy_loss(logp, None, zero, row, sequence=one_each, num_sequences=len(ref), ref_logp=ref)[0]

    close(mean_gradient(through_the_loss), kl)
