"""The floor of the benchmark's steps: `groupline.models.floor`, with the shape of a Llama-like model from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupline.models.floor import Load, Shape, floor

__all__ = ["Load", "Shape", "floor", "shape_of"]


def shape_of(config: Mapping[str, Any], lora: int) -> Shape:
    """From a config.json of the Llama family (Llama, Qwen, SmolLM): q, k, v, o and gate, up, down in every layer.

    lora: rank of adapters on all seven; 0: every weight is trained (norms, a few thousand, are not counted).
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, kv_heads * width
    products = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    products += [(hidden, inner), (hidden, inner), (inner, hidden)]
    trunk = layers * sum(a * b for a, b in products)
    adapter = layers * sum(lora * (a + b) for a, b in products)
    head = config["vocab_size"] * hidden
    embeddings = head if config.get("tie_word_embeddings") else 2 * head
    return Shape(
        trunk=trunk, head=head, adapter=adapter, trainable=adapter if lora else trunk + embeddings, layers=layers,
        heads=heads, kv_heads=kv_heads, head_width=width,
    )  # fmt: skip
