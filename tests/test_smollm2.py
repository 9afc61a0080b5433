"""A smoke test on a real model, SmolLM2-135M-Instruct, where `make smollm2` has put it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from groupline.config import Config
from groupline.models.load import load_model, load_tokenizer
from groupline.models.logprobs import find_head, token_logprobs
from groupline.models.packing import causal_lm, hidden_states, pack, why_not_shared
from groupline.training.grpo import train

FOLDER = Path(os.environ.get("GROUPLINE_SMOLLM2", Path(__file__).parent.parent / "runs" / "smollm2" / "start"))

pytestmark = pytest.mark.skipif(
    not (FOLDER / "config.json").exists(),
    reason=f"SmolLM2-135M-Instruct is not in {FOLDER}: `make smollm2` puts it there, or set GROUPLINE_SMOLLM2",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(FOLDER)).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(FOLDER))


def test_packed_log_probs_are_the_plain_ones(model: Any, tokenizer: Any) -> None:
    """Two prompts once each with two answers each, against an ordinary pass of every answer alone."""
    prompts = [
        tokenizer(t)["input_ids"] for t in ("Tom has 3 apples and buys 4 more.", "What is the capital of France?")
    ]
    answers = [
        [tokenizer(t)["input_ids"] for t in own]
        for own in ((" He has 7 apples.", " So 3 + 4 = 7, that is seven."), (" Paris", " It is the city of Paris."))
    ]
    assert why_not_shared(model) is None
    row = pack(prompts, answers)
    with torch.no_grad():
        packed, _ = token_logprobs(hidden_states(model, row), find_head(causal_lm(model)), row.targets)
        plain = []
        for prompt, own in zip(prompts, answers, strict=True):
            for answer in own:
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
                plain.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0])
    assert float((packed - torch.cat(plain)).abs().max()) < 1e-4


def test_one_step(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    settings = Config(
        model=str(FOLDER), task="arithmetic_en", lora_r=4, beta=0.04, steps=1, prompts_per_step=2, num_generations=2,
        max_completion_length=8, learning_rate=1e-4, eval_problems=0, rewards=("correct_number", "language_share"),
        output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    results = train(settings, lambda line: None, model=model, tokenizer=tokenizer)
    assert [s["step"] for s in results["steps"]] == [1]
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8"))
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    assert metrics["ratio/mean"] == 1
    assert abs(metrics["kl"]) < 1e-4
    assert None not in metrics.values()
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()
