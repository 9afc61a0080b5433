"""What a run leaves behind: a folder others can load, with its card, and a way back when numbers go wrong."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from small import EVEN, config, make_model, rows, run, same, sums, twin, weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.models.load import load_model, save_model
from groupline.sampling.choose import NonFiniteLogits
from groupline.training import method, optim
from groupline.training.grpo import train
from groupline.training.optim import NonFinite


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(5, 17)[None]).logits
    return found


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """(metadata, text) of a folder's README.md."""
    _, about, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(about), text


def test_a_trained_model_loads_in_transformers_with_its_card(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    changes = {"eval_samples": 4, "learning_rate": 1e-2, "seed": 3}
    results = run(config(tmp_path / "run", **changes), model, tokenizer, held_out=sums(16)[12:])
    folder = tmp_path / "run" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(twin(model)))
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    about, text = card_of(folder)
    assert about == {
        "base_model": "a model passed in", "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["groupline", "grpo"],
    }  # fmt: skip
    assert "| data | 12 problems (task `arithmetic_th`, data seed 0) |" in text
    assert "| rewards | 1 x `even_share` |" in text
    assert "| steps | 2 of 2, 3 prompts x 4 answers each |" in text
    assert "4 problems, 4 answers each" in text
    for k in (1, 2, 4):
        cells = []
        for when in ("before", "after"):
            found = results["held_out"][when][f"pass@{k}"]
            low, high = (100 * x for x in found["wilson"])
            cells.append(f"{100 * found['value']:.1f}% ({low:.1f}% to {high:.1f}%)")
        assert f"| pass@{k} | {cells[0]} | {cells[1]} |" in text


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_a_trained_adapter_loads_in_peft_with_its_card(tmp_path: Path, tokenizer: Any) -> None:
    save_model(make_model(tokenizer), tokenizer, tmp_path / "base")
    settings = config(tmp_path / "run", model=str(tmp_path / "base"), lora_r=2, learning_rate=1e-2)
    train(settings, lambda line: None, problems=sums(12), held_out=[], rewards=[EVEN])
    folder = tmp_path / "run" / "model"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, str(folder))
    assert not torch.equal(logits(adapted), before)
    assert torch.equal(logits(adapted), logits(AutoModelForCausalLM.from_pretrained(folder)))  # finds its base itself
    torch.testing.assert_close(logits(adapted), logits(load_model(str(folder))), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    about, text = card_of(folder)
    assert (about["base_model"], about["library_name"]) == (str(tmp_path / "base"), "peft")
    assert "lora" in about["tags"]
    assert "PeftModel.from_pretrained" in text
    assert "Not measured." in text


def test_the_settings_hash_says_what_was_done_not_where(tmp_path: Path) -> None:
    from groupline.training.card import config_hash

    one = config_hash(config(tmp_path / "a"))
    assert one == config_hash(config(tmp_path / "b", save_steps=3, overwrite=True))
    assert one != config_hash(config(tmp_path / "a", seed=1))


# Numbers that are not finite


@pytest.mark.parametrize("save_steps", [0, 2])
def test_a_loss_that_is_nan_saves_the_last_good_model_and_names_the_checkpoint(
    tmp_path: Path, first: nn.Module, tokenizer: Any, save_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[dict[str, Tensor]] = []
    policy = twin(first)
    real = method.train_step

    def train_step(*args: Any, **more: Any) -> dict[str, float]:
        ends.append(weights(policy))
        if len(ends) == 4:
            args[2].micro_batches[0].weights[:] = math.nan
        return real(*args, **more)

    monkeypatch.setattr(method, "train_step", train_step)
    with pytest.raises(NonFinite) as told:
        run(config(tmp_path / "run", steps=6, save_steps=save_steps), policy, tokenizer)
    text, folder = str(told.value), tmp_path / "run"
    assert "not finite in answers [" in text
    assert f"the weights as the last good update left them are in {folder / 'model'}" in text
    if save_steps:
        assert f"the newest checkpoint is {folder / 'checkpoint-2'} (--resume)" in text
    else:
        assert "there is no checkpoint to go back to (save_steps)" in text
    assert same(weights(AutoModelForCausalLM.from_pretrained(folder / "model")), ends[3])
    assert not same(ends[3], ends[2])
    assert len(rows(folder / "metrics.jsonl")) == 3
    assert "not finite" in json.loads((folder / "results.json").read_text("utf-8"))["error"]


def test_diverged_weights_are_not_saved_over_and_the_checkpoint_is_named(
    tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    policy = twin(first)

    def say(line: str) -> None:
        if line.startswith("step 2/"):
            with torch.no_grad():
                policy.get_input_embeddings().weight.fill_(math.nan)  # type: ignore[operator]

    with pytest.raises(NonFiniteLogits, match=r"diverged; the newest checkpoint is .*checkpoint-1 \(--resume\)"):
        run(config(tmp_path / "run", steps=4, save_steps=1, save_total_limit=None), policy, tokenizer, say=say)
    assert not (tmp_path / "run" / "model").exists()


def test_updates_skipped_on_overflow_are_counted_in_the_metrics(
    tmp_path: Path, model: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 with a loss scale of 2^120: no gradient is finite, no weight moves, no step is lost from the metrics."""
    monkeypatch.setattr(optim.torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**120))
    before = weights(model)
    run(config(tmp_path / "run", steps=3, precision="fp16", num_iterations=2), model, tokenizer)
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [m["skipped_steps"] for m in found] == [2, 4, 6]
    assert [m["grad_norm"] for m in found] == [None, None, None]  # not finite, which JSON cannot carry
    assert same(weights(model), before)


def test_the_gradient_scale_and_the_skips_are_resumed(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    ends = []
    for name, steps in (("whole", [(4, False)]), ("two", [(2, False), (4, True)])):
        for count, resume in steps:
            policy = twin(first)
            settings = {"steps": count, "save_steps": 2, "precision": "fp16", "resume": resume}
            run(config(tmp_path / name, **settings), policy, tokenizer)
        state = torch.load(tmp_path / name / "checkpoint-4" / "torch_state.pt", weights_only=True)["optimiser"]
        ends.append((weights(policy), state["scaler"], state["skipped"]))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert ends[0][1]["_growth_tracker"] == 4 - ends[0][2]
