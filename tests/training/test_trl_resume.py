"""resume_from_checkpoint: N steps are k steps, an end at any moment, and N - k steps, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small import rows, same, twin, weights
from test_trl_reporting import Fake
from test_trl_trainer import trainer
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from groupline.config import ConfigError
from groupline.training import trackers
from groupline.training.checkpoint import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
CLOCK = ("time", "runtime", "per_second", "memory/")
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1.5, "logging_steps": 3}


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def history(run: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not any(c in k for c in CLOCK)} for row in run.state.log_history]


def answers(folder: Path) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for run in sorted((folder / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        own: dict[int, list[Any]] = {}
        for row in rows(run / "rollouts.jsonl"):
            own.setdefault(row["step"], []).append(row)
        found |= own
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1, "num_iterations": 2, "max_steps": 8, "sync_ref_model": True, "ref_model_sync_steps": 3},
        {"adapter": True, "beta": 0.1, "lr_scheduler_type": "cosine"},
    ],
    ids=["plain", "two updates a rollout, a synced reference", "an adapter with dropout"],
)
@pytest.mark.parametrize("killed", [3, 4])
def test_the_law(changes: dict[str, Any], killed: int, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """9 prompts, 2 a rollout, over the border of an epoch; with an evaluation now and then."""
    changes = SAVING | changes | {"eval_strategy": "steps", "eval_steps": 2}
    adapter = changes.pop("adapter", False)

    def make(folder: str, callbacks: Any = None) -> Any:
        made = twin(first)
        if adapter:
            torch.manual_seed(1)
            made = get_peft_model(made, LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear"))  # type: ignore
        return trainer(tmp_path / folder, made, tokenizer, callbacks=callbacks, **changes)

    whole = make("whole")
    whole.train()
    stopped = make("two", [Kill(killed)])
    with pytest.raises(Killed):
        stopped.train()
    resumed = make("two")
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == whole.state.global_step > killed
    assert same(weights(resumed.model), weights(whole.model))
    assert history(resumed) == history(whole)
    assert answers(tmp_path / "two") == answers(tmp_path / "whole")
    assert [p.name for p in checkpoints(tmp_path / "two")] == [p.name for p in checkpoints(tmp_path / "whole")]


def test_a_checkpoint_is_hugging_faces_folder_too(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run = trainer(tmp_path, model, tokenizer, **SAVING | {"save_steps": 6})
    run.train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert same(weights(loaded), weights(run.model))
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["global_step"], state["log_history"]) == (6, run.state.log_history[:-1])


def test_a_named_one_and_the_newest_whole_one(tmp_path: Path, first: nn.Module, tokenizer: Any, capsys: Any) -> None:
    run = trainer(tmp_path, twin(first), tokenizer, **SAVING)
    run.train()
    (inner,) = checkpoints(tmp_path / "checkpoint-6")
    (inner / "weights.safetensors").write_bytes(b"torn")
    again = trainer(tmp_path, twin(first), tokenizer, **SAVING)
    again.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out
    assert f"passing over {tmp_path / 'checkpoint-6'}: weights.safetensors has 4 bytes" in said
    assert "after step 4 of 6" in said
    assert same(weights(again.model), weights(run.model))
    named = trainer(tmp_path, twin(first), tokenizer, **SAVING)
    named.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(named.model), weights(run.model))
    assert history(named) == history(run)


def test_trackers_go_on_with_the_same_run(
    tmp_path: Path, first: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(Fake):
        def start(self, run: Any) -> None:
            super().start(run)
            self.known = run.kept("wandb")
            run.keep("wandb", "the-first")

    Fake.made = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Known)
    changes = SAVING | {"report_to": "wandb", "logging_steps": 1}
    with pytest.raises(Killed):
        trainer(tmp_path, twin(first), tokenizer, callbacks=[Kill(4)], **changes | {"save_steps": 3}).train()
    trainer(tmp_path, twin(first), tokenizer, **changes | {"save_steps": 3}).train(resume_from_checkpoint=True)
    one, two = Fake.made
    assert (one.known, two.known) == (None, "the-first")  # type: ignore[attr-defined]
    assert [s for s, _ in one.told] == [1, 2, 3, 4]
    assert [s for s, _ in two.told] == [4, 5, 6, 6]


def test_the_limit_spares_the_newest_that_can_be_resumed(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Step 3 is within a rollout of two updates: its checkpoint holds the model alone."""
    changes = SAVING | {"save_steps": 1, "save_total_limit": 1, "num_iterations": 2, "max_steps": 3}
    trainer(tmp_path, model, tokenizer, **changes).train()
    assert [(p.name, len(checkpoints(p))) for p in checkpoints(tmp_path)] == [("checkpoint-2", 1), ("checkpoint-3", 0)]


@pytest.mark.parametrize(
    ("changes", "asked", "told"),
    [
        ({}, "nowhere", "there is no folder"),
        ({"epsilon": 0.3}, True, "epsilon was 0.2 and is 0.3 now"),
        ({"learning_rate": 1e-3}, True, "resume: learning_rate was 0.01 and is 0.001 now"),
        ({"save_only_model": True}, "checkpoint-3", "checkpoint-3 holds the model alone: it was saved with save_only_model"),
    ],
)  # fmt: skip
def test_what_is_not_gone_on_with(
    changes: dict[str, Any], asked: Any, told: str, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    given = SAVING | {"save_steps": 3, "max_steps": 3}
    only = {"save_only_model": changes.get("save_only_model", False)}
    trainer(tmp_path, twin(first), tokenizer, **given | only).train()
    with pytest.raises(ConfigError, match="resume") as caught:
        trainer(tmp_path, twin(first), tokenizer, **given | changes).train(
            resume_from_checkpoint=asked if asked is True else tmp_path / asked
        )
    assert told in str(caught.value)


def test_nothing_to_go_on_from(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"holds no checkpoint to go on from$"):
        trainer(tmp_path, model, tokenizer).train(resume_from_checkpoint=True)
