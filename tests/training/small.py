"""A tiny model with its tokenizer, easy problems, and settings under which a run takes a fraction of a second."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupline.config import Config
from groupline.models.load import save_model
from groupline.models.new import NewModel, new_model, new_tokenizer
from groupline.records import Problem
from groupline.rewards import Reward
from groupline.tasks.task import get_task
from groupline.training.grpo import train

MEASURED = ("time/", "memory/", "step_time", "tokens_per_second", "generated_tokens_per_second")  # how names begin
LETTERS = tuple(string.ascii_lowercase)  # as stop strings they end a random model's answers at different lengths


def make_tokenizer() -> Any:
    problems = get_task("arithmetic_th").problems("train", 20)
    return new_tokenizer([m["content"] for p in problems for m in p.prompt if not isinstance(p.prompt, str)], 320)


def make_model(tokenizer: Any, seed: int = 0) -> nn.Module:
    shape = NewModel(vocab_size=320, hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=16)
    return new_model(shape, tokenizer, seed).eval()


def make_start(folder: Path) -> Path:
    """The tiny model in Hugging Face format."""
    tokenizer = make_tokenizer()
    save_model(make_model(tokenizer), tokenizer, folder)
    return folder


def sums(count: int) -> list[Problem]:
    """`7+3=` and the like, prompts of different lengths."""
    return [Problem(f"sum-{i}", f"{i * i}+{i}=", str(i * i + i)) for i in range(count)]


def config(folder: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "steps": 2,
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-3,
        "beta": 0.0,
        "eval_problems": 0,
        "stop": LETTERS,
    }
    return Config(**settings | changes)


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of an answer's tokens with an even number: different for almost every answer, and easy to learn."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


EVEN = Reward("even_share", even_share)


def run(settings: Config, model: nn.Module, tokenizer: Any, **given: Any) -> dict[str, Any]:
    """`train` in silence; the model passed in is the one that is trained."""
    given = {"problems": sums(12), "held_out": [], "rewards": [EVEN], **given}
    return train(settings, given.pop("say", lambda line: None), model=model, tokenizer=tokenizer, **given)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def rows(path: Path) -> list[dict[str, Any]]:
    """A JSONL file's rows, read without the library."""
    return [json.loads(line) for line in path.read_bytes().decode("utf-8").split("\n") if line]


def untimed(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what was measured of the machine: two equal runs agree in the rest."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows(path)]


def first_gradient(before: nn.Module, after: nn.Module) -> Tensor:
    """The gradient of a run's one update, all weights in a row, where Adam's epsilon and the rate were 1.

    Its first update is then g / (|g| + 1), from which g is read back.
    """
    moved = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    )
    return moved / (1 - moved.abs())


def plain_logprobs(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-prob of each token of an answer from an ordinary forward pass of this answer alone."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    for module, training in modes:
        module.training = training
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def varied(function: Callable[[int], float]) -> Reward:
    """A reward that depends on how often it was called (a call is a step)."""
    calls = iter(range(10**6))
    return Reward("varied", lambda completion_ids, **_: [function(n) for n in [next(calls)] for _ in completion_ids])
