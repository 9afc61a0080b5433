"""Supervised fine-tuning on worked answers: packed rows, loss on the answers' tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from groupline.chat import encode_answer, encode_prompt
from groupline.config import ConfigError, Positive
from groupline.models.load import load_model, load_tokenizer
from groupline.models.logprobs import find_head, token_logprobs
from groupline.models.new import NewModel, new_model, new_tokenizer
from groupline.models.packing import by_tokens, causal_lm, eval_mode, hidden_states, pack, why_not_shared
from groupline.objective import supervised_loss
from groupline.parallel.mesh import refuse_ranks
from groupline.records import Problem
from groupline.tasks.source import given_problems, held_out_problems, training_problems
from groupline.training.loop import finish, run_updates
from groupline.training.loop_resume import Keeper
from groupline.training.optim import Optimiser
from groupline.training.resume import find_checkpoint
from groupline.training.run import check_unused
from groupline.training.sinks import Sink, open_sinks
from groupline.training.trainee import Say, Trainee, UpdateSettings, make_ready

Example = tuple[list[int], list[list[int]]]  # a prompt and the answers to learn from


class SftConfig(UpdateSettings):
    """Settings of supervised fine-tuning."""

    new_model: NewModel | None = None
    """Start from random weights of this shape, with a tokenizer trained on the same texts, instead of `model`."""
    problems: Positive = 20000
    """Training problems taken from the task."""
    eval_problems: int = Field(default=200, ge=0)
    """Held-out problems whose answers' loss is measured before and after; 0 turns it off."""
    solution_columns: tuple[str, ...] = Field(default=("solution",), min_length=1)
    """Columns that hold answers to learn from; a column named twice counts twice."""
    steps: Positive = 300
    """Updates."""
    learning_rate: float = Field(default=1e-3, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    output_dir: str = "runs/sft"


def sft(
    config: SftConfig,
    say: Say = print,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    problems: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> Path:
    """Train as `config` says, save the model in Hugging Face format and results.json beside it; returns its folder.

    model, tokenizer, problems and held_out take the place of what the configuration names: the model is trained in
    place, and problems are `Problem`s, dicts or a `datasets.Dataset`. The loss on held-out problems is in nats a token,
    before and after. sinks: trackers of the caller's own, beside those of `report_to`. With `resume` the run in
    `output_dir` goes on from a checkpoint; what is given must then be what it was first given.
    ValueError: a problem lacks a column to learn from; ConfigError: there are no problems.
    """
    refuse_ranks("sft")
    told = open_sinks(config.report_to, sinks, say)
    found = find_checkpoint(config, say, "sft")
    if config.resume is False:
        check_unused(config)
    train_on = training_problems(config, config.problems) if problems is None else given_problems(config, problems)
    measure_on = _held_out(config, problems is not None) if held_out is None else given_problems(config, held_out)
    if not train_on:
        raise ConfigError("there are no problems to learn from: `problems` is empty")
    for problem in [*train_on, *measure_on]:
        lacking = [name for name in config.solution_columns if name not in problem.columns]
        if lacking:
            have = ", ".join(problem.columns) or "no columns"
            raise ValueError(f"problem {problem.id!r} has no {lacking[0]!r} to learn from; it has {have}")
    passed_in = model is not None
    if model is None:
        model, tokenizer = _start(config, train_on, tokenizer)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    say(f"supervised fine-tuning: {len(train_on)} examples, {len(measure_on)} held out")
    trainee = make_ready(config, model, tokenizer, say, why_not_shared=why_not_shared, passed_in=passed_in)

    def encoded(given: Sequence[Problem]) -> list[Example]:
        return [
            (encode_prompt(tokenizer, p.prompt, config.chat_template_kwargs),
             [encode_answer(tokenizer, text) for text in _solutions(p, config)])
            for p in given
        ]  # fmt: skip

    examples, held = encoded(train_on), encoded(measure_on)
    keeper = Keeper.of(config, "sft", trainee, found, examples, held)

    def update(batch: list[Example]) -> dict[str, float]:
        loss, tokens, facts = _update(
            trainee.model, trainee.optimiser, batch, trainee.tokens, trainee.shared, trainee.precision.compute
        )
        return {"loss": loss, "tokens": tokens, **facts}

    done, before, after = run_updates(
        config,
        examples,
        update,
        lambda: _measure(trainee, held),
        say,
        lambda row: f"loss {row['loss']:.4f}",
        told,
        keeper,
    )
    results = {"method": "sft", "model": config.model, "seed": config.seed, **done}
    results["held_out"] = {"problems": len(held), "before": before, "after": after}
    if before is not None and after is not None:
        say(f"held out: {before['loss']:.4f} nats a token before, {after['loss']:.4f} after")
    return finish(config, trainee, results, say)


def supervised_step(
    model: nn.Module,
    optimiser: Optimiser,
    batch: Sequence[Example],
    micro_batch_tokens: int,
    shared: bool = True,
    compute: torch.dtype = torch.float32,
) -> tuple[float, int]:
    """One update on -log p of the answers' tokens, each weighted 1 / all answer tokens; (loss in nats, tokens)."""
    return _update(model, optimiser, batch, micro_batch_tokens, shared, compute)[:2]


def _update(
    model: nn.Module,
    optimiser: Optimiser,
    batch: Sequence[Example],
    micro_batch_tokens: int,
    shared: bool,
    compute: torch.dtype,
) -> tuple[float, int, dict[str, float]]:
    total = sum(len(answer) for _, answers in batch for answer in answers)
    mean = _mean_loss(model, batch, total, micro_batch_tokens, shared, compute, optimiser.backward)
    return mean, total, optimiser.step()


def _mean_loss(
    model: nn.Module,
    batch: Sequence[Example],
    total: int,
    micro_batch_tokens: int,
    shared: bool,
    compute: torch.dtype,
    backward: Callable[[torch.Tensor], None] | None = None,
) -> float:
    """-log p of the answers' tokens / total, summed over micro-batches; each one's part goes to `backward`."""
    device = next(model.parameters()).device
    loss_sum = 0.0
    for part in by_tokens(sorted(batch, key=_tokens), _tokens, micro_batch_tokens):
        row = pack([p for p, _ in part], [answers for _, answers in part], device)
        with torch.autocast(device.type, compute, enabled=compute != torch.float32):
            hidden = hidden_states(model, row, shared)
            logp, _ = token_logprobs(hidden, find_head(causal_lm(model)), row.targets)
        loss = supervised_loss(logp, total)
        if backward is not None:
            backward(loss)
        loss_sum += float(loss.detach())
    return loss_sum


@torch.no_grad()
def _measure(trainee: Trainee, held: Sequence[Example]) -> dict[str, float] | None:
    """Mean loss of the held-out answers' tokens in nats, without dropout; None without any."""
    total = sum(len(answer) for _, answers in held for answer in answers)
    if not total:
        return None
    with eval_mode(trainee.model):
        loss = _mean_loss(trainee.model, held, total, trainee.tokens, trainee.shared, trainee.precision.compute)
    return {"loss": loss, "tokens": total}


def _tokens(example: Example) -> int:
    return len(example[0]) + sum(map(len, example[1]))


def _held_out(config: SftConfig, given: bool) -> list[Problem]:
    """None where the training problems are the user's own and no held-out ones are named."""
    if (given or config.train_file) and not config.eval_file:
        return []
    return held_out_problems(config, config.eval_problems)


def _start(config: SftConfig, problems: Sequence[Problem], tokenizer: Any) -> tuple[Any, Any]:
    if config.new_model is None:
        tokenizer = tokenizer or load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
        return load_model(config.model, trust_remote_code=config.trust_remote_code), tokenizer
    texts = [text for p in problems[:4000] for text in (*_texts(p), *_solutions(p, config))]
    tokenizer = tokenizer or new_tokenizer(texts, config.new_model.vocab_size)
    return new_model(config.new_model, tokenizer, config.seed), tokenizer


def _solutions(problem: Problem, config: SftConfig) -> list[str]:
    return [str(problem.columns[name]) for name in config.solution_columns]


def _texts(problem: Problem) -> list[str]:
    return [problem.prompt] if isinstance(problem.prompt, str) else [m["content"] for m in problem.prompt]
