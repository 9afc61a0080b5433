"""Answers drawn ahead of their step: which weights draw what, how they are weighed, what a run refuses and survives."""

from __future__ import annotations

import json
import math
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, fake_vllm
from small import EVEN, config, even_share, rows, run, same, sums, twin, untimed, weights
from torch import nn

from groupline.batch import Batch
from groupline.config import Config, ConfigError
from groupline.models.load import load_model
from groupline.parallel.mesh import World
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Reward, RewardError
from groupline.sampling import SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.training import ahead as ahead_module
from groupline.training import grpo
from groupline.training.ahead import Ahead, StaleGroups, waiting_of
from groupline.training.collect import Prompted
from groupline.training.hooks import Hooks
from groupline.training.ppo import PpoConfig, ppo_objective
from groupline.training.redraw import Drawn
from groupline.training.setup import Setup, prepare
from groupline.training.sharing import share_model

PROMPTED = [Prompted(Problem(f"p{i}", f"{i}+1="), (i + 1,), "") for i in range(3)]


def told(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run's rows without what a clock measured."""
    return untimed(folder / "metrics.jsonl"), rows(folder / "rollouts.jsonl")


class NoSampler:
    """A sampler that only has a version."""

    def __init__(self) -> None:
        self.version, self.closed = 0, False

    def close(self) -> None:
        self.closed = True


def drawing(sampler: NoSampler, log: list[int]) -> Any:
    """Draws one group of two answers, each with the sampler's version."""

    def draw(step: int) -> Drawn:
        log.append(step)
        c = Completion((1,), (2, 3), (-0.1, -1 / 3), (-0.2, -0.7), "stop", SamplingParams(), sampler.version)
        answers = tuple(Rollout(replace(c, ids=(step, i)), "", {"judge": 0.1 * i}, 0.1 * i) for i in range(2))
        group = Group(PROMPTED[step % 3].problem, answers)
        return Drawn([group], [group] if step == 2 else [], {"generate": 0.5, "reward": 0.1}, {"seen": 1 / 3})

    return draw


@pytest.mark.parametrize(
    ("k", "orders"), [(0, [[0], [1], [2], [3]]), (1, [[0, 1], [2], [3], []]), (2, [[0, 1, 2], [3], [], []])]
)
def test_what_each_step_draws(k: int, orders: list[list[int]]) -> None:
    sampler, log = NoSampler(), []  # type: NoSampler, list[int]
    queue = Ahead(drawing(sampler, log), sampler, k, 4)  # type: ignore[arg-type]
    for step, order in enumerate(orders):
        sampler.version = step
        [group] = queue.take(step).groups
        assert log == order
        log.clear()
        assert group.rollouts[0].completion.policy_version == max(0, step - k)
        queue.settle()
        assert len(queue.to_json(PROMPTED)) <= k
    queue.close()
    assert sampler.closed


def test_what_waits_goes_through_json_and_is_not_drawn_again() -> None:
    sampler, log = NoSampler(), []  # type: NoSampler, list[int]
    whole = Ahead(drawing(sampler, log), sampler, 2, 9)  # type: ignore[arg-type]
    whole.take(0)
    kept = json.loads(json.dumps(whole.to_json(PROMPTED)))
    assert [row["step"] for row in kept] == [1, 2]
    again = Ahead(drawing(sampler, log), sampler, 2, 9, waiting_of(kept, PROMPTED))  # type: ignore[arg-type]
    log.clear()
    for step in (1, 2, 3):
        sampler.version = step
        assert again.take(step) == whole.take(step)
    assert log == [3, 3, 4, 4, 5, 5]


def test_answers_that_are_too_old_are_an_error() -> None:
    sampler = NoSampler()
    queue = Ahead(drawing(sampler, []), sampler, 1, 9)  # type: ignore[arg-type]
    queue.take(0)
    sampler.version = 1
    queue.take(1)
    sampler.version = 0  # weights that were never handed over
    queue.take(2)
    with pytest.raises(StaleGroups, match="step 4 trains weights of version 3, and answer 0 to problem 'p0' was drawn "
                                          "from version 0; staleness 1 allows 2 or newer"):  # fmt: skip
        queue.take(3)


class InTurn:
    """In place of `Ahead`: draws and trains in turn, and knows nothing else."""

    def __init__(self, draw: Any, sampler: Any, *_: Any) -> None:
        self.take, self.close = draw, sampler.close

    def settle(self) -> None:
        pass

    def to_json(self, prompted: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("changes", [{"dynamic_sampling": 1, "num_iterations": 2}, {"lora_r": 2, "lora_dropout": 0.2}])
def test_without_staleness_it_is_the_run_in_turn(
    changes: dict[str, Any], tmp_path: Path, first: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"steps": 4, "learning_rate": 1e-2, "eval_every": 2, "eval_samples": 2} | changes
    one, other, held = twin(first), twin(first), sums(16)[12:]
    run(config(tmp_path / "queue", staleness=0, **changes), one, tokenizer, held_out=held)
    monkeypatch.setattr(grpo, "Ahead", InTurn)
    run(config(tmp_path / "turn", **changes), other, tokenizer, held_out=held)
    assert same(weights(one), weights(other))
    assert told(tmp_path / "queue") == told(tmp_path / "turn")
    assert not [key for row in rows(tmp_path / "queue" / "metrics.jsonl") for key in row if "staleness" in key]


@pytest.mark.parametrize("k", [1, 2])
def test_versions_and_weights_of_a_run(k: int, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    cap, steps = 1.2, 5
    settings = config(
        tmp_path / "run", staleness=k, steps=steps, learning_rate=1e-2, log_tokens=3, save_steps=3,
        sampler_correction_cap=cap,
    )  # fmt: skip
    run(settings, model, tokenizer)
    metrics, answers = told(tmp_path / "run")
    met = []
    for step in range(steps):
        own, row = [r for r in answers if r["step"] == step + 1], metrics[step]
        version = max(0, step - k)
        assert [r["policy_version"] for r in own] == [version] * 12
        assert row["sampling/staleness/mean"] == row["sampling/staleness/max"] == step - version
        # By hand from the logged log-probs, which have five decimals: exp(trainer - sampler), held at the cap.
        pairs = [
            p for r in own if r["tokens"]["trained"] for p in zip(r["tokens"]["logprobs"], r["logprobs"], strict=True)
        ]
        by_hand = [min(math.exp(t - s) if abs(t - s) > 1e-3 else 1.0, cap) for t, s in pairs]
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(statistics.fmean(by_hand), rel=1e-4)
        assert row["sampling/importance_sampling_ratio/min"] == pytest.approx(min(by_hand), rel=1e-4)
        assert row["sampling/importance_sampling_ratio/max"] == pytest.approx(max(by_hand), rel=1e-4)
        share = sum(by_hand) ** 2 / sum(w * w for w in by_hand) / len(by_hand)
        assert row["sampling/effective_sample_share"] == pytest.approx(share, rel=1e-4)
        assert (
            row["ratio/max"] == row["ratio/min"] == 1
        )  # the proximal policy is the trainer's own at the update's start
        met.append(max(by_hand) > 1.19)
    assert met == [False] + [True] * (steps - 1)  # the first step's answers are fresh; later weights meet the cap
    kept = json.loads((tmp_path / "run" / "checkpoint-3" / "state.json").read_text("utf-8"))["ahead"]
    assert [row["step"] for row in kept] == list(range(3, min(3 + k, steps)))


class Forgetful:
    """An engine that is never handed new weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def load_weights(self, policy: nn.Module, version: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def prepared(settings: Config, model: nn.Module, tokenizer: Any, **given: Any) -> Setup:
    given = {"rewards": [EVEN], "problems": sums(12), "held_out": [], **given}
    return prepare(settings, lambda line: None, model=model, tokenizer=tokenizer, **given)


@pytest.mark.parametrize("k", [0, 1])
def test_a_run_never_trains_on_older_answers_in_silence(
    k: int, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    setup = prepared(config(tmp_path / "run", steps=4, staleness=k), model, tokenizer)
    setup.engine = Forgetful(setup.engine)  # type: ignore[assignment]
    with pytest.raises(StaleGroups, match=f"step {k + 2} trains weights of version {k + 1}, .* from version 0"):
        grpo.run(setup.config, setup, lambda line: None)
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == k + 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampler_correction": "off"}, "staleness is 1, and nothing corrects for the older weights"),
        ({"top_p": 0.9}, "staleness is 1, and nothing corrects.* no top_p"),
        ({"old_logprobs": "sampler"}, "staleness is 1, and nothing corrects.* old_logprobs: recompute"),
        ({"objective": "rloo", "beta": 0.1}, "objective rloo takes its KL from the sampler's log-probs"),
        ({"sampler": "vllm"}, "reward 'here' has main_thread"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], named: str, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    rewards = [Reward("here", even_share, main_thread=True)]
    with pytest.raises(ConfigError, match=named):
        prepared(config(tmp_path / "run", staleness=1, **changes), model, tokenizer, rewards=rewards)
    prepared(config(tmp_path / "run", **changes), model, tokenizer, rewards=rewards)  # without staleness it is not


def test_ppo_and_several_processes_are_refused(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    ppo = PpoConfig(output_dir=str(tmp_path / "run"), staleness=2, eval_problems=0)
    with pytest.raises(ConfigError, match="staleness is 2, and PPO draws and trains in turn"):
        prepared(ppo, model, tokenizer, objective=ppo_objective(ppo))
    setup, world = prepared(config(tmp_path / "run", staleness=1), model, tokenizer), World()
    world.size = 2
    with pytest.raises(ConfigError, match="staleness is 1, and several processes train"):
        share_model(setup, world)


def test_the_plan_says_what_it_means(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    plan = prepared(config(tmp_path / "run", staleness=2), model, tokenizer).plan
    assert (
        "weights up to 2 steps old (the engine draws and trains in turn, so this saves no time; token_truncate" in plan
    )
    assert " old (" not in prepared(config(tmp_path / "run"), model, tokenizer).plan
    served = prepared(config(tmp_path / "run", staleness=1, sampler="vllm"), twin(model), tokenizer)
    assert "up to 1 step old (drawn in a thread while the trainer works" in served.plan
    assert isinstance(served.engine, VllmSampler)
    assert served.engine.options.restarts == 0


# Over a server, in a thread.


@pytest.fixture
def server(start: Path) -> Iterator[FakeVllm]:
    with fake_vllm(start) as fake:
        yield fake


def served(server: FakeVllm, folder: Path, **changes: Any) -> Config:
    asked = {"sampler": "vllm", "vllm_url": server.url, "vllm_timeout": 20.0, "staleness": 1, "steps": 4} | changes
    return config(folder, learning_rate=1e-2, **asked)


class Watch(Hooks):
    """Notes in which order the first step is trained and the second drawn; each waits for the other to have begun."""

    def __init__(self, interrupt: bool = False) -> None:
        self.order: list[str] = []
        self.begun, self.trained, self.interrupt = threading.Event(), threading.Event(), interrupt

    def reward(self) -> Reward:
        def judge(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
            if trainer_state.global_step == 1 and not self.begun.is_set():
                self.order.append("drawing step 2")
                self.begun.set()
                assert self.trained.wait(30)
                self.order.append("drawn step 2")
            return even_share(completion_ids)

        return Reward("judge", judge)

    def rollout_end(self, groups: Sequence[Group], batch: Batch) -> None:
        assert self.begun.wait(30)

    def update_end(self, metrics: Mapping[str, float]) -> None:
        if not self.trained.is_set():
            self.order.append("trained step 1")
            self.trained.set()
            if self.interrupt:
                raise KeyboardInterrupt


def test_a_server_draws_while_the_trainer_works(
    server: FakeVllm, tmp_path: Path, first: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, one, other = Watch(), twin(first), twin(first)
    setup = prepared(served(server, tmp_path / "beside"), one, tokenizer, rewards=[watch.reward()])
    grpo.run(setup.config, setup, lambda line: None, watch)
    assert watch.order == ["drawing step 2", "trained step 1", "drawn step 2"]
    assert [r["policy_version"] for r in rows(tmp_path / "beside" / "rollouts.jsonl")] == [0] * 24 + [1] * 12 + [2] * 12
    assert server.version == "4"
    monkeypatch.setattr(ahead_module, "Elsewhere", type(None))  # the same in turn: nothing depends on who is faster
    run(served(server, tmp_path / "turn"), other, tokenizer, rewards=[Reward("judge", even_share)])
    assert same(weights(one), weights(other))
    assert told(tmp_path / "beside") == told(tmp_path / "turn")


def test_an_error_in_the_drawing_thread_is_the_runs(
    server: FakeVllm, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    def judge(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise ZeroDivisionError("no answer is judged twice")
        return even_share(completion_ids)

    with pytest.raises(
        RewardError, match=r"reward function 'judge' raised ZeroDivisionError .*no answer is judged twice"
    ):
        run(served(server, tmp_path / "run"), model, tokenizer, rewards=[Reward("judge", judge)])
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 1  # while the second step was trained
    assert "groupline-drawing_0" not in [t.name for t in threading.enumerate()]


def test_ctrl_c_while_a_draw_runs_ends_the_run_whole(
    server: FakeVllm, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    watch = Watch(interrupt=True)
    setup = prepared(served(server, tmp_path / "run", staleness=2), model, tokenizer, rewards=[watch.reward()])
    results = grpo.run(setup.config, setup, lambda line: None, watch)
    assert results["interrupted"]
    assert watch.order[:2] == ["drawing step 2", "trained step 1"]
    loaded = load_model(str(tmp_path / "run" / "model"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert json.loads((tmp_path / "run" / "results.json").read_text("utf-8"))["interrupted"]
    assert "groupline-drawing_0" not in [t.name for t in threading.enumerate()]


def test_a_resumed_run_over_a_server(server: FakeVllm, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    class Stopped(Exception):
        pass

    def stop(line: str) -> None:
        if line.startswith("step 3/"):
            raise Stopped

    changes = {"save_steps": 2, "eval_every": 2, "eval_samples": 2}
    whole, again, held = twin(first), twin(first), sums(14)[12:]
    run(served(server, tmp_path / "whole", **changes), whole, tokenizer, held_out=held)
    with pytest.raises(Stopped):
        run(served(server, tmp_path / "two", **changes), twin(first), tokenizer, say=stop, held_out=held)
    run(served(server, tmp_path / "two", resume=True, **changes), again, tokenizer, held_out=held)
    assert same(weights(again), weights(whole))
    assert told(tmp_path / "two") == told(tmp_path / "whole")
    assert rows(tmp_path / "two" / "held_out.jsonl") == rows(tmp_path / "whole" / "held_out.jsonl")


def test_a_server_that_dies_while_it_draws_ahead(
    server: FakeVllm, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    server.die_after = 6  # requests: the probe, the three of step 1, two of those drawn ahead
    settings = served(server, tmp_path / "run")
    with pytest.raises(SamplerError, match="the server at vllm_url is gone"):
        run(settings, model, tokenizer)
    assert not (tmp_path / "run" / "results.json").exists()
