"""Runs of DPO and of the reward model: what they learn, write, save and refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from small import plain_logprobs, rows, same, twin, weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from groupline import DpoConfig, Pair, RewardModelConfig, dpo, reward_model
from groupline.chat import encode_answer, encode_prompt
from groupline.cli import main
from groupline.config import ConfigError
from groupline.metrics import wilson_interval
from groupline.models.load import load_model
from groupline.models.reward_head import load_reward_model, score_answers
from groupline.training import loop
from groupline.training.optim import NonFinite


def pairs(count: int, first: int = 0) -> list[Pair]:
    """The right sum before a wrong one that ends in a nine: easy to tell apart."""
    return [
        Pair(f"{i}+{i}=", f"{2 * i}", f"{2 * i}99", f"sum-{i}", columns={"margin": 0})
        for i in range(first, first + count)
    ]


def quick(kind: Any, folder: Path, **changes: Any) -> Any:
    given = {"steps": 12, "batch_size": 8, "learning_rate": 3e-3, "output_dir": str(folder / "run")}
    return kind(**given | changes)


def silent(_: str) -> None:
    pass


def test_dpo(tmp_path: Path, model: nn.Module, first: nn.Module, tokenizer: Any) -> None:
    said: list[str] = []
    results = dpo(
        quick(DpoConfig, tmp_path), said.append, model=model, tokenizer=tokenizer, pairs=pairs(20),
        eval_pairs=pairs(10, 40),
    )  # fmt: skip
    before, after = results["held_out"]["before"], results["held_out"]["after"]
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its reference
    assert before["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert before["accuracy"] is None
    assert after["loss"] < 0.6
    right = after["accuracy"]["value"]
    assert right > 0.8
    assert after["accuracy"]["wilson"] == pytest.approx(wilson_interval(10 * right, 10))
    written = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert written == results
    logged = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in logged] == list(range(1, 13))
    assert set(logged[0]) >= {
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
        "logps/rejected", "grad_norm", "learning_rate", "tokens",
    }  # fmt: skip
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert same(weights(saved), weights(model))  # trained in place
    with torch.no_grad():  # the margin, from whole models and one answer at a time
        margins, likelier = [], 0
        for pair in pairs(10, 40):
            prompt = encode_prompt(tokenizer, pair.prompt)
            answers = [encode_answer(tokenizer, text) for text in (pair.chosen, pair.rejected)]
            gains = [
                float((plain_logprobs(model, prompt, a) - plain_logprobs(first, prompt, a)).sum()) for a in answers
            ]
            margins.append(0.1 * (gains[0] - gains[1]))
            likelier += bool(
                plain_logprobs(first, prompt, answers[0]).sum() > plain_logprobs(first, prompt, answers[1]).sum()
            )
    assert before["chosen_likelier"] == likelier / 10
    assert after["rewards/margins"] == pytest.approx(sum(margins) / 10, abs=1e-5)
    assert right == sum(m > 0 for m in margins) / 10
    assert said[0] == "dpo: 20 pairs, 10 held out, 0 too long"


def test_sampled_ids_are_trained_on_as_they_are(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Neither decoded and encoded again nor ended: the text may say anything."""
    given = Pair("1+1=", "shown", "shown", "x", chosen_ids=(5, 6, 7), rejected_ids=(5, 9))
    start = twin(model)
    dpo(quick(DpoConfig, tmp_path, steps=1), silent, model=model, tokenizer=tokenizer, pairs=[given])
    (row,) = rows(tmp_path / "run" / "metrics.jsonl")
    prompt = encode_prompt(tokenizer, "1+1=")
    with torch.no_grad():
        for name, ids in (("logps/chosen", [5, 6, 7]), ("logps/rejected", [5, 9])):
            assert row[name] == pytest.approx(float(plain_logprobs(start, prompt, ids).sum()), rel=1e-5)
    assert row["tokens"] == 8 * 5  # the one pair fills the batch eight times


