"""Every row's gradient against one worked out another way, and the laws that no split of the work may break."""

import math
import random

import pytest
import torch
from tabular import GROUP, Case, P, V, gradient, reference_advantages, reference_loss
from tabular_step import step_loss

from groupline.objective import (
    BNPO,
    CISPO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    OBJECTIVES,
    REINFORCE,
    group_advantages,
    policy_loss,
)

SETTINGS = {
    **OBJECTIVES,
    "delta": DAPO.replace(delta=1.4),
    "k1": GRPO.replace(kl="k1"),
    "k2": GRPO.replace(kl="k2"),
    "k3 times ratio": GRPO.replace(kl_times_ratio=True),
    "sequence sum": GSPO.replace(token_weight="sequence_sum", clip_low=0.2, clip_high=0.2),
    "population std": GRPO.replace(ddof=0),
    "tight cispo": CISPO.replace(clip_low=0.1, clip_high=0.1),
    "sequence cispo": CISPO.replace(ratio="sequence", clip_high=0.05),
    "unclipped": DR_GRPO.replace(clip_low=None, clip_high=None),
}


@pytest.fixture
def case():
    return Case()


def leaf(case):
    return case.logits.clone().requires_grad_()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drift", [0.02, 0.5])
def test_loss_and_gradient_of_every_row_by_loops(name, drift):
    case, row = Case(drift=drift), SETTINGS[name]
    logits, other = leaf(case), leaf(case)
    loss, _ = step_loss(case, row, logits)
    expected = reference_loss(case, row, other)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, other), rtol=1e-9, atol=1e-12)


# the gradient of a detached form is not that of its value
@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if row.form == "surrogate"])
def test_gradient_by_finite_differences(name):
    case, row = Case(drift=0.1), SETTINGS[name]
    logits, h = leaf(case), 1e-6
    grad = gradient(step_loss(case, row, logits)[0], logits)
    for t, v in ((0, 0), (1, 2), (3, 1)):
        shift = torch.zeros(P, V, dtype=torch.float64)
        shift[t, v] = h
        up, down = (step_loss(case, row, case.logits + s * shift)[0].item() for s in (1, -1))
        assert grad[t, v].item() == pytest.approx((up - down) / (2 * h), abs=1e-7)


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
def test_on_policy_gradient_is_reinforce_by_the_softmax_formula(row):
    """At ratio 1 every row's policy gradient is -sum w A (onehot - pi); none of it needs autograd."""
    row = row.replace(beta=0.0, kl="none")
    case = Case(drift=0.0)
    logits = leaf(case)
    grad = gradient(step_loss(case, row, logits, on_policy=True)[0], logits)
    pi = torch.softmax(case.logits, -1)
    expected = torch.zeros(P, V, dtype=torch.float64)
    advantages = reference_advantages(case.rewards, row)
    tokens, answers = sum(case.lengths), len(case.ids)
    for s, ids in enumerate(case.ids):
        weight = {"per_sequence": 1 / (answers * len(ids)), "per_token": 1 / tokens, "per_budget": 1 / (answers * 6)}
        for t, token in enumerate(ids):
            w = 1 / answers if row.ratio == "sequence_product" else weight[row.token_weight]
            expected[t] += w * advantages[s] * pi[t]
            expected[t, token] -= w * advantages[s]
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    given, _ = step_loss(case, row, logits)  # old log-probs given, equal to the new
    torch.testing.assert_close(gradient(given, logits), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
def test_any_split_into_micro_batches_gives_the_same_gradient(row, case):
    logits = leaf(case)
    whole, facts = step_loss(case, row, logits)
    grad = gradient(whole, logits)
    shuffled = list(range(8))
    random.Random(5).shuffle(shuffled)
    for size in (1, 2, 3, 4, 8):
        split = [shuffled[i : i + size] for i in range(0, 8, size)]
        loss, parts = step_loss(case, row, logits, split)
        got = gradient(loss, logits)
        assert (got - grad).norm() <= 1e-9 * grad.norm()
        assert loss.item() == pytest.approx(whole.item(), abs=1e-12)
        assert (parts.tokens, parts.clip_low, parts.clip_high) == (facts.tokens, facts.clip_low, facts.clip_high)
        assert (parts.ratio_min, parts.ratio_max) == (facts.ratio_min, facts.ratio_max)
        for name in ("ratio_sum", "kl_sum"):
            assert getattr(parts, name).item() == pytest.approx(getattr(facts, name).item(), rel=1e-12)


def test_the_token_mean_is_of_the_step_not_of_its_micro_batches():
    # lengths 1 and 3, losses -1 and +1: 0.5, where the mean of the two micro-batches' means would be 0
    case = Case(lengths=[1, 3, 1, 3], rewards=[1.0, 0.0, 1.0, 0.0], drift=0.0)
    row = DAPO.replace(ddof=0, eps=0.0)
    for split in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 2], [1, 3]]):
        loss, _ = step_loss(case, row, leaf(case), split, on_policy=True)
        assert loss.item() == pytest.approx(0.5, abs=1e-12)


