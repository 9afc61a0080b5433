"""Draws against exact probabilities, computed token by token in numpy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from groupline.records import SamplingParams
from groupline.sampling.choose import choose, filtered, uniforms

LOGITS = [1.3, -0.4, 2.1, 0.0, 0.9, -3.0]
LARGEST = 1 - 2**-53  # the largest uniform number that is drawn


def exact(logits, params):
    """Probabilities by the definition of each filter, one token at a time."""
    p = np.exp(np.array(logits, dtype=np.float64) / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: params.top_k or None]
    if params.top_p < 1:
        mass, chosen = 0.0, []
        for i in kept:
            if mass >= params.top_p:
                break
            chosen.append(i)
            mass += p[i] / sum(p[j] for j in kept)
        kept = chosen
    kept = [i for i in kept if p[i] >= params.min_p * p[kept[0]]]
    out = np.zeros(len(p))
    out[kept] = p[kept] / sum(p[kept])
    return out


ROWS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.3},
    {"top_p": 0.8},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    {"temperature": 1.7, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 0.5, "top_k": 5, "top_p": 0.99, "min_p": 0.01},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", ROWS, ids=str)
def test_sweeping_the_uniform_gives_the_exact_distribution(settings, dtype):
    params, steps = SamplingParams(**settings), 4000
    p = exact(LOGITS, params)
    u = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    ids, logprobs, plain = choose(torch.tensor([LOGITS], dtype=dtype).expand(steps, -1), u, params)
    share = np.bincount(ids.numpy(), minlength=len(p)) / steps
    np.testing.assert_allclose(share, p, atol=1.01 / steps)  # each border of the sweep is off by at most one step
    np.testing.assert_allclose(logprobs.numpy(), np.log(p[ids.numpy()]), atol=1e-6)
    np.testing.assert_allclose(plain.numpy(), np.log(exact(LOGITS, SamplingParams())[ids.numpy()]), atol=1e-6)


def test_a_chi_square_on_the_generator_that_sampling_uses():
    params, count = SamplingParams(temperature=0.8, top_k=5), 5000
    u = torch.from_numpy(uniforms(3, "prompt", 0, count))
    ids, _, _ = choose(torch.tensor([LOGITS], dtype=torch.float64).expand(count, -1), u, params)
    p = exact(LOGITS, params)
    seen = np.bincount(ids.numpy(), minlength=len(p))
    assert seen[p == 0].sum() == 0
    assert chisquare(seen[p > 0], p[p > 0] * count).pvalue > 0.01


def test_temperature_is_in_the_log_prob_and_not_in_the_plain_one():
    _, sampled, plain = choose(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0]), SamplingParams(temperature=0.6))
    assert sampled.item() == pytest.approx(-0.2026, abs=5e-5)
    assert plain.item() == pytest.approx(-0.4076, abs=5e-5)
    _, sampled, plain = choose(torch.tensor([[2.0, 0.0]]), torch.tensor([0.0]), SamplingParams(temperature=0.5))
    assert sampled.item() == pytest.approx(-0.018150, abs=1e-6)
    assert plain.item() == pytest.approx(-0.126928, abs=1e-6)


def test_filters_are_in_the_log_prob_and_not_in_the_plain_one():
    _, sampled, plain = choose(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0]), SamplingParams(top_k=2))
    assert sampled.item() == pytest.approx(-0.3133, abs=5e-5)
    assert plain.item() == pytest.approx(-0.4076, abs=5e-5)
    _, sampled, plain = choose(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.0]), SamplingParams(top_k=2))
    assert sampled.exp().item() == pytest.approx(0.625, abs=1e-6)
    assert plain.exp().item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.6, 2), (0.79, 2), (0.81, 3), (1e-9, 1)])
def test_top_p_keeps_the_token_that_crosses_it(top_p, kept):
    scores = filtered(torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log(), SamplingParams(top_p=top_p))
    assert torch.isfinite(scores)[0].tolist() == [kept > 2, True, kept > 1]


def test_each_filter_works_on_what_the_one_before_left():
    """After top-k 3 the first two hold 0.7 / 0.9 = 0.78, which reaches 0.75; of the whole vocabulary they hold 0.7."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    scores = filtered(logits, SamplingParams(top_k=3, top_p=0.75))
    assert torch.isfinite(scores)[0].tolist() == [True, True, False, False]


