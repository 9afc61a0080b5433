"""The model that a trainer was given, ready to train, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupline.config import ConfigError
from groupline.models.load import load_model, load_tokenizer
from groupline.models.lora import fuse_lora, is_peft
from groupline.trl.arguments import GRPOConfig


def load_policy(model: Any, tokenizer: Any, args: GRPOConfig, peft_config: Any) -> tuple[nn.Module, Any]:
    """(the model to train, its tokenizer). ConfigError: not a model, an unknown tokenizer, or two adapters."""
    if isinstance(model, (str, Path)):
        name = str(model)
        policy: Any = load_model(name, trust_remote_code=args.trust_remote_code)
    elif isinstance(model, nn.Module):
        policy = model
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
    else:
        raise ConfigError(f"model is a {type(model).__name__}; give a transformers model, a PeftModel, or a folder")
    if tokenizer is None:
        if not name:
            raise ConfigError("the model does not say where it is from; give its tokenizer as processing_class")
        tokenizer = load_tokenizer(name, args.trust_remote_code)
    if peft_config is not None:
        if is_peft(policy):
            raise ConfigError("the model has an adapter already; leave peft_config out to train it")
        from peft import get_peft_model

        torch.manual_seed(args.seed)
        policy = get_peft_model(policy, peft_config)
        fuse_lora(policy)
    if args.sync_ref_model and is_peft(policy):
        raise ConfigError("sync_ref_model needs the training of all weights; leave it out with an adapter")
    for parameter in policy.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()  # updates of a small learning rate would vanish in half precision
    return policy, tokenizer


def adapter_dropout(policy: Any) -> float:
    """The dropout that the policy's adapters were made with; 0 without one."""
    if not is_peft(policy):
        return 0.0
    return max((float(getattr(c, "lora_dropout", 0.0) or 0.0) for c in policy.peft_config.values()), default=0.0)
