"""The value model: each value is that of a plain forward pass, wherever its weights come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import adapted, random_ids, stir, tiny_lora, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from groupline.models.load import load_model, load_tokenizer
from groupline.models.memory import weights_of
from groupline.models.packing import PackedRow, decoder, pack, why_not_shared
from groupline.models.reference import Reference
from groupline.models.reward_head import add_reward_head, load_reward_model
from groupline.models.value import (
    ValueModel,
    answer_values,
    load_value_model,
    save_value_model,
    sharable,
    value_of_policy,
)


class Tokens:
    pad_token_id, eos_token_id, all_special_ids, added_tokens_decoder = 100, 99, (), {}


def a_row() -> PackedRow:
    prompts, answers = random_ids([5, 3], vocabulary=99), random_ids([4, 1, 6], seed=1, vocabulary=99)
    return pack(prompts, [answers[:2], answers[2:]])


@torch.no_grad()
def plain(body: Any, head: nn.Linear, row: PackedRow) -> Tensor:
    """One answer at a time, without packing: the state before token t is what prompt and tokens up to t - 1 end in."""
    found = []
    for prompt, own in zip(row.prompts, row.answers, strict=True):
        for answer in own:
            for t in range(len(answer)):
                ids = torch.tensor([[*prompt, *answer[:t]]])
                found.append(head(body(input_ids=ids, use_cache=False).last_hidden_state[0, -1])[0])
    return torch.stack(found)


def stirred(model: ValueModel) -> ValueModel:
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(4))
        model.head.bias.fill_(0.3)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "neox", "bloom"])
def test_a_packed_value_is_that_of_a_plain_pass(kind: str) -> None:
    policy = tiny_model(kind)
    model = stirred(value_of_policy(policy, why_not_shared(policy) is None))
    row = a_row()
    with torch.no_grad():
        got = model(row)
    assert float(got.std()) > 0.1
    assert got.tolist() == pytest.approx(plain(decoder(policy), model.head, row).tolist(), abs=1e-5)


def test_with_an_adapter_the_same_weights_train() -> None:
    policy = tiny_lora()
    model = stirred(value_of_policy(policy))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if not n.startswith("head.")} == {
        n.replace("base_model.model.model.", "body.") for n, p in policy.named_parameters() if p.requires_grad
    }
    row = a_row()
    with torch.no_grad():
        assert model(row).tolist() == pytest.approx(plain(decoder(policy), model.head, row).tolist(), abs=1e-5)


def test_it_starts_at_zero_on_a_copy_of_its_own() -> None:
    policy = tiny_model("llama")
    model = value_of_policy(policy)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    with torch.no_grad():
        assert model(a_row()).tolist() == [0.0] * 11
    stir(model, 3)
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    assert not torch.equal(model.body.embed_tokens.weight, policy.model.embed_tokens.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("lora", [0, 2])
def test_from_a_reward_model_with_its_head(lora: int, tmp_path: Path) -> None:
    reward = add_reward_head(tiny_model("llama"), Tokens())
    reward.save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), lora_r=lora)
    row = a_row()
    with torch.no_grad():
        got = model(row)
    assert got.tolist() == pytest.approx(plain(reward.model, reward.score, row).tolist(), abs=1e-5)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(n.startswith("head.") or ("lora_" in n) == (lora > 0) for n in trained)
    assert {"head.weight"} < trained


def test_from_a_language_model(tmp_path: Path) -> None:
    policy = tiny_model("qwen3")
    policy.save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path))
    assert all(p.requires_grad for p in model.parameters())
    stirred(model)
    with torch.no_grad():
        got = model(a_row())
    assert got.tolist() == pytest.approx(plain(policy.model, model.head, a_row()).tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "neox", "bloom"])
def test_saved_and_loaded_it_is_the_same_model(kind: str, tmp_path: Path) -> None:
    """Every weight, the head's with its bias too, and every value: bit for bit; an earlier folder is replaced."""
    policy = tiny_model(kind)
    model = stirred(value_of_policy(policy, why_not_shared(policy) is None))
    for _ in range(2):
        save_value_model(model, tiny_tokenizer(), tmp_path / "value_model")
    again = load_value_model(str(tmp_path / "value_model"))
    assert again.shared == model.shared
    assert {n: w.tolist() for n, w in again.state_dict().items()} == {
        n: w.tolist() for n, w in model.state_dict().items()
    }
    assert all(p.requires_grad for p in again.parameters())
    with torch.no_grad():
        assert torch.equal(again(a_row()), model(a_row()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["value_model"]
    assert load_tokenizer(str(tmp_path / "value_model")).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "adapter and a layer trained whole"])
