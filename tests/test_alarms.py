"""Alarms: for each rule a run that raises it and one, close to it, that must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from groupline.alarms import RULES, Alarm, Watch, verdict
from groupline.alarms.watch import COOL_DOWN

Rows = list[dict[str, Any]]


def run(steps: int = 40, **columns: Any) -> Rows:
    """Healthy figures, each column replaced by a number or a function of the step (from 0)."""
    healthy: dict[str, Any] = {
        "loss": 0.0,
        "reward": lambda i: 0.4 + 0.01 * i,
        "reward_std": 0.4,
        "accuracy": lambda i: 0.4 + 0.01 * i,
        "frac_reward_zero_std": 0.2,
        "groups/all_right": 0.1,
        "groups/all_wrong": 0.1,
        "completions/clipped_ratio": 0.02,
        "completions/mean_length": lambda i: 40 + 0.5 * i,
        "completions/repetition": 0.0,
        "clip_ratio/region_mean": 0.01,
        "sampling/sampling_logp_difference/mean": 1e-4,
        "entropy": lambda i: 0.5 - 0.01 * i,
        "kl": 0.01,
        "skipped_steps": 0.0,
        "rewards/right/mean": lambda i: 0.4 + 0.01 * i,
        "rewards/form/mean": 1.0,
    }
    columns = {k.replace("__", "/"): v for k, v in columns.items()}
    made = []
    for i in range(steps):
        row = {k: v(i) if callable(v) else v for k, v in (healthy | columns).items()}
        made.append({k: v for k, v in row.items() if v is not ...} | {"step": i + 1})
    return made


def raised(rows: Rows, held_out: list[tuple[int, float]] | None = None, cap: int = 100) -> dict[str, str]:
    """Each alarm's name and the worst level it came at."""
    watch = Watch(cap)
    found: dict[str, str] = {}
    for alarm in watch.replay(rows, held_out or [(0, 0.4), (40, 0.7)]):
        found[alarm.name] = "broken" if "broken" in (alarm.level, found.get(alarm.name)) else "watch"
    return found


def ramp(start: float, stop: float, steps: int = 40) -> Callable[[int], float]:
    return lambda i: start + (stop - start) * i / (steps - 1)


def test_a_healthy_run_raises_nothing() -> None:
    assert raised(run()) == {}
    assert verdict([]) == "healthy"


CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("loss not finite", "broken", {"loss": lambda i: math.nan if i == 30 else 0.0}, {"loss": 1e9}),
    ("loss not finite", "broken", {"loss": lambda i: None if i == 30 else 0.0}, {"loss": ...}),  # as JSON holds NaN
    ("updates skipped", "watch", {"skipped_steps": lambda i: i / 1.5}, {"skipped_steps": lambda i: min(i, 4)}),
    ("reward flat at zero", "broken",
     {"reward": 0.0, "reward_std": 0.0, "accuracy": 0.0, "rewards__right__mean": 0.0},
     {"reward": lambda i: 0.01 if i % 4 == 0 else 0.0, "reward_std": 0.0, "accuracy": 0.0, "rewards__right__mean": 0.0}),
    ("groups too easy", "watch", {"frac_reward_zero_std": 0.9, "groups__all_right": 0.8}, {"frac_reward_zero_std": 0.8}),
    ("groups too hard", "watch", {"frac_reward_zero_std": 0.9, "groups__all_wrong": 0.85},
     {"frac_reward_zero_std": 0.75, "groups__all_wrong": 0.75}),
    ("groups too hard", "broken", {"frac_reward_zero_std": 1.0, "groups__all_wrong": 1.0},
     {"frac_reward_zero_std": lambda i: 1.0 if i < 9 else 0.1}),  # warm-up
    ("answers cut off", "watch", {"completions__clipped_ratio": 0.4}, {"completions__clipped_ratio": 0.3}),
    ("answers cut off", "broken", {"completions__clipped_ratio": 0.9},
     {"completions__clipped_ratio": lambda i: 1.0 if i == 20 else 0.0}),  # one step is no trend
    ("ratios clipped", "watch", {"clip_ratio__region_mean": 0.31}, {"clip_ratio__region_mean": 0.29}),
    ("sampler and trainer differ", "watch", {"sampling__sampling_logp_difference__mean": 0.06},
     {"sampling__sampling_logp_difference__mean": 0.04}),
    ("sampler and trainer differ", "broken", {"sampling__sampling_logp_difference__mean": 0.4}, {}),
    ("KL jumped", "watch", {"kl": lambda i: 0.5 if i == 25 else 0.01}, {"kl": lambda i: 0.01 * 1.1**i}),
    ("KL jumped", "broken", {"kl": lambda i: 2.0 if i == 25 else 0.01}, {"kl": lambda i: 0.09 if i == 25 else 0.001}),
    ("entropy collapsed", "watch", {"entropy": ramp(0.5, 0.001), "reward": 0.4, "accuracy": 0.4, "rewards__right__mean": 0.4},
     {"entropy": ramp(0.5, 0.001)}),  # the reward rises: it has become sure of what is right
    ("one reward explains the gain", "watch",
     {"reward": ramp(0.4, 1.0), "accuracy": 0.3, "rewards__right__mean": 0.3, "rewards__form__mean": ramp(0.1, 0.7)},
     {"reward": ramp(0.4, 1.0), "accuracy": ramp(0.3, 0.5), "rewards__form__mean": ramp(0.1, 0.7)}),
    ("form gained, accuracy lost", "watch",
     {"rewards__form__mean": ramp(0.5, 1.2), "accuracy": ramp(0.7, 0.3)},
     {"rewards__form__mean": 1.0, "accuracy": ramp(0.7, 0.3)}),  # it was there from the start
    ("length runs to the limit", "watch", {"completions__mean_length": ramp(40, 99)}, {"completions__mean_length": 95.0}),
    ("answers repeat themselves", "watch", {"completions__repetition": 0.3}, {"completions__repetition": 0.15}),
    ("answers repeat themselves", "broken", {"completions__repetition": 0.7}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "bad", "good"), CASES, ids=[f"{n} {lv}" for n, lv, _, _ in CASES])