def test_long_and_short_micro_batches():
    case = Case(lengths=[1, 1, 1, 1, 6, 6, 6, 6], drift=0.1)
    for row in (BNPO, GRPO, DR_GRPO):
        logits = leaf(case)
        whole = gradient(step_loss(case, row, logits)[0], logits)
        split = gradient(step_loss(case, row, logits, [[0, 1, 2, 3], [4, 5, 6, 7]])[0], logits)
        assert (split - whole).norm() <= 1e-9 * whole.norm()


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
def test_order_of_answers_and_tokens_does_not_matter(row, case):
    logits = leaf(case)
    grad = gradient(step_loss(case, row, logits)[0], logits)
    logp, place = case.flat(logits, list(range(8)))
    mixed = torch.randperm(len(place), generator=torch.Generator().manual_seed(2))
    a = torch.arange(8, dtype=torch.float64)[place]
    old, ref = (case.flat(x, list(range(8)))[0] for x in (case.old_logits, case.ref_logits))
    plain, _ = policy_loss(logp, old, a, row, sequence=place, num_sequences=8, ref_logp=ref)
    shuffled, _ = policy_loss(
        logp[mixed], old[mixed], a[mixed], row, sequence=place[mixed], num_sequences=8, ref_logp=ref[mixed]
    )
    torch.testing.assert_close(shuffled, plain[mixed], rtol=1e-12, atol=1e-12)
    backwards = gradient(step_loss(case, row, logits, [list(range(7, -1, -1))])[0], logits)
    torch.testing.assert_close(backwards, grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.35, 0.1 + 0.2])
def test_equal_rewards_give_no_policy_gradient(row, reward):
    row = row.replace(beta=0.0, kl="none")
    case = Case(rewards=[reward] * 8)
    logits = leaf(case)
    loss, _ = step_loss(case, row, logits)
    assert loss.item() == 0
    assert (gradient(loss, logits) == 0).all()


def test_equal_rewards_keep_the_gradient_of_a_kl():
    case = Case(rewards=[1.0] * 8)
    logits, other = leaf(case), leaf(case)
    grad = gradient(step_loss(case, GRPO, logits)[0], logits)
    assert grad.norm() > 1e-4
    doubled = gradient(step_loss(case, GRPO.replace(beta=0.08), other)[0], other)
    torch.testing.assert_close(doubled, 2 * grad, rtol=1e-9, atol=1e-13)


def test_one_token_answers_make_the_sequence_form_the_token_form():
    case = Case(lengths=[1] * 8, drift=0.4)
    for row in (GRPO, DAPO, CISPO):
        grads = []
        for ratio in ("token", "sequence", "sequence_product"):
            logits = leaf(case)
            grads.append(gradient(step_loss(case, row.replace(ratio=ratio), logits)[0], logits))
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(grads[2], grads[0], rtol=1e-10, atol=1e-13)


