"""What SFT, DPO and the reward model train: their common settings, and a model made ready with its optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from groupline.batch import automatic_tokens
from groupline.config import ConfigError, Positive, ResumableSettings
from groupline.models.load import Precision, choose_precision
from groupline.models.lora import add_lora, fuse_lora, is_peft
from groupline.training.optim import Optimiser

Say = Callable[[str], None]


class UpdateSettings(ResumableSettings):
    """What training on given answers has beside the settings of every run."""

    batch_size: Positive = 64
    """Examples an update."""
    merge_adapter: bool = True
    """Save the model with its adapter merged into it; false: the adapter alone, in PEFT's format."""


@dataclass
class Trainee:
    """A model on its device with its optimiser.

    tokens: most row tokens of a micro-batch. shared: whether it takes packed rows. passed_in: by the caller, who may
    go on using it.
    """

    model: Any
    tokenizer: Any
    precision: Precision
    optimiser: Optimiser
    tokens: int
    shared: bool
    passed_in: bool

    @property
    def device(self) -> torch.device:
        return self.precision.device


def make_ready(
    config: UpdateSettings,
    model: Any,
    tokenizer: Any,
    say: Say,
    *,
    why_not_shared: Callable[[nn.Module], str | None],
    passed_in: bool,
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM",
) -> Trainee:
    """The model on its device, with an adapter if `lora_r` asks for one, dropout on in adapters alone.

    Raises ConfigError if it has an adapter already and `lora_r` asks for another.
    """
    precision = choose_precision(config.device, config.precision)
    model = model.to(precision.device).eval()
    if config.lora_r:
        if is_peft(model):
            raise ConfigError("lora_r is set, but the model already has an adapter; set lora_r: 0 to train it")
        torch.manual_seed(config.seed)
        model = add_lora(
            model, config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets, task=task
        ).eval()
    elif is_peft(model):
        fuse_lora(model)
    for name, module in model.named_modules():
        if config.lora_dropout and "lora_dropout" in name:
            module.train()
    optimiser = Optimiser(model, config, config.steps, precision.scale_gradients)
    tokens, why = config.micro_batch_tokens, "as set"
    if tokens is None:
        tokens, why = automatic_tokens(model, precision.device, precision.compute)
    reason = why_not_shared(model)
    trained = sum(p.numel() for p in optimiser.parameters)
    say(f"{config.steps} updates of {config.batch_size}, {trained:,} trained weights, {precision}")
    say(f"at most {tokens:,} row tokens a micro-batch ({why})")
    if reason:
        say(f"training on padded rows, the prompt repeated for every answer: {reason}")
    return Trainee(model, tokenizer, precision, optimiser, tokens, reason is None, passed_in)
