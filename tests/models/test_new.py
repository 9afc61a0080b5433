"""A model from nothing: its tokenizer loses no text, and its shape is what was asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny import tiny_tokenizer

from groupline.models.load import end_ids
from groupline.models.new import NewModel, new_model, new_tokenizer
from groupline.models.packing import why_not_shared


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("aB \n\t\r\0'7๔กี่中é\u0301\u200b\u202e😀𝒳<|>"), max_size=40))
def test_nothing_is_out_of_vocabulary(text):
    own = tiny_tokenizer()
    assert own.decode(own(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("text", ["1234", "๑๒๓๔", "٤٢", "1+2=3", "-7*8", "1,234.50"])
def test_digits_and_operators_stand_alone(text):
    """However often they stood together in the text that the merges were learned from."""
    own = new_tokenizer([text] * 50, 400)
    pieces = own.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert len(pieces) == len(text)
    assert len(own(text)["input_ids"]) == len(text)  # each merged from its bytes, none with its neighbour


def test_merges_are_learned_from_the_texts():
    own = new_tokenizer(["apple banana"] * 20, 320)
    assert len(own("apple")["input_ids"]) == 1
    assert len(own("kiwi")["input_ids"]) == 4


def test_special_tokens():
    own = tiny_tokenizer()
    assert own.pad_token_id != own.eos_token_id
    for token in ("<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert len(own(token, add_special_tokens=False)["input_ids"]) == 1
    assert own.eos_token == "<|im_end|>"


def test_the_model_has_the_shape_and_the_ends():
    shape = NewModel(vocab_size=300, hidden_size=16, intermediate_size=24, layers=3, heads=2, kv_heads=1, head_dim=4,
                     positions=64)  # fmt: skip
    own = tiny_tokenizer()
    model = new_model(shape, own, seed=1)
    assert model.get_input_embeddings().weight.shape == (len(own), 16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.model.layers) == 3
    assert model.config.max_position_embeddings == 64
    assert end_ids(model) == {own.eos_token_id}
    assert why_not_shared(model) is None


def test_the_seed_makes_the_weights():
    shape = NewModel(hidden_size=16, intermediate_size=24, layers=1, heads=2, kv_heads=1, head_dim=4)
    a, b, c = (new_model(shape, tiny_tokenizer(), seed) for seed in (1, 1, 2))
    pairs = list(zip(a.parameters(), b.parameters(), c.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q, _ in pairs)
    assert not all(torch.equal(p, r) for p, _, r in pairs)


@pytest.mark.parametrize("bad", [{"vocab_size": 100}, {"layers": 0}, {"hidden": 32}])
def test_shapes_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        NewModel(**bad)
