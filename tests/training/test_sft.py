"""Supervised fine-tuning: the loss against transformers' own, a model from nothing, and an adapter merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import plain_logprobs, rows, same, twin, weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.chat import encode_answer, encode_prompt
from groupline.config import Config, ConfigError
from groupline.tasks.task import get_task
from groupline.training.optim import Optimiser
from groupline.training.sft import SftConfig, sft, supervised_step

Example = tuple[list[int], list[list[int]]]


def examples(tokenizer: Any, count: int = 5, *columns: str) -> list[Example]:
    problems = get_task("arithmetic_en").problems("train", count)
    return [
        (
            encode_prompt(tokenizer, p.prompt),
            [encode_answer(tokenizer, str(p.columns[c])) for c in columns or ("solution",)],
        )
        for p in problems
    ]


def pairs(batch: list[Example]) -> list[tuple[list[int], list[int]]]:
    return [(prompt, answer) for prompt, answers in batch for answer in answers]


@pytest.mark.parametrize("shared", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
def test_the_loss_is_transformers_own(shared: bool, micro_batch_tokens: int, first: nn.Module, tokenizer: Any) -> None:
    """A mean over the answers' tokens of the whole batch, prompts masked with -100, however the batch is split.

    A prompt with several answers counts once an answer, as if each pair stood alone.
    """
    batch = examples(tokenizer, 5, "solution", "short_solution", "short_solution")
    alone = pairs(batch)
    width = max(len(p) + len(a) for p, a in alone)
    ids = torch.zeros(len(alone), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, (prompt, answer) in enumerate(alone):
        ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        mask[i, : len(prompt) + len(answer)] = 1
    theirs = twin(first)
    loss = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    norm = float(torch.cat([p.grad.flatten() for p in theirs.parameters() if p.grad is not None]).norm())
    ours = twin(first)
    optimiser = Optimiser(
        ours, SftConfig(adam_epsilon=1.0, learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant"), 1
    )
    found, tokens = supervised_step(ours, optimiser, batch, micro_batch_tokens, shared)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert tokens == sum(len(a) for _, a in alone)
    moved = torch.cat([(a - b).detach().flatten() for a, b in zip(first.parameters(), ours.parameters(), strict=True)])
    assert float((moved / (1 - moved.abs())).norm()) == pytest.approx(norm, rel=1e-4)  # Adam's g / (|g| + 1)


def test_a_model_from_nothing(tmp_path: Path) -> None:
    settings = SftConfig(
        new_model={"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1,
                   "head_dim": 16},
        task="arithmetic_en", problems=40, eval_problems=0, steps=25, batch_size=8, learning_rate=1e-2, warmup_steps=2,
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    said: list[str] = []
    folder = sft(settings, said.append)
    losses = [r["loss"] for r in rows(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 25
    assert losses[0] == pytest.approx(5.8, abs=0.3)  # log of 322 tokens
    assert losses[-1] < 0.6 * losses[0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():  # what was saved is what was trained
        batch = pairs(examples(tokenizer, 40))
        total = sum(
            float(torch.log_softmax(model(torch.tensor([[*p, *a]])).logits[0, len(p) - 1 : -1], -1)
                  .gather(-1, torch.tensor(a)[:, None]).sum()) for p, a in batch
        )  # fmt: skip
    assert -total / sum(len(a) for _, a in batch) < 0.6 * losses[0]
    assert SftConfig.load(tmp_path / "run" / "config.yaml") == settings
    assert said[-1] == f"model saved in {folder}"


def test_an_adapter_is_trained_and_merged(tmp_path: Path, start: Path, first: nn.Module) -> None:
    settings = SftConfig(
        model=str(start), task="arithmetic_en", problems=8, eval_problems=0, steps=2, batch_size=4, lora_r=4, learning_rate=1e-2,
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    folder = sft(settings, lambda line: None)
    assert not (folder / "adapter_config.json").exists()
    merged = weights(AutoModelForCausalLM.from_pretrained(folder))
    changed = {k for k, w in weights(first).items() if not torch.equal(merged[k], w)}
    assert changed == {k for k in merged if k.endswith("_proj.weight")}


def test_dropout_is_active_while_an_adapter_is_trained(tmp_path: Path, start: Path) -> None:
    """With dropout the losses after the first update differ from those without."""
    losses = []
    for dropout in (0.0, 0.5):
        settings = SftConfig(
            model=str(start), task="arithmetic_en", problems=8, eval_problems=0, steps=3, batch_size=4, lora_r=4,
            lora_dropout=dropout, learning_rate=5e-2, output_dir=str(tmp_path / str(dropout)),
        )  # fmt: skip
        sft(settings, lambda line: None)
        losses.append([r["loss"] for r in rows(tmp_path / str(dropout) / "metrics.jsonl")])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)  # the adapter is still zero
    assert losses[0][2] != pytest.approx(losses[1][2], rel=1e-3)


def test_a_problem_without_a_worked_answer_is_named(tmp_path: Path, start: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"question": "1+1=", "answer": "2", "hint": "add"}) + "\n", encoding="utf-8")
    settings = SftConfig(model=str(start), train_file=str(file), output_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="problem 'problems-1' has no 'solution' to learn from; it has hint"):
        sft(settings, lambda line: None)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Case G4."""
    (tmp_path / "notes.txt").write_text("mine")
    settings = SftConfig(model=str(tmp_path / "nowhere"), output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="already holds a run; give another output_dir"):
        sft(settings)


