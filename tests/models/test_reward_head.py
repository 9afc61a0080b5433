"""Scores of a reward model: transformers' own, whatever stands beside a text, and its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import adapted, random_ids, stir, tiny_model
from transformers import AutoModelForSequenceClassification

from groupline.models.load import load_model, load_tokenizer, save_model
from groupline.models.lora import add_lora
from groupline.models.reward_head import (
    add_reward_head,
    is_reward_model,
    load_reward_model,
    score_answers,
    score_sequences,
    why_scores_not_shared,
)


class Tokens:
    """What is asked of a tokenizer."""

    def __init__(self, pad: int | None, eos: int | None, special: tuple[int, ...] = ()) -> None:
        self.pad_token_id, self.eos_token_id, self.all_special_ids = pad, eos, list(special)
        self.added_tokens_decoder = dict.fromkeys(special, "")


def reward(kind: str, **changes: Any) -> Any:
    return add_reward_head(tiny_model(kind, **changes), Tokens(100, 99))


def alone(model: Any, ids: list[int]) -> float:
    """The whole transformers model on this text alone."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("limit", [1, 20, 10**6])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "neox"])
def test_a_score_is_that_of_the_text_alone(kind: str, limit: int) -> None:
    model = reward(kind)
    prompts = random_ids([5, 3, 4], vocabulary=99)
    answers = random_ids([6, 2, 9, 1, 4], seed=1, vocabulary=99)
    pairs = [(prompts[i], a) for i, a in zip([0, 0, 1, 2, 2], answers, strict=True)]
    expected = [alone(model, [*p, *a]) for p, a in pairs]
    assert max(expected) - min(expected) > 0.1
    assert score_answers(model, pairs, limit) == pytest.approx(expected, abs=1e-5)
    assert score_sequences(model, [[*p, *a] for p, a in pairs], limit) == pytest.approx(expected, abs=1e-5)
    assert score_answers(model, pairs, limit, shared=False) == pytest.approx(expected, abs=1e-5)


def test_a_model_whose_attention_is_not_shared_is_scored_on_plain_rows() -> None:
    model = reward("bloom")
    texts = random_ids([7, 3, 5], vocabulary=99)
    assert "BloomForSequenceClassification" in str(why_scores_not_shared(model))
    assert score_sequences(model, texts) == pytest.approx([alone(model, t) for t in texts], abs=1e-5)


def test_architectures_without_a_classifier_are_refused() -> None:
    with pytest.raises(ValueError, match="no sequence classifier with a head `score` of MambaForCausalLM"):
        reward("mamba")


def test_the_decoder_is_a_copy_with_the_adapter_merged() -> None:
    policy = adapted(tiny_model("llama"), r=2, target_modules="all-linear")
    stir(policy, 3, only="lora")
    ids = torch.tensor(random_ids([9]))
    with torch.no_grad():
        expected = policy.get_base_model().model(input_ids=ids).last_hidden_state
        model = add_reward_head(policy, Tokens(100, 99))
        assert torch.allclose(model.model(input_ids=ids).last_hidden_state, expected, atol=1e-4)
        model.model.embed_tokens.weight.add_(1)
        assert torch.equal(policy.get_base_model().model(input_ids=ids).last_hidden_state, expected)


def test_the_head_depends_on_the_seed_alone() -> None:
    base = tiny_model("llama")
    heads = [add_reward_head(base, Tokens(100, 99), seed).score.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize(
    ("tokens", "padding"), [(Tokens(100, 99), 100), (Tokens(99, 99, (99, 98)), 98), (Tokens(None, 99, (99, 7)), 7)]
)
def test_padding_is_a_token_that_ends_no_answer(tokens: Tokens, padding: int) -> None:
    """SmolLM2 pads with the token that ends an answer: transformers would read the score one token too early."""
    model = add_reward_head(tiny_model("llama"), tokens)
    assert model.config.pad_token_id == padding
    text = [3, 4, 5, 99]
    padded = torch.tensor([[*text, padding, padding], [6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        theirs = model(input_ids=padded, attention_mask=(padded != padding).long()).logits[0, 0]
    assert score_sequences(model, [text]) == pytest.approx([float(theirs)], abs=1e-5)


def test_no_token_to_pad_with() -> None:
    with pytest.raises(ValueError, match="none to pad with; add one"):
        add_reward_head(tiny_model("llama"), Tokens(99, 99, (99,)))


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    return load_model("builtin"), load_tokenizer("builtin")


def test_the_built_in_model_and_its_folder(builtin: tuple[Any, Any], tmp_path: Path) -> None:
    base, tokenizer = builtin
    model = add_reward_head(base, tokenizer, 5)
    save_model(model, tokenizer, tmp_path / "reward")
    texts = [tokenizer(t)["input_ids"] for t in ("12+30=42", "7 - 3", "<think>1+1=2</think>")]
    expected = [alone(model, t) for t in texts]
    assert score_sequences(load_reward_model(tmp_path / "reward"), texts) == pytest.approx(expected, abs=1e-5)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert [alone(theirs, t) for t in texts] == pytest.approx(expected, abs=1e-6)
    assert is_reward_model(str(tmp_path / "reward"))
    assert not is_reward_model("builtin")


def test_an_adapter_with_its_head(builtin: tuple[Any, Any], tmp_path: Path) -> None:
    base, tokenizer = builtin
    model = add_lora(add_reward_head(base, tokenizer), 2, task="SEQ_CLS").eval()
    stir(model, 4, size=0.05)
    texts = [tokenizer(t)["input_ids"] for t in ("12+30=42", "7 - 3")]
    expected = score_sequences(model, texts)
    save_model(model, tokenizer, tmp_path / "reward")
    assert (tmp_path / "reward" / "adapter_config.json").exists()
    assert score_sequences(load_reward_model(tmp_path / "reward"), texts) == pytest.approx(expected, abs=1e-5)
    merged = model.merge_and_unload()
    assert [alone(merged, t) for t in texts] == pytest.approx(expected, abs=1e-5)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    model = reward("llama")
    model.config.num_labels = 2
    model.score = torch.nn.Linear(32, 2, bias=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="with 2 labels; a reward model has one"):
        load_reward_model(tmp_path)