def test_each_rule_raises_its_alarm_and_not_without_cause(
    name: str, level: str, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    assert raised(run(**bad)).get(name) == level
    assert name not in raised(run(**good))


def test_reward_that_rises_while_held_out_accuracy_does_not() -> None:
    name = "reward rises, held-out accuracy does not"
    assert raised(run(), [(0, 0.40), (40, 0.40)])[name] == "watch"
    assert raised(run(), [(0, 0.40), (40, 0.30)])[name] == "broken"
    assert name not in raised(run(), [(0, 0.40), (40, 0.45)])
    assert name not in raised(run(), [(0, 0.40)])  # nothing to compare
    flat = run(reward=0.4, accuracy=0.4, rewards__right__mean=0.4)
    assert name not in raised(flat, [(0, 0.40), (40, 0.38)])


def test_every_rule_is_tested() -> None:
    tested = {name for name, *_ in CASES} | {"reward rises, held-out accuracy does not"}
    assert tested == {rule.name for rule in RULES}


def test_an_alarm_waits_until_it_has_cooled_down_unless_it_gets_worse() -> None:
    rows = run(60, completions__clipped_ratio=0.5)
    steps = [a.step for a in Watch().replay(rows)]
    assert steps == [5, 5 + COOL_DOWN, 5 + 2 * COOL_DOWN]
    worse = run(12, completions__clipped_ratio=lambda i: 0.5 if i < 7 else 1.0)
    levels = [(a.step, a.level) for a in Watch().replay(worse)]
    assert levels == [(5, "watch"), (11, "broken")]  # (0.5 + 4 x 1.0) / 5 = 0.9 is the first mean above 0.8


def test_a_part_is_judged_with_its_weight() -> None:
    rows = run(
        reward=ramp(0.4, 1.0), accuracy=0.3, rewards__right__mean=0.3,
        rewards__form__mean=ramp(0.1, 0.7), rewards__other__mean=ramp(0.0, 1.0),
    )  # fmt: skip
    alone = Watch(weights={"form": 0.2, "other": 0.45}).replay(rows)
    assert [a.name for a in alone] == []  # 20% and 75% of the rise: neither above 80%
    assert [a.name for a in Watch(weights={"form": 1.0, "other": 0.0}).replay(rows)] == ["one reward explains the gain"]


def test_trl_logs_without_a_split_of_dead_groups() -> None:
    rows = run(frac_reward_zero_std=0.9, groups__all_right=..., groups__all_wrong=...)
    assert raised(rows) == {"groups too hard": "watch"}


def test_what_is_read_back_is_what_was_followed() -> None:
    """An evaluation comes after its step's row, in a run and in its files."""
    rows, held_out = run(), [(0, 0.4), (20, 0.4), (40, 0.3)]
    live = Watch(100)
    live.held_out(0, 0.4)
    for row in rows:
        live.step(row)
        for step, value in held_out[1:]:
            if step == row["step"]:
                live.held_out(step, value)
    assert live.raised == Watch(100).replay(rows, held_out)
    assert {a.level for a in live.raised} == {"watch", "broken"}


def test_words_and_json() -> None:
    alarm = Alarm("too loud", "watch", 7, "90 dB", "Turn it down.")
    assert str(alarm) == "watch at step 7: too loud: 90 dB. Turn it down."
    assert alarm.to_json() == {
        "step": 7, "level": "watch", "name": "too loud", "evidence": "90 dB", "advice": "Turn it down."
    }  # fmt: skip
    assert verdict([alarm]) == "watch"
    assert verdict([alarm, Alarm("", "broken", 1, "", "")]) == "broken"
