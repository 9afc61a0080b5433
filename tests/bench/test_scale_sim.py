"""The event engine of the scale simulation against closed forms."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from scale_sim import Layout, Simulation, Times, best, tails, train_seconds, two

TIMES = Times(base=0.02, per_row=0.001, train_token=0.0005, judge=0.01, train=0.3, publish=0.2, prefill=0.4)


def simulate(times, layout, lengths, group=4, prompt=10.0):
    return Simulation(times, layout, lengths, group, prompt).run()


def test_one_device_is_the_sum_of_its_phases():
    lengths = [[50] * 8] * 3
    found = simulate(TIMES, Layout(1, 1, shared=True), lengths)
    sampling = 2 * 0.4 + 50 * (0.02 + 8 * 0.001)
    training = 0.3 + 0.0005 * (8 * 49 + 2 * 10)
    step = sampling + 8 * 0.01 + training + 0.2
    assert found.ends == pytest.approx([step, 2 * step, 3 * step])
    assert found.utilisation == pytest.approx((sampling + training) / step)


def test_uneven_lengths_by_hand():
    """Two rows of 10 and 30 tokens: ten steps of two rows, then twenty of one."""
    times = Times(base=1.0, per_row=0.5, train_token=0.0)
    found = simulate(times, Layout(1, 1, shared=True), [[10, 30]], group=2)
    assert found.ends == pytest.approx([10 * 2.0 + 20 * 1.5])


def test_what_finds_no_row_waits():
    times = Times(base=1.0, per_row=0.0, train_token=0.0)
    assert simulate(times, Layout(1, 1, rows=2, shared=True), [[10] * 6], group=2).ends == pytest.approx([30.0])
    assert simulate(times, Layout(3, 1, rows=2), [[10] * 6], group=2).ends == pytest.approx([10.0])


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("train", [0.5, 5.0])
def test_with_even_lengths_the_slower_side_sets_the_pace(staleness, train):
    times = Times(base=0.05, per_row=0.0, train_token=0.0, train=train)
    found = simulate(times, Layout(2, 1, staleness, rows=4), [[40] * 8] * 40)
    gaps = [b - a for a, b in zip(found.ends[10:-1], found.ends[11:], strict=True)]
    assert gaps == pytest.approx([max(40 * 0.05, train)] * len(gaps))


def test_synchronous_on_separate_devices_never_overlaps():
    times = Times(base=0.05, per_row=0.0, train_token=0.0, train=1.5, publish=0.25)
    found = simulate(times, Layout(2, 1, 0, rows=4), [[40] * 8] * 5)
    assert found.ends == pytest.approx([n * 3.75 for n in range(1, 6)])


def test_with_samplers_without_end_the_trainer_sets_the_pace():
    lengths = tails("long", 32, 30, 100, seed=0)
    times = Times(base=0.001, per_row=0.0, train_token=0.001, train=1.0)
    found = simulate(times, Layout(10_000, 2, 4, rows=1), lengths)
    trained = [train_seconds(times, 2, x, 4, 10.0) for x in lengths]
    assert found.ends[-1] - found.ends[0] == pytest.approx(sum(trained[1:]))


def test_more_devices_share_the_tokens_and_not_what_an_update_costs():
    times = Times(base=0, per_row=0, train_token=0.001, train=2.0, link=0.5)
    assert train_seconds(times, 1, [11] * 4, 4, 60) == pytest.approx(2.0 + 0.1)
    assert train_seconds(times, 10, [11] * 4, 4, 60) == pytest.approx(2.0 + 0.01 + 0.5)


def test_staleness_never_slows_and_hides_the_longer_tail():
    lengths = tails("long", 64, 30, 100, seed=1)
    times = Times(base=0.01, per_row=0.0002, train_token=0.0005, train=0.1)
    steps = [simulate(times, Layout(4, 4, k, rows=16), lengths).step for k in (0, 1, 2, 4)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.1 * steps[2]


def test_tails_have_their_mean_and_the_seed_decides():
    for kind in ("even", "mild", "long"):
        drawn = tails(kind, 4000, 1, 100, seed=3)[0]
        assert sum(drawn) / 4000 == pytest.approx(100, rel=0.05)
        assert drawn == tails(kind, 4000, 1, 100, seed=3)[0]
    assert max(tails("long", 4000, 1, 100, seed=3)[0]) > 3 * max(tails("even", 4, 1, 100, seed=3)[0])


def test_the_best_split_is_no_slower_than_any_other_tried():
    lengths = tails("mild", 64, 20, 50, seed=2)
    layout, found = best(TIMES, 8, 2, lengths, 4, 10.0, 32)
    assert layout.devices == 8
    for trainers in (3, 4, 5):
        assert found.step <= simulate(TIMES, Layout(8 - trainers, trainers, 2, 32), lengths).step + 1e-9
    assert best(TIMES, 1, 4, lengths, 4, 10.0, 32)[0].shared


def test_two_coefficients_are_found_and_none_is_negative():
    a, b = [1.0, 1, 1, 1], [2.0, 3, 5, 9]
    assert two(a, b, [3 + 0.5 * x for x in b]) == pytest.approx((3, 0.5))
    u, v = two(a, b, [10 - x for x in b])
    assert (u > 0, v) == (True, 0.0)