def test_an_adapter_is_merged_or_kept(tmp_path: Path, start: Path, first: nn.Module) -> None:
    """Both are the same model; the reference is the base, so nothing of the start changes but the adapted layers."""
    found = []
    for merged in (True, False):
        config = quick(
            DpoConfig, tmp_path / str(merged), model=str(start), lora_r=4, merge_adapter=merged, steps=3,
            learning_rate=1e-2,
        )  # fmt: skip
        results = dpo(config, silent, pairs=pairs(12), eval_pairs=pairs(4, 40))
        assert results["held_out"]["before"]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        folder = tmp_path / str(merged) / "run" / "model"
        assert (folder / "adapter_config.json").exists() != merged
        found.append(load_model(str(folder)))
    prompt, answer = [5, 6, 7], [8, 9, 10]
    with torch.no_grad():
        one, other, old = (plain_logprobs(m, prompt, answer) for m in (*found, first))
    assert torch.allclose(one, other, atol=1e-4)
    assert float((one - old).abs().max()) > 1e-2


def test_the_reward_model(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    kept, padding = weights(first), tokenizer.pad_token
    results = reward_model(
        quick(RewardModelConfig, tmp_path), silent, model=first, tokenizer=tokenizer, pairs=pairs(20),
        eval_pairs=pairs(10, 40),
    )  # fmt: skip
    assert same(kept, weights(first))  # a language model is copied
    assert tokenizer.pad_token == padding
    folder = tmp_path / "run" / "model"
    encoded = [
        (encode_prompt(tokenizer, p.prompt), encode_answer(tokenizer, text))
        for p in pairs(10, 40)
        for text in (p.chosen, p.rejected)
    ]
    scores = score_answers(load_reward_model(folder), encoded)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    width = max(len(p) + len(a) for p, a in encoded)
    batch = torch.tensor([[*p, *a] + [saved.pad_token_id] * (width - len(p) - len(a)) for p, a in encoded])
    with torch.no_grad():  # one padded batch through transformers' own class
        logits = theirs(input_ids=batch, attention_mask=(batch != saved.pad_token_id).long()).logits[:, 0]
    assert logits.tolist() == pytest.approx(scores, abs=1e-5)
    margins = [c - r for c, r in zip(scores[::2], scores[1::2], strict=True)]
    after = results["held_out"]["after"]
    right = sum(m > 0 for m in margins)
    assert right >= 8
    assert after["accuracy"] == {"value": right / 10, "wilson": pytest.approx(wilson_interval(right, 10))}
    sure = [1 / (1 + math.exp(-m)) for m in margins]
    assert after["loss"] == pytest.approx(-sum(map(math.log, sure)) / 10, abs=1e-5)
    assert after["calibration"]["brier"] == pytest.approx(sum((1 - p) ** 2 for p in sure) / 10, abs=1e-5)
    said = [(p, 1) for p in sure] + [(1 - p, 0) for p in sure]  # each pair asked both ways round, in ten bins by hand
    bins = [[(p, y) for p, y in said if min(int(p * 10), 9) == k] for k in range(10)]
    gaps = [abs(sum(p for p, _ in b) - sum(y for _, y in b)) / 20 for b in bins if b]
    assert after["calibration"]["ece"] == pytest.approx(sum(gaps), abs=1e-5)
    assert [b["count"] for b in after["calibration"]["bins"]] == [len(b) for b in bins if b]
    assert set(rows(tmp_path / "run" / "metrics.jsonl")[0]) >= {
        "loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "grad_norm", "learning_rate", "tokens",
    }  # fmt: skip

    more = reward_model(
        quick(RewardModelConfig, tmp_path / "more", model=str(folder), steps=1), silent, pairs=pairs(20),
        eval_pairs=pairs(10, 40),
    )  # fmt: skip
    assert more["held_out"]["before"]["loss"] == pytest.approx(after["loss"], abs=1e-5)  # a reward model goes on


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it while loading
def test_an_adapter_of_a_reward_model(tmp_path: Path, start: Path, tokenizer: Any) -> None:
    scores = []
    encoded = [(encode_prompt(tokenizer, "4+4="), encode_answer(tokenizer, text)) for text in ("8", "899")]
    for merged in (True, False):
        config = quick(
            RewardModelConfig, tmp_path / str(merged), model=str(start), lora_r=4, merge_adapter=merged, steps=6
        )
        reward_model(config, silent, pairs=pairs(12))
        folder = tmp_path / str(merged) / "run" / "model"
        assert (folder / "adapter_config.json").exists() != merged
        scores.append(score_answers(load_reward_model(folder), encoded))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert scores[0][0] != pytest.approx(scores[0][1], abs=1e-3)
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        plain = [float(theirs(input_ids=torch.tensor([[*p, *a]])).logits[0, 0]) for p, a in encoded]
    assert plain == pytest.approx(scores[1], abs=1e-5)


def test_a_margin_is_a_number(tmp_path: Path, start: Path) -> None:
    config = quick(RewardModelConfig, tmp_path, model=str(start))
    with pytest.raises(ValueError, match="pair 'given-1' has margin 'wide'; it must be a finite number"):
        reward_model(config, silent, pairs=[{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}])


@pytest.mark.parametrize(("kind", "method"), [(DpoConfig, dpo), (RewardModelConfig, reward_model)])
def test_refusals(tmp_path: Path, start: Path, kind: Any, method: Any) -> None:
    def refused(message: str, given: Any = None, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            method(quick(kind, tmp_path, model=str(start), **changes), silent, pairs=given)
        assert not (tmp_path / "run").exists()

    refused("no pairs to train on: pairs_file is None; each row has prompt, chosen and rejected")
    refused("no pairs to train on: `pairs` is empty", [])
    with pytest.raises(ConfigError, match="train_file hold problems; here are pairs: use pairs_file"):
        kind(train_file="x.jsonl")
    long = [*pairs(1), Pair("1", "2", "3" * 1100, "long")]
    refused("pair 'long' is too long: prompt and answer have .* tokens, and the model 1024 positions", long)
    refused("pair 'sum-0' is too long: its prompt has .* and max_prompt_length is 1", pairs(1), max_prompt_length=1)
    refused("all 1 pairs are too long", pairs(1), max_prompt_length=1, long_prompts="drop")
    refused("pair 'x' has token 4000; the model's voc", [Pair("1", "2", "3", "x", chosen_ids=(4000,))])
    results = method(quick(kind, tmp_path, model=str(start), steps=1, long_prompts="drop"), silent, pairs=long)
    assert (results["examples"], results["dropped"]) == (1, 1)
    with pytest.raises(ConfigError, match="already holds a run"):
        method(quick(kind, tmp_path), silent)


def test_a_loss_that_is_not_finite_names_the_pair(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    given = [*pairs(3), Pair("1+1=", "2", "3", "bad", chosen_ids=(7,))]
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0.0  # type: ignore[operator]
        model.get_output_embeddings().weight[7] = float("nan")  # type: ignore[operator]
    before = weights(model)["model.norm.weight"]
    with pytest.raises(NonFinite, match="the loss is not finite at the pairs "):
        dpo(quick(DpoConfig, tmp_path, steps=1), silent, model=model, tokenizer=tokenizer, pairs=given)
    assert torch.equal(weights(model)["model.norm.weight"], before)


def test_ctrl_c_saves_what_there_is(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "batches", lambda *a: _two_then_stop(*a))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(p.to_json()) + "\n" for p in pairs(8)), encoding="utf-8")
    args = ["--model", str(start), "--pairs-file", str(file), "--output-dir", str(tmp_path / "run"), "--steps", "9"]
    assert main(["dpo", *args]) == 130
    assert "interrupted after 2 updates" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "results.json").read_text())["updates"] == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


