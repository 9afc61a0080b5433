"""log_tokens: what stands in rollouts.jsonl of each token, against ordinary forward passes of one answer at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import config, plain_logprobs, rows, run, sums, twin
from torch import nn

from groupline.chat import encode_prompt
from groupline.models.load import load_model
from groupline.objective import GRPO, clipped_tokens, policy_loss


def entropies(model: nn.Module, prompt: list[int], answer: list[int]) -> list[float]:
    """Of the distribution that each token was drawn from, nats."""
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0], -1)
    return (-(logp.exp() * logp).sum(-1))[len(prompt) - 1 : -1].tolist()


def test_the_numbers_of_the_last_pass(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Two passes over one rollout: ratios of the second are those of the weights that one pass alone leaves."""
    settings = {"steps": 1, "learning_rate": 5e-3, "log_tokens": 3}
    run(config(tmp_path / "one", **settings), twin(first), tokenizer)
    run(config(tmp_path / "two", **settings, num_iterations=2), twin(first), tokenizer)
    after = load_model(str(tmp_path / "one" / "model"), torch.device("cpu")).eval()
    prompts = {p.id: encode_prompt(tokenizer, p.prompt, {}) for p in sums(12)}
    clipped = []
    for row in rows(tmp_path / "two" / "rollouts.jsonl"):
        told, prompt = row["tokens"], prompts[row["problem"]]
        assert told["trained"] == (row["advantage"] != 0)
        if not told["trained"]:
            continue
        with torch.no_grad():
            new, old = plain_logprobs(after, prompt, row["ids"]), plain_logprobs(first, prompt, row["ids"])
        ratio = (new - old).exp()
        assert told["logprobs"] == pytest.approx(new.tolist(), abs=5e-5)
        assert told["ratio"] == pytest.approx(ratio.tolist(), abs=1e-4)
        assert told["entropy"] == pytest.approx(entropies(after, prompt, row["ids"]), abs=5e-5)
        assert "advantages" not in told  # all the answer's own
        bounds = [(r > 1.2) if row["advantage"] > 0 else -(r < 0.8) for r in ratio.tolist()]
        assert told.get("clipped", [0] * len(ratio)) == bounds
        clipped += bounds
    assert {-1, 0, 1} == set(clipped)
    for row in rows(tmp_path / "one" / "rollouts.jsonl"):  # on-policy
        assert set(row["tokens"].get("ratio", [1.0])) == {1.0}


def test_groups_with_signal_come_first_and_no_more_than_asked(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    from groupline.rewards import Reward

    def some(completion_ids: list[Any], prompts: list[str], **_: Any) -> list[float]:
        """Answers to the first prompt of a step all earn 0, others differ."""
        return [0.0 if p == prompts[0] else float(i) for i, p in enumerate(prompts)]

    judge = [Reward("some", some)]
    for count, groups in ((0, set()), (1, {1}), (2, {1, 2}), (9, {0, 1, 2})):
        folder = tmp_path / str(count)
        run(config(folder, steps=1, log_tokens=count), twin(first), tokenizer, rewards=judge)
        assert {r["group"] for r in rows(folder / "rollouts.jsonl") if "tokens" in r} == groups
    dead = [r["tokens"] for r in rows(tmp_path / "9" / "rollouts.jsonl") if r["group"] == 0]
    assert dead == [{"trained": False}] * 4


def test_clipped_tokens_are_those_that_the_facts_count() -> None:
    logp = torch.tensor([-1.0, -0.5, -2.0, -1.0, -1.0])
    old = torch.tensor([-1.5, -1.0, -1.0, -1.0, -0.5])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    place = {"sequence": torch.zeros(5, dtype=torch.long), "num_sequences": 1}
    ratio, clipped = clipped_tokens(logp, old, advantages, GRPO.replace(beta=0.0), **place)  # type: ignore[arg-type]
    assert ratio.tolist() == pytest.approx([math.exp(x) for x in (0.5, 0.5, -1.0, 0.0, -0.5)])
    assert clipped.tolist() == [1, 0, -1, 0, 0]  # pushed further out of the bounds: the first up, the third down
    _, facts = policy_loss(logp, old, advantages, GRPO.replace(beta=0.0), **place)  # type: ignore[arg-type]
    assert (int(facts.clip_high), int(facts.clip_low)) == (1, 1)
