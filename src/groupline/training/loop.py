"""What the loops on given answers share: settings, a model made ready, batches, updates with their log, and the end."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from groupline.batch import automatic_tokens
from groupline.config import ConfigError, Positive, RunSettings
from groupline.models.load import Precision, choose_precision, save_model
from groupline.models.lora import add_lora, fuse_lora, is_peft
from groupline.runlog import JsonlWriter, write_json
from groupline.training.optim import Optimiser
from groupline.training.run import begin
from groupline.training.sinks import Sinks

T = TypeVar("T")
Say = Callable[[str], None]


class UpdateSettings(RunSettings):
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


def batches(examples: Sequence[T], size: int, steps: int, seed: int) -> Iterator[list[T]]:
    """`steps` batches in a new order every epoch; an epoch's incomplete rest opens the next one."""
    draw = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            epoch = list(range(len(examples)))
            draw.shuffle(epoch)
            order += epoch
        yield [examples[i] for i in order[:size]]
        order = order[size:]


def run_updates(
    config: UpdateSettings,
    examples: Sequence[T],
    update: Callable[[list[T]], Mapping[str, float]],
    say: Say,
    line: Callable[[Mapping[str, float]], str],
    told: Sinks,
) -> dict[str, Any]:
    """Claim the run's folder, make every update, log each in metrics.jsonl and to the sinks, and say one in
    twenty.

    line: an update's facts in words. Returns what happened: updates made, the first and the last facts, tokens, seconds,
    and whether Ctrl-C ended it early.
    """
    log = JsonlWriter(begin(config, told) / "metrics.jsonl")
    began = time.perf_counter()
    rows: list[dict[str, float]] = []
    made, interrupted, tokens, every = 0, False, 0.0, max(1, config.steps // 20)
    try:
        with told.ending():
            for step, batch in enumerate(batches(examples, config.batch_size, config.steps, config.seed), 1):
                row = dict(update(batch))
                made = step
                seconds = time.perf_counter() - began
                tokens += row["tokens"]
                log.write({"step": step, **row, "seconds": seconds})
                told.log(step, row)
                rows = [*rows[:1], row]
                if step % every == 0 or step == 1:
                    say(f"step {step}/{config.steps}  {line(row)}  {seconds:.0f} s")
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted after {made} updates: saving the model as it is")
    finally:
        log.close()
    return {
        "updates": made,
        "examples": len(examples),
        "batch_size": config.batch_size,
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "interrupted": interrupted,
        "first": rows[0] if rows else None,
        "last": rows[-1] if rows else None,
    }


def finish(config: UpdateSettings, trainee: Trainee, results: dict[str, Any], say: Say) -> Path:
    """Write the model and then results.json; returns the model's folder. A caller's own adapter stays unmerged."""
    folder, model = Path(config.output_dir), trainee.model
    if is_peft(model) and config.merge_adapter:
        own = trainee.passed_in and not config.lora_r  # their adapter, which goes on being one
        model = (copy.deepcopy(model) if own else model).merge_and_unload()
    save_model(model.eval(), trainee.tokenizer, folder / "model")
    write_json(folder / "results.json", results)
    say(f"model saved in {folder / 'model'}")
    return folder / "model"
