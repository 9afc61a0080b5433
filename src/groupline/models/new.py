"""A small model from nothing: a byte-level BPE tokenizer with a chat template, and a Qwen3-shaped decoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class NewModel(BaseModel):
    """Shape of a decoder made from nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(default=1024, ge=300)
    hidden_size: int = Field(default=128, ge=8)
    intermediate_size: int = Field(default=384, ge=8)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=2)
    positions: int = Field(default=1024, ge=16)


def new_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE: nothing is out of vocabulary. Every digit, in any script, and every operator stands alone."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[+\-*/=<>.,]|\s+|[^\p{N}+\-*/=<>.,\s]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(shape: NewModel, tokenizer: Any, seed: int) -> nn.Module:
    """Qwen3 architecture, random weights, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        initializer_range=0.06,  # 0.02 suits wider models; at this width it only delays learning
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model
