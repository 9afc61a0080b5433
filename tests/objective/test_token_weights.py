import pytest
import torch

from groupline.objective import step_totals, token_weights


def weights(lengths, rule, **settings):
    return token_weights(torch.tensor(lengths), rule, dtype=torch.float64, **settings).tolist()


@pytest.mark.parametrize(
    ("rule", "expected", "loss"),
    [
        ("per_sequence", [1 / 2, 1 / 6], 0.0),
        ("per_token", [1 / 4, 1 / 4], 0.5),
        ("per_budget", [1 / 8, 1 / 8], 0.25),
        ("sequence_sum", [1 / 2, 1 / 2], 1.0),
    ],
)
def test_lengths_1_and_3_with_token_losses_minus_1_and_1(rule, expected, loss):
    got = weights([1, 3], rule, budget=4)
    assert got == pytest.approx(expected)
    assert got[0] * -1 + got[1] * 3 == pytest.approx(loss)


def test_masked_answers_leave_numerator_and_denominator():
    # 2 tokens finished, 6 truncated and masked (length 0), each token's loss 1
    assert 2 * weights([2, 0], "per_token")[0] == 1.0
    assert weights([2, 0], "per_sequence") == [1 / 2, 0.0]
    assert weights([2, 0], "sequence_sum") == [1.0, 0.0]
    assert weights([2, 0], "per_budget", budget=8) == [1 / 16, 0.0]  # its denominator is a constant of the step
    # two of four masked
    assert weights([4, 0, 2, 0], "per_sequence") == [1 / 8, 0, 1 / 4, 0]
    assert weights([4, 0, 2, 0], "per_sequence", count_masked=True) == [1 / 16, 0, 1 / 8, 0]
    assert weights([4, 0, 2, 0], "per_budget", budget=5, count_masked=False) == [1 / 10, 0, 1 / 10, 0]


@pytest.mark.parametrize("rule", ["per_sequence", "per_token", "per_budget", "sequence_sum"])
def test_all_masked_is_zero_not_nan(rule):
    assert weights([0, 0], rule, budget=4) == [0.0, 0.0]
    assert weights([], rule, budget=4) == []


@pytest.mark.parametrize("rule", ["per_sequence", "per_token", "per_budget", "sequence_sum"])
def test_parts_with_the_steps_totals_equal_the_whole(rule):
    lengths = torch.tensor([1, 0, 5, 3, 0, 2, 8])
    whole = token_weights(lengths, rule, budget=8)
    parts = [lengths[:2], lengths[2:3], lengths[3:]]
    totals = [step_totals(part, rule) for part in parts]
    sequences, tokens = sum(s for s, _ in totals), sum(t for _, t in totals)
    assert (sequences, tokens) == step_totals(lengths, rule) == (7 if rule == "per_budget" else 5, 19)
    split = [token_weights(part, rule, budget=8, sequences=sequences, tokens=tokens) for part in parts]
    assert torch.equal(torch.cat(split), whole)


def test_refusals():
    with pytest.raises(ValueError, match='rule is "mean"'):
        weights([1], "mean")
    with pytest.raises(ValueError, match="budget"):
        weights([1], "per_budget")
    with pytest.raises(ValueError, match="sequences is 1"):
        weights([1, 2], "per_sequence", sequences=1)
    with pytest.raises(ValueError, match="tokens is 2"):
        weights([1, 2], "per_token", tokens=2)
    with pytest.raises(ValueError, match="0 or more"):
        weights([1, -2], "per_token")