def _two_then_stop(examples: Any, *_: Any) -> Any:
    yield examples
    yield examples
    raise KeyboardInterrupt


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs of the built-in model's own answers, then both methods on them."""
    pairs_run, small = tmp_path / "pairs", ["--steps", "1", "--output-dir"]
    sizes = [
        "--prompts-per-step",
        "6",
        "--eval-problems",
        "4",
        "--num-generations",
        "4",
        "--max-completion-length",
        "64",
    ]
    assert main(["pairs", *sizes, *small, str(pairs_run)]) == 0
    made = rows(pairs_run / "train.jsonl")
    assert made
    assert all(row["columns"]["chosen_reward"] > row["columns"]["rejected_reward"] for row in made)
    counts = json.loads((pairs_run / "results.json").read_text())["train"]
    assert (counts["problems"], counts["answers"], counts["pairs"]) == (6, 24, len(made))
    files = ["--pairs-file", str(pairs_run / "train.jsonl"), "--eval-pairs-file", str(pairs_run / "train.jsonl")]
    assert main(["dpo", *files, *small, str(tmp_path / "dpo")]) == 0
    assert main(["reward-model", *files, *small, str(tmp_path / "reward")]) == 0
    assert "pairs right" in capsys.readouterr().out
    assert main(["dpo", "--pair-file", "x"]) == 2
    assert "unknown setting 'pair_file'; did you mean 'pairs_file'?" in capsys.readouterr().err