def test_masked_answers_are_as_if_never_drawn(case):
    kept = [0, 2, 3, 4, 7]
    fewer = Case()
    for name in ("ids", "lengths"):
        setattr(fewer, name, [getattr(case, name)[s] for s in kept])
    for row in (GRPO, BNPO, CISPO, REINFORCE):
        logits, other = leaf(case), leaf(case)
        got = gradient(step_loss(case, row, logits, masked=(1, 5, 6))[0], logits)
        a = group_advantages(torch.tensor(case.rewards, dtype=torch.float64), GROUP, scale=row.scale)[kept]
        expected = torch.zeros((), dtype=torch.float64)
        for i, ids in enumerate(fewer.ids):
            logp, place = fewer.flat(other, [i])
            old, ref = fewer.flat(case.old_logits, [i])[0], fewer.flat(case.ref_logits, [i])[0]
            per_token, _ = policy_loss(
                logp, old, a[i].expand(len(ids)), row, sequence=place, num_sequences=1, ref_logp=ref
            )
            divisor = 5 * len(ids) if row is GRPO else sum(fewer.lengths)
            expected = expected + per_token.sum() / divisor
        torch.testing.assert_close(got, gradient(expected, other), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
def test_every_answer_masked_is_a_loss_of_zero(row, case):
    loss, facts = step_loss(case, row, leaf(case), masked=tuple(range(8)))
    assert (loss.item(), facts) == (0.0, None)
    logp = torch.zeros(0, requires_grad=True)
    empty, facts = policy_loss(
        logp, None, logp, row, sequence=torch.zeros(0, dtype=torch.long), num_sequences=4, ref_logp=logp
    )
    empty.sum().backward()
    assert empty.shape == logp.grad.shape == (0,)
    assert (facts.tokens, facts.ratio_sum, facts.ratio_min, facts.ratio_max) == (0, 0, 1, 1)


def test_a_loss_of_zero_is_not_a_gradient_of_zero():
    """Two actions at logits (0, 0), each drawn once, rewards 1 and 0."""
    row = GRPO.replace(beta=0.0, kl="none", eps=0.0)
    for scale, ddof, size in (("none", 1, 0.25), ("group", 1, 0.353553), ("group", 0, 0.5)):
        logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        a = group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2, scale=scale, ddof=ddof, eps=0.0)
        loss, _ = policy_loss(
            torch.log_softmax(logits, -1), None, a, row, sequence=torch.tensor([0, 1]), num_sequences=2
        )
        total = (loss / 2).sum()
        assert abs(total.item()) < 1e-9
        expected = torch.tensor([-size, size], dtype=torch.float64)
        torch.testing.assert_close(gradient(total, logits), expected, rtol=0, atol=1e-6)


def test_a_second_pass_over_the_same_answers_sees_other_ratios(case):
    logits = case.old_logits.clone().requires_grad_()
    row = DAPO
    loss, facts = step_loss(case, row, logits)
    assert (facts.ratio_min, facts.ratio_max, facts.clip_low, facts.clip_high) == (1, 1, 0, 0)
    moved = (logits - 30 * gradient(loss, logits)).detach()
    _, facts = step_loss(case, row, moved)
    assert facts.ratio_min < 0.8
    assert facts.ratio_max > 1.28
    assert facts.clip_low > 0
    assert facts.clip_high > 0


@pytest.mark.parametrize("row", OBJECTIVES.values(), ids=OBJECTIVES)
def test_far_log_probs_stay_finite(row):
    gaps = torch.tensor([200.0, 1e4, -200.0, -1e4])
    for a in (1.0, -1.0):
        logp = (-gaps).requires_grad_()
        loss, facts = policy_loss(
            logp, torch.zeros(4), torch.full((4,), a), row, sequence=torch.arange(4), num_sequences=4,
            ref_logp=torch.zeros(4),
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss.sum(), logp)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(grad).all()
        assert math.isfinite(facts.ratio_max)
