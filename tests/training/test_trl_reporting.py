"""report_to, run_name and project of a TRL script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_trl_trainer import trainer
from torch import nn

from groupline.config import ConfigError
from groupline.training import trackers
from groupline.training.sinks import RunInfo
from groupline.trl import GRPOConfig
from groupline.trl.reporting import renamed

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


class Fake:
    """In the place of Weights & Biases."""

    made: list[Fake]

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.runs: list[RunInfo] = []
        self.ends: list[str] = []
        Fake.made.append(self)

    def start(self, run: RunInfo) -> None:
        self.runs.append(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, dict(metrics)))

    def finish(self, status: str, results: Mapping[str, float]) -> None:
        self.ends.append(status)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.made = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Fake)
    return Fake


def test_trackers_are_told_the_log_history(tmp_path: Path, model: nn.Module, tokenizer: Any, fake: Any) -> None:
    """Every row under Hugging Face's names, also an evaluation before training and one after it."""
    run = trainer(
        tmp_path / "my-run", model, tokenizer, report_to=["wandb"], logging_steps=2, eval_strategy="steps", eval_steps=2,
        eval_on_start=True, project="mine",
    )  # fmt: skip
    run.evaluate()
    run.train()
    run.evaluate()
    (sink,) = fake.made
    assert sink.ends == []
    wanted = [
        (row["step"], {renamed(k): float(v) for k, v in row.items() if k != "step" and type(v) in (int, float)})
        for row in run.state.log_history
    ]
    assert sink.told == wanted
    steps = [step for step, _ in sink.told]
    assert steps == sorted(steps)
    assert {"train/reward", "train/loss", "train/train_runtime", "eval/reward"} <= {k for _, m in wanted for k in m}
    (info,) = sink.runs
    assert (info.name, info.project, info.fallback_project) == ("my-run", "mine", "huggingface")
    assert info.settings["logging_steps"] == 2
    run.train()
    assert (sink.ends, len(sink.runs)) == (["finished"], 2)
    assert run._events.reporting.close() is None
    assert sink.ends == ["finished", "finished"]


def test_a_real_tracker(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trainer(tmp_path, model, tokenizer, report_to="tensorboard", max_steps=2)
    run.train()
    (folder,) = (tmp_path / "runs").iterdir()
    found = events.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    logged = {row["step"]: row["reward"] for row in run.state.log_history if "reward" in row}
    assert {e.step: e.value for e in found.Scalars("train/reward")} == pytest.approx(logged, abs=1e-6)
    assert json.loads((folder / "results.json").read_text())["sinks"]["tensorboard"]["lost"] == 0


def test_a_failed_run_is_reported_as_failed(tmp_path: Path, model: nn.Module, tokenizer: Any, fake: Any) -> None:
    run = trainer(tmp_path, model, tokenizer, report_to="wandb")
    run._setup.rewards[0] = run._setup.rewards[0].__class__("bad", lambda completions, **_: [None] * 3)
    with pytest.raises(ValueError):
        run.train()
    assert fake.made[0].ends == ["failed"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"report_to": "wandbb"}, "report_to: there is no tracker 'wandbb'; the nearest is 'wandb'"),
        ({"report_to": ["comet_ml", "wandb"]}, "report_to: there is no tracker 'comet_ml'"),
        ({"trackio_space_id": "me/space"}, "trackio_space_id='me/space' is not taken here: set the variable TRACKIO_SPACE_ID"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**changes)
    assert told in str(caught.value)


@pytest.mark.parametrize("value", ["none", None, [], ["none"]])
def test_none_is_none(value: Any, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run = trainer(tmp_path, model, tokenizer, report_to=value)
    assert not run._events.reporting