def test_an_adapter_is_merged_into_what_is_saved(whole: bool, tmp_path: Path) -> None:
    """What is saved is the base with PEFT's own merged weights; the model that was trained stays as it is."""
    policy = adapted(tiny_model("llama"), r=4, modules_to_save=["embed_tokens"]) if whole else tiny_lora()
    stir(policy, 6)
    model = stirred(value_of_policy(policy))
    before = {n: p.clone() for n, p in model.named_parameters()}
    save_value_model(model, tiny_tokenizer(), tmp_path)
    again = load_value_model(str(tmp_path))
    merged = policy.merge_and_unload().model
    with torch.no_grad():
        expected = ValueModel(merged, model.head)(a_row())
        assert torch.equal(again(a_row()), expected)
        assert again(a_row()).tolist() == pytest.approx(model(a_row()).tolist(), abs=1e-5)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    fresh = load_value_model(str(tmp_path), lora_r=2)
    assert {n.split(".")[0] if "lora_" not in n else "adapter" for n, p in fresh.named_parameters() if p.requires_grad} == {
        "adapter", "head",
    }  # fmt: skip


def test_values_of_answers(tmp_path: Path) -> None:
    policy = tiny_model("llama")
    model = stirred(value_of_policy(policy))
    asked = list(zip(random_ids([5, 3, 5], vocabulary=99), random_ids([4, 1, 6], seed=1, vocabulary=99), strict=True))
    for limit in (1, 4096):
        got = answer_values(model, asked, limit)
        assert [len(values) for values in got] == [4, 1, 6]
        for values, (prompt, answer) in zip(got, asked, strict=True):
            assert values == pytest.approx(
                plain(policy.model, model.head, pack([prompt], [[answer]])).tolist(), abs=1e-5
            )


def test_a_value_model_is_taken_for_nothing_else(tmp_path: Path) -> None:
    """Its head would be left out in silence, and another one drawn at random."""
    reward = add_reward_head(tiny_model("llama"), Tokens())
    reward.save_pretrained(tmp_path / "reward")
    save_value_model(load_value_model(str(tmp_path / "reward")), tiny_tokenizer(), tmp_path / "value")
    for load in (load_model, load_reward_model):
        with pytest.raises(ValueError, match="value holds a value model of PPO: it has no head for tokens or scores"):
            load(str(tmp_path / "value"))
    (tmp_path / "value" / "value_head.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_value_model(str(tmp_path / "value"))


def test_which_decoders_take_packed_rows() -> None:
    assert {kind: sharable(decoder(tiny_model(kind))) for kind in ("llama", "gemma3", "bloom", "mamba")} == {
        "llama": True, "gemma3": True, "bloom": False, "mamba": False,
    }  # fmt: skip


def test_the_size_of_models_counts_shared_weights_once() -> None:
    policy, full = tiny_lora(), tiny_model("llama")
    own = sum(p.numel() for p in policy.parameters())
    value = value_of_policy(policy)
    found = weights_of({"policy": policy, "value": value, "reference": Reference(policy, True).state()})
    assert found["policy"] == {"parameters": own, "bytes": 4 * own}
    head = policy.get_base_model().lm_head.weight.numel()
    assert found["value"]["parameters"] == own - head + 33  # 32 weights and a bias in place of the head
    assert found["reference"] == {"parameters": 0, "bytes": 0}  # the policy with its adapter off
    every = sum(p.numel() for p in full.parameters())
    copied = weights_of({"policy": full.double(), "reference": Reference(full).state()})
    assert copied == {name: {"parameters": every, "bytes": 8 * every} for name in ("policy", "reference")}
