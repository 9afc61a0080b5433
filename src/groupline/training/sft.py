"""Supervised fine-tuning on worked answers: packed rows, loss on the answers' tokens only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from groupline.batch import automatic_tokens
from groupline.chat import encode_answer, encode_prompt
from groupline.config import Positive, RunSettings
from groupline.models.load import choose_precision, load_model, load_tokenizer, save_model
from groupline.models.logprobs import find_head, token_logprobs
from groupline.models.lora import add_lora
from groupline.models.new import NewModel, new_model, new_tokenizer
from groupline.models.packing import causal_lm, hidden_states, pack, why_not_shared
from groupline.records import Problem
from groupline.runlog import JsonlWriter
from groupline.tasks.source import training_problems
from groupline.training.optim import Optimiser
from groupline.training.run import begin, check_unused
from groupline.training.sinks import Sink, open_sinks

Example = tuple[list[int], list[list[int]]]  # a prompt and the answers to learn from


class SftConfig(RunSettings):
    """Settings of supervised fine-tuning."""

    new_model: NewModel | None = None
    """Start from random weights of this shape, with a tokenizer trained on the same texts, instead of `model`."""
    problems: Positive = 20000
    """Training problems taken from the task."""
    batch_size: Positive = 64
    """Examples an update."""
    solution_columns: tuple[str, ...] = Field(default=("solution",), min_length=1)
    """Columns that hold answers to learn from; a column named twice counts twice."""
    steps: Positive = 300
    learning_rate: float = Field(default=1e-3, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    output_dir: str = "runs/sft"


def sft(config: SftConfig, say: Callable[[str], None] = print, sinks: Sequence[Sink] = ()) -> Path:
    """Train as `config` says and save the model in Hugging Face format; returns its folder.

    sinks: trackers of the caller's own, beside those of `report_to`.
    """
    told = open_sinks(config.report_to, sinks, say)
    check_unused(config)
    problems = training_problems(config, config.problems)
    for problem in problems:
        lacking = [name for name in config.solution_columns if name not in problem.columns]
        if lacking:
            have = ", ".join(problem.columns) or "no columns"
            raise ValueError(f"problem {problem.id!r} has no {lacking[0]!r} to learn from; it has {have}")
    precision = choose_precision(config.device, config.precision)
    model, tokenizer = _start(config, problems)
    model = model.to(precision.device)
    if config.lora_r:
        model = add_lora(model, config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"supervised fine-tuning: {len(problems)} examples, {config.steps} updates of {config.batch_size}, "
        f"{trained:,} trained weights, {precision}")  # fmt: skip
    most, why = config.micro_batch_tokens, "as set"
    if most is None:
        most, why = automatic_tokens(model, precision.device, precision.compute)
    say(f"at most {most:,} row tokens a micro-batch ({why})")
    examples = [
        (encode_prompt(tokenizer, p.prompt, config.chat_template_kwargs),
         [encode_answer(tokenizer, text) for text in _solutions(p, config)])
        for p in problems
    ]  # fmt: skip
    optimiser = Optimiser(model, config, config.steps, precision.scale_gradients)
    shared = why_not_shared(model) is None
    folder = begin(config, told)
    log = JsonlWriter(folder / "metrics.jsonl")
    began = time.perf_counter()
    with told.ending():
        for step, batch in enumerate(_batches(examples, config.batch_size, config.steps, config.seed), 1):
            loss, tokens = supervised_step(model, optimiser, batch, most, shared, precision.compute)
            row = {"step": step, "loss": loss, "tokens": tokens, "seconds": time.perf_counter() - began}
            log.write(row)
            told.log(step, row)
            if step % max(1, config.steps // 20) == 0 or step == 1:
                say(f"step {step}/{config.steps}  loss {loss:.4f}  {time.perf_counter() - began:.0f} s")
    log.close()
    if config.lora_r:
        model = model.merge_and_unload()
    save_model(model.eval(), tokenizer, folder / "model")
    say(f"model saved in {folder / 'model'}")
    return folder / "model"


def supervised_step(
    model: nn.Module,
    optimiser: Optimiser,
    batch: Sequence[Example],
    micro_batch_tokens: int,
    shared: bool = True,
    compute: torch.dtype = torch.float32,
) -> tuple[float, int]:
    """One update on -log p of the answers' tokens, each weighted 1 / all answer tokens; (loss in nats, tokens)."""
    device = next(model.parameters()).device
    total = sum(len(answer) for _, answers in batch for answer in answers)
    loss_sum = 0.0
    for part in _parts(sorted(batch, key=_tokens), micro_batch_tokens):
        row = pack([p for p, _ in part], [answers for _, answers in part], device)
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
            hidden = hidden_states(model, row, shared)
            logp, _ = token_logprobs(hidden, find_head(causal_lm(model)), row.targets)
        loss = -logp.sum() / total
        optimiser.backward(loss)
        loss_sum += float(loss.detach())
    optimiser.step()
    return loss_sum, total


def _parts(batch: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    part: list[Example] = []
    size = 0
    for example in batch:
        length = _tokens(example)
        if part and size + length > tokens:
            yield part
            part, size = [], 0
        part.append(example)
        size += length
    yield part


def _tokens(example: Example) -> int:
    return len(example[0]) + sum(map(len, example[1]))


def _batches(examples: Sequence[Example], size: int, steps: int, seed: int) -> Iterator[list[Example]]:
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


def _start(config: SftConfig, problems: Sequence[Problem]) -> tuple[Any, Any]:
    if config.new_model is None:
        tokenizer = load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
        return load_model(config.model, trust_remote_code=config.trust_remote_code), tokenizer
    texts = [text for p in problems[:4000] for text in (*_texts(p), *_solutions(p, config))]
    tokenizer = new_tokenizer(texts, config.new_model.vocab_size)
    return new_model(config.new_model, tokenizer, config.seed), tokenizer


def _solutions(problem: Problem, config: SftConfig) -> list[str]:
    return [str(problem.columns[name]) for name in config.solution_columns]


def _texts(problem: Problem) -> list[str]:
    return [problem.prompt] if isinstance(problem.prompt, str) else [m["content"] for m in problem.prompt]
