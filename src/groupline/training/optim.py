"""The optimiser, its schedule, and one guarded update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import get_scheduler


class OptimiserSettings(Protocol):
    """What an optimiser is built from; `Config` and `SftConfig` both have it."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_scheduler_type(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def adam_epsilon(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...


class NonFinite(FloatingPointError):
    """Loss or gradient is NaN or infinite; the weights were not changed."""


class Optimiser:
    """AdamW with a warm-up schedule. `step` clips, updates and advances the schedule."""

    def __init__(
        self, model: nn.Module, settings: OptimiserSettings, updates: int, scale_gradients: bool = False
    ) -> None:
        """updates: optimiser steps of the whole run, for schedules that end. Raises ValueError if nothing trains."""
        self.parameters: Sequence[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(
                "nothing is trainable: every parameter is frozen; load a PEFT adapter with is_trainable=True, or call "
                "requires_grad_(True) on what should train"
            )
        self.max_grad_norm = settings.max_grad_norm
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )
        kind = settings.lr_scheduler_type
        self.schedule = get_scheduler(
            "constant_with_warmup" if kind == "constant" else kind,  # transformers' "constant" has no warm-up
            self.adam,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=updates,
        )
        self.reduce: Callable[[Sequence[nn.Parameter]], None] | None = None  # adds up over ranks
        self.clip: Callable[[Sequence[nn.Parameter], float], Tensor] = nn.utils.clip_grad_norm_
        self.scaler = torch.amp.GradScaler(self.parameters[0].device.type) if scale_gradients else None
        self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Moments, schedule position, gradient scale and the count of skipped updates."""
        return {
            "adam": self.adam.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of the same kind of optimiser gave."""
        self.adam.load_state_dict(state["adam"])
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = int(state["skipped"])

    @property
    def scale(self) -> float:
        """What `backward` multiplies the loss with."""
        return float(self.scaler.get_scale()) if self.scaler else 1.0

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> dict[str, float]:
        """One update from the gradients held. Parameters without one get zero, so their moments still evolve.

        With gradient scaling a non-finite gradient skips the update and lowers the scale (counted in `skipped`);
        without, it raises NonFinite.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.reduce is not None:
            self.reduce(self.parameters)
        if self.scaler:
            self.scaler.scale(torch.zeros((), device=self.parameters[0].device))  # a rank may have had no loss to scale
            self.scaler.unscale_(self.adam)
        norm = float(self.clip(self.parameters, self.max_grad_norm or float("inf")))
        rate = float(self.schedule.get_last_lr()[0])
        finite = norm == norm and norm != float("inf")
        if self.scaler:
            self.scaler.step(self.adam)
            self.scaler.update()
            self.skipped += not finite
        elif finite:
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        if not finite and not self.scaler:
            raise NonFinite(f"the gradient's norm is {norm}; the weights were left as they were")
        if finite:
            self.schedule.step()
        return {"grad_norm": norm, "learning_rate": rate, "skipped_steps": float(self.skipped)}
