"""Checkpoints of the loops on given answers: what one holds, and how SFT, DPO or the reward model goes on from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from groupline.config import ConfigError, ResumableSettings
from groupline.runlog import JsonlWriter
from groupline.training.checkpoint import Checkpoint, Saver, check_finite, write_checkpoint
from groupline.training.generators import random_state, set_random_state
from groupline.training.resume import (
    environment,
    fingerprint,
    go_on,
    mark,
    take_weights,
    trainable,
)
from groupline.training.trainee import Say, Trainee


@dataclass
class Progress:
    """A run so far. rows: the first update's facts and the last one's. before: held-out measures of the start."""

    step: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0
    before: dict[str, Any] | None = None

    def add(self, step: int, row: dict[str, float]) -> None:
        """An update's facts."""
        self.step, self.rows, self.tokens = step, [*self.rows[:1], row], self.tokens + row["tokens"]

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of it beside the step."""
        return {"rows": self.rows, "tokens": self.tokens, "seconds": self.seconds, "before": self.before}


@dataclass
class Keeper(Saver):
    """Saves checkpoints of one run, and takes it up again from `found`.

    method: "sft", "dpo" or "reward_model". origin: marks of what the run started from, by which a resumed one is held
    to it. extra: tensors kept beside the weights, file name -> name -> tensor.
    """

    config: ResumableSettings
    method: str
    trainee: Trainee
    origin: dict[str, Any]
    found: Checkpoint | None = None
    extra: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    newest: Path | None = None
    log: JsonlWriter | None = None

    @classmethod
    def of(
        cls,
        config: ResumableSettings,
        method: str,
        trainee: Trainee,
        found: Checkpoint | None,
        train_on: Iterable[Any],
        measure_on: Iterable[Any],
    ) -> Self:
        """train_on, measure_on: what is learnt from and measured on, as rows that JSON can hold.

        Raises ConfigError if `found` is of a run that started from other ones, another base or another number format.
        """
        frozen = ((n, p) for n, p in trainee.model.named_parameters() if not p.requires_grad)
        origin = {
            "frozen weights": fingerprint(frozen),
            "training examples": mark(train_on),
            "held-out examples": mark(measure_on),
            "number format (precision)": str(trainee.precision.compute),
        }
        if found is not None:
            for key, value in origin.items():
                told = found.state["origin"][key]
                if told != value:
                    shown = f": {told}, now {value}" if key.startswith("number") else ""
                    raise ConfigError(f"resume: the {key} are not those that {found.folder} started from{shown}")
            if config.micro_batch_tokens is None:
                trainee.tokens = found.state["environment"]["micro_batch_tokens"]
        return cls(config, method, trainee, origin, found, newest=found.folder if found else None)

    def settings(self) -> ResumableSettings:
        return self.config

    def restore(self, found: Checkpoint, say: Say) -> Progress:
        """Bring weights, moments and generators to where they were. ConfigError if its weights are not those that train."""
        take_weights(found, self.trainee.model)
        kept = found.torch_state()
        self.trainee.optimiser.load_state_dict(kept["optimiser"])
        go_on(found, self._environment(), self.config.steps, say)
        set_random_state(kept["random"])
        return Progress(found.step, **found.state["results"])

    def write(self, folder: Path, step: int, results: dict[str, Any]) -> Path:
        assert self.log is not None
        tensors = {"weights": trainable(self.trainee.model), **self.extra}
        check_finite(tensors, step)
        state = {
            "method": self.method,
            "settings": self.config.model_dump(mode="json"),
            "origin": self.origin,
            "environment": self._environment(),
            "files": {self.log.path.name: self.log.sync()},
            "results": results,
        }
        torch_state = {"optimiser": self.trainee.optimiser.state_dict(), "random": random_state()}
        return write_checkpoint(folder, step, tensors, torch_state, state)

    def _environment(self) -> dict[str, Any]:
        return environment(self.trainee.device, self.trainee.tokens)
