"""Runs that one process and two ranks are to make alike; what each left is compared. Used by test and ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from small import EVEN, config, even_share, make_model, make_tokenizer, sums

from groupline.config import Config
from groupline.parallel.mesh import whole
from groupline.records import Problem
from groupline.rewards import Reward
from groupline.training.grpo import train
from groupline.training.method import Method
from groupline.training.optim import Optimiser

# With AdamW's usual epsilon a weight whose gradient is rounding noise moves by the whole rate, either way.
ALL: dict[str, Any] = {"steps": 3, "micro_batch_tokens": 40, "adam_epsilon": 1e-4, "beta": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_r": 4, "num_iterations": 2, "activation_checkpointing": True},
    "one rank has nothing": {"lora_r": 4, "beta": 0.0, "micro_batch_tokens": 200},
    "nothing at all": {"beta": 0.0, "steps": 2, "max_grad_norm": 0.1},
    "parts": {"updates_per_pass": 2, "top_entropy_quantile": 0.5, "activation_checkpointing": True},
    "penalty in the reward": {"objective": "rloo", "prompts_per_step": 1, "max_grad_norm": 0.01},
}
HALF: dict[str, Any] = {"precision": "bf16", "steps": 1, "num_iterations": 1}
SAVED: dict[str, Any] = {"steps": 4, "save_steps": 2}


def of_one(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tells apart the answers of one problem alone."""
    return [r * p.startswith("1+") for p, r in zip(prompts, even_share(completion_ids), strict=True)]


def given(case: str) -> dict[str, Any]:
    """Problems and rewards of a case."""
    if case == "nothing at all":
        return {
            "problems": sums(12),
            "rewards": [Reward("none", lambda completion_ids, **_: [0.5] * len(completion_ids))],
        }
    if case == "one rank has nothing":  # one group with signal a step, whose prompt is too long to be worth sharing
        long = [Problem(f"long-{i}", f"{i}+" * 20 + "=", "0") for i in range(3)]
        return {"problems": long, "rewards": [Reward("of_one", of_one)]}
    return {"problems": sums(12), "rewards": [EVEN]}


def settings(case: str, folder: Path, **changes: Any) -> Config:
    return config(folder, **ALL | CASES[case] | changes)


def start(settings: Config, case: str, **changes: Any) -> dict[str, Any]:
    """`train` in silence on the tiny model."""
    tokenizer = make_tokenizer()
    others = given(case) | {"held_out": [], "say": lambda line: None} | changes
    return train(settings, model=make_model(tokenizer), tokenizer=tokenizer, **others)


def saved_model(run: Path) -> dict[str, Tensor]:
    """The weights in a run's model folder, by the names they have in Hugging Face's format."""
    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


@contextmanager
def recorded() -> Iterator[tuple[list[list[Tensor]], list[int]]]:
    """(the gradients of every update before they are clipped, micro-batches with answers of every update)."""
    gradients: list[list[Tensor]] = []
    micro_batches: list[int] = []
    step, update = Optimiser.step, Method.update

    def recording_step(self: Optimiser) -> dict[str, float]:
        clip = self.clip

        def look(parameters: Any, most: float) -> Tensor:
            gradients.append([whole(p.grad).clone() for p in parameters])
            return clip(parameters, most)

        self.clip = look
        try:
            return step(self)
        finally:
            self.clip = clip

    def recording_update(self: Method, setup: Any, part: Any) -> dict[str, float]:
        micro_batches.append(sum(bool(m.answers) for m in part.micro_batches))
        return update(self, setup, part)

    Optimiser.step, Method.update = recording_step, recording_update  # type: ignore[method-assign]
    try:
        yield gradients, micro_batches
    finally:
        Optimiser.step, Method.update = step, update  # type: ignore[method-assign]


def gap(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def largest(gradients: list[list[Tensor]]) -> float:
    return max(float(g.abs().max()) for update in gradients for g in update)
