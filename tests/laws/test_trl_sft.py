"""Supervised fine-tuning against TRL's own SFTTrainer: one whole optimiser step of both on the same recorded examples."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import Kept, gradients, plain_logprobs, random_ids, relative_gap, tiny_lora, tiny_model, tiny_tokenizer
from torch import Tensor

from groupline.training.sft import supervised_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

PROMPTS = random_ids([4, 9, 3, 5, 2], seed=1)
ANSWERS = random_ids([3, 6, 1, 4, 11, 7], seed=2)
EXAMPLES = [(PROMPTS[0], ANSWERS[:2]), *((p, [a]) for p, a in zip(PROMPTS[1:], ANSWERS[2:], strict=True))]


def trl_step(model: Any, folder: Path, a_batch: int) -> tuple[float, dict[str, Tensor]]:
    """(the loss that TRL reports for an optimiser step on all six answers, the gradient that its optimiser would take)."""
    rows = [
        {"input_ids": [*prompt, *answer], "completion_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answers in EXAMPLES
        for answer in answers
    ]
    found: dict[str, Tensor] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **more: Any) -> None:
            found.update(gradients(model))

    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": a_batch,
        "gradient_accumulation_steps": -(-len(rows) // a_batch), "completion_only_loss": True, "max_length": None,
        "max_grad_norm": 0.0, "bf16": False, "use_cpu": True, "activation_checkpointing": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = SFTTrainer(
            model, args=SFTConfig(**settings), train_dataset=Dataset.from_list(rows),
            processing_class=copy.deepcopy(tiny_tokenizer()), callbacks=[Keep()],
        )  # fmt: skip
        done = trainer.train()
    assert done.global_step == 1
    return float(done.training_loss), found


def policy(kind: str) -> Any:
    vocabulary = {"vocab_size": len(tiny_tokenizer())}
    return tiny_lora(**vocabulary) if kind == "lora" else tiny_model("llama", **vocabulary)


@pytest.mark.parametrize("a_batch", [6, 2, 4], ids=["one batch", "three equal batches", "two unequal batches"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_loss_and_gradient_are_trls(kind: str, a_batch: int, tmp_path: Path) -> None:
    """A mean over the answers' tokens of the whole step, of both, whatever the micro-batches; prompts count nothing."""
    model = policy(kind)
    loss, theirs = trl_step(copy.deepcopy(model), tmp_path, a_batch)
    with torch.no_grad():  # the same once more, from whole forward passes of one answer each
        logps = [plain_logprobs(model, p, a) for p, answers in EXAMPLES for a in answers]
    assert loss == pytest.approx(-float(torch.cat(logps).mean()), abs=1e-5)
    for shared in (True, False):
        for tokens in (1, 25, 10**6):
            own = copy.deepcopy(model)
            optimiser = Kept(own)
            found, counted = supervised_step(own, optimiser, EXAMPLES, tokens, shared)
            assert found == pytest.approx(loss, abs=1e-5)
            assert counted == sum(map(len, ANSWERS))
            assert relative_gap(optimiser.kept, theirs) < 1e-5
