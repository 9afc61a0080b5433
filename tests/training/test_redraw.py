"""Dynamic sampling: which groups are replaced, by what, and that a run's figures and files stay whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from small import EVEN, config, run
from torch import nn

from groupline.config import ConfigError
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Reward
from groupline.training.collect import Prompted
from groupline.training.redraw import draw_groups, others

Log = list[tuple[list[str], str]]


def prompts(names: str) -> list[Prompted]:
    return [Prompted(Problem(name, name), (1,), "") for name in names]


def group(problem: Problem, live: bool) -> Group:
    def answer(reward: float) -> Rollout:
        c = Completion((1,), (2,), (0.0,), (0.0,), "stop", SamplingParams())
        return Rollout(c, "", {"judge": reward}, reward)

    return Group(problem, (answer(0.0), answer(1.0 if live else 0.0)))


def draws(live: str, log: Log, logged: Mapping[str, float] | None = None) -> Any:
    """A sampler whose groups have signal where the problem's name is among `live`."""

    def draw(asked: Sequence[Prompted], label: str) -> Any:
        log.append(([p.problem.id for p in asked], label))
        values = {name: value * len(log) for name, value in (logged or {}).items()}
        return [group(p.problem, p.problem.id in live) for p in asked], {"generate": 1.0, "reward": 0.25}, values

    return draw


def names(groups: Sequence[Group]) -> str:
    return "".join(g.problem.id for g in groups)


def more(rounds: Sequence[str]) -> Any:
    return lambda number, count: prompts(rounds[number])[:count]


def test_groups_without_signal_are_replaced_in_place() -> None:
    log: Log = []
    drawn = draw_groups(draws("aceh", log), prompts("abcd"), more(["efg", "hij"]), 2, "step 4")
    # b and d have none; round 1 draws e (signal) and f (none): e takes b's place. Round 2 draws h for d.
    assert names(drawn.groups) == "aech"
    assert names(drawn.replaced) == "bfd"
    assert log == [(list("abcd"), "step 4"), (list("ef"), "step 4 again 1"), (["h"], "step 4 again 2")]
    assert drawn.seconds == {"generate": 3.0, "reward": 0.75}


def test_no_round_more_than_is_needed_or_allowed() -> None:
    log: Log = []
    whole = draw_groups(draws("ab", log), prompts("ab"), more(["c"]), 5, "step 0")
    assert (names(whole.groups), whole.replaced, len(log)) == ("ab", [], 1)
    short = draw_groups(draws("a", log), prompts("ab"), more(["c"]), 1, "step 0")
    assert (names(short.groups), names(short.replaced)) == ("ab", "c")  # b stays: its place must be filled
    none = draw_groups(draws("", log), prompts("ab"), more([]), 0, "step 0")
    assert (names(none.groups), none.replaced) == ("ab", [])


def test_what_reward_functions_log_is_averaged_over_answers_and_timeouts_add_up() -> None:
    log: Log = []
    drawn = draw_groups(
        draws("ac", log, {"mean": 3.0, "rewards/judge/timeouts": 1.0}), prompts("abb"), more(["cc"]), 1, "step 0"
    )
    # three groups logged 3, two logged 6
    assert drawn.logged == {"mean": pytest.approx((3 * 3.0 + 2 * 6.0) / 5), "rewards/judge/timeouts": 3.0}


def test_other_prompts_depend_on_seed_step_and_round_alone() -> None:
    among = prompts("abcdefgh")
    one, two = others(among, 0, 3, 4), others(among, 0, 3, 4)
    asked = [(step, number) for step in range(4) for number in range(3)]
    found = {at: [p.problem.id for p in one(*at, 4)] for at in asked}
    assert {at: [p.problem.id for p in two(*at, 4)] for at in reversed(asked)} == found
    assert [p.problem.id for p in one(1, 1, 2)] == found[1, 1][:2]
    assert sorted(found[0, 0] + found[0, 1]) == list("abcdefgh")  # every prompt once an epoch, as in the main order
    assert found != {at: [p.problem.id for p in others(among, 1, 3, 4)(*at, 4)] for at in asked}


def hard(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards few answers, so that some groups have signal and some none."""
    return [float(ids[0] % 7 == 0) for ids in completion_ids]


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Another number for every answer."""
    return [sum((i + 1) * (place + 1) ** 2 for place, i in enumerate(ids)) / 1e4 for ids in completion_ids]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_a_run(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    settings = config(tmp_path / "run", dynamic_sampling=3, steps=3, prompts_per_step=4, num_generations=3)
    run(settings, model, tokenizer, rewards=[Reward("hard", hard)])
    metrics, drawn = rows(tmp_path / "run", "metrics.jsonl"), rows(tmp_path / "run", "rollouts.jsonl")
    assert sum(m["groups/replaced"] for m in metrics) > 0
    for m in metrics:
        own = [r for r in drawn if r["step"] == m["step"]]
        groups = [[r for r in own if r["group"] == g] for g in range(1 + max(r["group"] for r in own))]
        assert len(groups) == 4 + m["groups/replaced"]
        assert m["reward"] == pytest.approx(sum(r["reward"] for r in own) / len(own))
        assert m["num_completion_tokens"] == sum(len(r["ids"]) for r in own)
        live = [len({r["reward"] for r in g}) > 1 for g in groups]
        assert m["frac_groups_with_signal"] == pytest.approx(sum(live) / len(live))
        assert m["groups/trained_with_signal"] == pytest.approx(sum(live[:4]) / 4)
        assert not any(live[4:])  # only what has none is left out
        assert all(r["advantage"] == 0 for g in groups[4:] for r in g)
        assert all(any(r["advantage"] for r in g) == alive for g, alive in zip(groups[:4], live[:4], strict=True))


def test_where_every_group_has_signal_nothing_changes(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    plain = run(config(tmp_path / "plain"), copy.deepcopy(model), tokenizer, rewards=[Reward("spread", spread)])
    same = run(config(tmp_path / "same", dynamic_sampling=4), model, tokenizer, rewards=[Reward("spread", spread)])
    assert all(r["frac_groups_with_signal"] == 1 for r in plain["steps"])
    assert [r["reward"] for r in plain["steps"]] == [r["reward"] for r in same["steps"]]
    logged = [rows(tmp_path / name, "rollouts.jsonl") for name in ("plain", "same")]
    assert logged[0] == logged[1]


def test_a_length_punishment_beside_rewards_of_ones_own(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run(config(tmp_path / "run", overlong_buffer=4), model, tokenizer, rewards=[EVEN])
    for row in rows(tmp_path / "run", "rollouts.jsonl"):
        cost = -max(0, len(row["ids"]) - 6) / 4
        assert row["rewards"]["soft_overlong"] == cost
        assert row["reward"] == pytest.approx(row["rewards"]["even_share"] + cost)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overlong_buffer is 11; it can be no more than max_completion_length, 10"):
        config(tmp_path, overlong_buffer=11)
    with pytest.raises(ConfigError, match=r"dynamic_sampling replaces groups .*; PPO compares none"):
        config(tmp_path, objective="ppo", dynamic_sampling=1)
