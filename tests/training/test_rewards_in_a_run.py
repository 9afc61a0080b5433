"""What a run does with what reward functions record, and what it tells them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from small import config, rows, run, sums, twin
from torch import nn

from groupline.rewards import Reward, RewardError

STATES: list[tuple[int, int, float]] = []


def recording(completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
    STATES.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
    shares = [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
    log_extra("odd", [sum(i % 2 for i in ids) for ids in completion_ids])
    log_metric("longest", max(map(len, completion_ids)))
    log_metric("accuracy", 0.75)  # a name of groupline's own
    return shares


def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "gold": ground_truth}


def test_records_land_in_the_runs_files(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    STATES.clear()
    said: list[str] = []
    judges = [
        Reward("recording", recording),
        Reward("compute_score", compute_score, 0.5, timeout=60, on_timeout="none"),
    ]
    run(config(tmp_path / "run"), model, tokenizer, rewards=judges, say=said.append)
    assert STATES == [(0, 2, 0.0), (1, 2, 3 / 12)]  # 3 of 12 prompts a step
    answers = rows(tmp_path / "run" / "rollouts.jsonl")
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    for answer in answers:
        assert answer["extras"] == {"odd": sum(i % 2 for i in answer["ids"]), "gold": answer["gold"]}
    for number, row in enumerate(metrics, 1):
        own = [a for a in answers if a["step"] == number]
        assert row["longest"] == max(len(a["ids"]) for a in own)
        assert row["log_metric/accuracy"] == 0.75
        assert row["accuracy"] == sum(a["rewards"]["recording"] >= 1 for a in own) / len(own)
        assert row["rewards/compute_score/timeouts"] == 0
    assert sum(text.count("'compute_score' is called once for each answer") for text in said) == 1


def test_held_out_answers_are_recorded_too(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    settings = config(tmp_path, steps=1, eval_samples=2)
    results = run(settings, model, tokenizer, rewards=[Reward("recording", recording)], held_out=sums(3))
    answers = [a for a in rows(tmp_path / "held_out.jsonl") if a["step"] == 1]
    assert [a["extras"]["odd"] for a in answers] == [sum(i % 2 for i in a["ids"]) for a in answers]
    longest = max(len(a["ids"]) for a in answers)
    assert results["held_out"]["after"]["logged"] == {"longest": longest, "accuracy": 0.75}


def test_what_could_not_be_called_is_refused_before_the_run(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    def needs_more(solution_str: str, ground_truth: str, tokenizer: Any) -> float:
        return 0.0

    with pytest.raises(RewardError, match="'needs_more' judges one answer and needs tokenizer"):
        run(config(tmp_path / "run"), model, tokenizer, rewards=[Reward("needs_more", needs_more)])
    with pytest.raises(RewardError, match="reward names must differ; they are x, x"):
        run(config(tmp_path / "run"), model, tokenizer, rewards=[Reward("x", recording), Reward("x", recording)])
    assert not (tmp_path / "run").exists()


def test_group_by_group_and_whole_give_the_same_run(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """The rewards of the even tokens' share do not depend on the other rows, so nothing may."""
    found = []
    for by_group in (False, True):
        calls: list[int] = []

        def share(completion_ids: Any, answer: Any, calls: list[int] = calls, **columns: Any) -> list[float]:
            calls.append(len(set(answer)))
            assert len(completion_ids) == 4 * len(set(answer))
            return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

        folder = tmp_path / str(by_group)
        run(config(folder), twin(model), tokenizer, rewards=[Reward("share", share, by_group=by_group)])
        assert calls == ([1] * 6 if by_group else [3] * 2)  # problems in each call
        found.append(rows(folder / "rollouts.jsonl"))
    assert found[0] == found[1]


def test_groups_are_judged_while_others_are_decoded(
    tmp_path: Path, model: nn.Module, tokenizer: Any, monkeypatch: Any
) -> None:
    from groupline.sampling import Engine

    judged, decoding = threading.Event(), []
    generate = Engine.generate

    def watched(self: Engine, *args: Any, on_group: Any = None, **settings: Any) -> Any:
        assert on_group is not None

        def then(prompt: int, own: Any) -> None:
            on_group(prompt, own)
            decoding.append(judged.wait(20))  # the judge answers while `generate` has not returned

        return generate(self, *args, on_group=then, **settings)

    def share(completion_ids: Any, **columns: Any) -> list[float]:
        judged.set()
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setattr(Engine, "generate", watched)
    run(config(tmp_path, steps=1), model, tokenizer, rewards=[Reward("share", share, by_group=True)])
    assert decoding == [True] * 3