def test_tokens_as_probable_as_the_kth_are_all_kept():
    scores = filtered(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), SamplingParams(top_k=2))
    assert torch.isfinite(scores)[0].tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("u", [0.0, 1e-30, 0.999999999, LARGEST])
def test_a_token_without_probability_is_never_drawn(u, dtype):
    none = -math.inf
    rows = torch.tensor(
        [[none, none, 0.0, 1.0, none], [0.0, none, none, none, none], [none] * 4 + [-50.0]], dtype=dtype
    )
    ids, logprobs, _ = choose(rows, torch.full((3,), u, dtype=torch.float64), SamplingParams())
    assert ids[0].item() in (2, 3)
    assert ids[1:].tolist() == [0, 4]
    assert torch.isfinite(logprobs).all()


def test_the_largest_uniform_is_safe_at_the_end_of_a_long_vocabulary():
    """In fp32 the uniform itself rounds to 1 and the cumulative sum misses 1 by its rounding."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50_000, generator=draw)
    logits[:, 49_000:] = -math.inf
    ids, logprobs, _ = choose(logits, torch.full((4,), LARGEST, dtype=torch.float64), SamplingParams())
    assert (ids < 49_000).all()
    assert torch.isfinite(logprobs).all()
    ids, logprobs, _ = choose(logits, torch.full((4,), LARGEST, dtype=torch.float64), SamplingParams(top_k=7))
    assert all(int(i) in row.topk(7).indices.tolist() for i, row in zip(ids, logits, strict=True))
    assert torch.isfinite(logprobs).all()


def test_greedy_takes_the_most_probable_token():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    ids, logprobs, plain = choose(logits, torch.tensor([0.0, 0.99]), SamplingParams(temperature=0))
    assert ids.tolist() == [2, 3]
    assert logprobs.tolist() == [0.0, 0.0]
    expected = math.log(exact(LOGITS, SamplingParams())[2])
    np.testing.assert_allclose(plain.numpy(), [expected, expected], atol=1e-6)


def test_a_vanishing_temperature_is_greedy_in_the_limit():
    ids, logprobs, _ = choose(torch.tensor([LOGITS]), torch.tensor([0.7]), SamplingParams(temperature=1e-6))
    assert ids.tolist() == [2]
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_by_row(temperature):
    rows = torch.tensor([LOGITS] * 5)
    rows[1, 2], rows[3, 0], rows[4] = math.nan, math.inf, -math.inf
    rows[0, 5] = -math.inf  # one impossible token is no fault
    with pytest.raises(ValueError, match=r"not finite in rows \[1, 3, 4\]"):
        choose(rows, torch.zeros(5), SamplingParams(temperature=temperature))


def test_uniforms_depend_on_seed_key_and_number_and_on_nothing_else():
    base = uniforms(1, "key", 0, 50)
    assert (uniforms(1, "key", 0, 50) == base).all()
    assert (uniforms(1, "key", 0, 7) == base[:7]).all()  # a shorter limit draws the same tokens
    others = [
        uniforms(2, "key", 0, 50),
        uniforms(1, "kez", 0, 50),
        uniforms(1, "key", 1, 50),
        uniforms(-1, "key", 0, 50),
    ]
    assert all((other != base).all() for other in others)
    assert ((base >= 0) & (base < 1)).all()
    many = np.concatenate([uniforms(0, "key", number, 64) for number in range(64)])
    assert abs(many.mean() - 0.5) < 4 / math.sqrt(12 * len(many))  # four standard errors