def test_recipes_of_one_kind_are_refused_by_the_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'batch_size'"):
        Config(batch_size=4)
    with pytest.raises(ConfigError, match=r"new_model\.vocab_size is 5: .*300; new_model\.width is 3: "):
        SftConfig(new_model={"vocab_size": 5, "width": 3})


def test_from_python_with_held_out_answers(tmp_path: Path, model: nn.Module, first: nn.Module, tokenizer: Any) -> None:
    """results.json tells the held-out answers' loss before and after, as an ordinary pass over each alone gives it."""
    problems = get_task("arithmetic_en").problems("train", 24)
    held = get_task("arithmetic_en").problems("held_out", 6)
    settings = SftConfig(steps=8, batch_size=8, learning_rate=1e-2, output_dir=str(tmp_path / "run"))
    sft(settings, lambda line: None, model=model, tokenizer=tokenizer, problems=problems, held_out=held)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    encoded = [(encode_prompt(tokenizer, p.prompt), encode_answer(tokenizer, str(p.columns["solution"]))) for p in held]
    total = sum(len(a) for _, a in encoded)
    with torch.no_grad():
        before, after = (-sum(float(plain_logprobs(m, p, a).sum()) for p, a in encoded) / total for m in (first, model))
    assert results["held_out"]["before"] == {"loss": pytest.approx(before, rel=1e-5), "tokens": total}
    assert results["held_out"]["after"] == {"loss": pytest.approx(after, rel=1e-5), "tokens": total}
    assert after < before
    assert (results["updates"], results["examples"], results["held_out"]["problems"]) == (8, 24, 6)
    assert same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")), weights(model))


def test_an_adapter_may_stay_one(tmp_path: Path, start: Path) -> None:
    settings = SftConfig(
        model=str(start), task="arithmetic_en", problems=8, eval_problems=0, steps=2, batch_size=4, lora_r=4,
        merge_adapter=False, learning_rate=1e-2, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    folder = sft(settings, lambda line: None)
    assert (folder / "adapter_config.json").exists()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["held_out"]["before"] is None
    again = settings.model_copy(update={"model": str(folder), "output_dir": str(tmp_path / "again")})
    with pytest.raises(ConfigError, match="the model already has an adapter; set lora_r: 0 to train it"):
        sft(again, lambda line: None)


def test_held_out_problems_without_an_answer_are_named(tmp_path: Path, start: Path) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    train.write_text(json.dumps({"question": "1+1=", "answer": "2", "solution": "2"}) + "\n", encoding="utf-8")
    held.write_text(json.dumps({"question": "1+2=", "answer": "3"}) + "\n", encoding="utf-8")
    files = {"train_file": str(train), "eval_file": str(held), "output_dir": str(tmp_path / "run")}
    with pytest.raises(ValueError, match="problem 'held-1' has no 'solution' to learn from"):
        sft(SftConfig(model=str(start), **files), lambda line: None)
    sft(SftConfig(model=str(start), eval_problems=0, steps=1, **files), lambda line: None)
    with pytest.raises(ConfigError, match="no problems to learn from"):
        sft(SftConfig(model=str(start), output_dir=str(tmp_path / "none")), lambda line: None, problems=[])
