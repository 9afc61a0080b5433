"""A model's shapes without its weights: from config.json alone, on torch's meta device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from groupline.models.floor import Shape
from groupline.models.load import adapter_settings, resolve_model
from groupline.models.logprobs import find_head
from groupline.models.packing import causal_lm, decoder


def load_shapes(name: str, trust_remote_code: bool = False) -> nn.Module:
    """What `load_model` would give, on the meta device: no weights are read, so the folder need not hold any."""
    source = resolve_model(name)
    base = adapter_settings(Path(source))
    if base is not None:
        model = load_shapes(base["base_model_name_or_path"], trust_remote_code)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted: nn.Module = get_peft_model(model, PeftConfig.from_pretrained(source))
        return adapted
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    if not isinstance(found, nn.Module):
        raise TypeError(f"{name} did not give a PyTorch model")
    return found


def shape_of_model(policy: nn.Module, element: int = 4) -> Shape:
    """A policy, with or without adapters, as the floor sees it; weights may be on any device.

    Of experts only those that a token meets count, by the configuration's `num_experts_per_tok`. Embeddings are no
    product; a head that is tied to them is. element: bytes of a weight while sampling.
    """
    inner: Any = causal_lm(policy)
    config = inner.config.get_text_config()
    adapters = {id(p) for n, p in policy.named_parameters() if "lora_" in n}
    embeddings = id(inner.get_input_embeddings().weight)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    active = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    trunk = sum(
        p.numel() * (active if p.dim() == 3 or ".experts." in n else 1)
        for n, p in decoder(policy).named_parameters()
        if p.dim() >= 2 and id(p) not in adapters and id(p) != embeddings
    )
    heads = getattr(config, "num_attention_heads", None) or 1
    return Shape(
        trunk=round(trunk),
        head=find_head(inner).weight.numel(),
        adapter=sum(p.numel() for p in policy.parameters() if id(p) in adapters),
        trainable=sum(p.numel() for p in policy.parameters() if p.requires_grad),
        layers=getattr(config, "num_hidden_layers", None) or 1,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        element=element,
    )
