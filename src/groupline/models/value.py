"""The value model: a decoder with a scalar head, read at the state that each token of an answer is drawn from.

Legend: M scored tokens of a row, H hidden width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, nn

from groupline.models.load import load_model, resolve_model
from groupline.models.lora import fuse_lora
from groupline.models.packing import PackedRow, decoder, hidden_states, pack
from groupline.models.reward_head import is_reward_model, load_reward_model


class ValueModel(nn.Module):
    """value = head(hidden) of every state, with no bound on it. `body` is a transformers decoder without its head.

    shared: whether packed rows with every prompt once give the body's own numbers, see `hidden_states`. compute: number
    format of the body's passes; the head's own product is in its weights', fp32.
    """

    def __init__(
        self, body: nn.Module, head: nn.Linear, shared: bool = True, compute: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.body, self.head, self.shared, self.compute = body, head, shared, compute

    def forward(self, row: PackedRow) -> Tensor:
        """Values [M] in `row.targets`' order, differentiable: of the state before each scored token."""
        enabled = self.compute != torch.float32
        with torch.autocast(row.input_ids.device.type, self.compute, enabled=enabled):
            hidden = hidden_states(self.body, row, self.shared)
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return values


def value_of_policy(policy: nn.Module, shared: bool = True, compute: torch.dtype = torch.float32) -> ValueModel:
    """A value model on its own copy of the policy's decoder, in which the same weights train (all, or an adapter's).

    The head starts at 0 and so does every value: an advantage is then at first what was rewarded, and nothing else.
    """
    body = copy.deepcopy(decoder(policy))
    return ValueModel(body, _zero_head(body), shared, compute)


def load_value(
    name: str,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    *,
    lora_r: int = 0,
    lora_alpha: int | None = None,
    lora_targets: str | Sequence[str] = "all-linear",
    trust_remote_code: bool = False,
) -> ValueModel:
    """From the folder or hub id of a reward model, whose head it takes over, or of a language model: a head of 0.

    An adapter there is merged. lora_r: the body is frozen and a fresh adapter trains on it; 0: all weights train.
    Errors are those of `load_reward_model` and `load_model`.
    """
    if is_reward_model(name) or _is_reward_adapter(name):
        model = load_reward_model(name, trust_remote_code=trust_remote_code)
    else:
        model = load_model(name, trust_remote_code=trust_remote_code)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    body = decoder(model)
    score = getattr(model, "score", None)
    head: nn.Linear = score if isinstance(score, nn.Linear) else _zero_head(body)
    body.requires_grad_(True)
    head.requires_grad_(True)
    if lora_r:
        targets = lora_targets if isinstance(lora_targets, str) else list(lora_targets)
        alpha = 2 * lora_r if lora_alpha is None else lora_alpha
        inject_adapter_in_model(LoraConfig(r=lora_r, lora_alpha=alpha, target_modules=targets), body)
        fuse_lora(body)
    return ValueModel(body, head, sharable(body), compute).to(device).eval()


@torch.no_grad()
def sharable(body: Any) -> bool:
    """Whether packed rows give this decoder's own hidden states, tried on two short groups."""
    draw = torch.Generator().manual_seed(0)
    vocabulary = int(body.config.get_text_config().vocab_size)

    def some(n: int) -> list[int]:
        return torch.randint(0, vocabulary, (n,), generator=draw).tolist()

    row = pack([some(7), some(4)], [[some(5), some(3)], [some(6)]], next(body.parameters()).device)
    plain = hidden_states(body, row, shared=False)
    try:
        packed = hidden_states(body, row, shared=True)
    except RuntimeError:  # its attention cannot be shared, and says so (UnsupportedAttention is one)
        return False
    return float((packed - plain).abs().max() / plain.abs().max()) < 1e-3


def _zero_head(body: Any) -> nn.Linear:
    head = nn.Linear(int(body.config.get_text_config().hidden_size), 1, device=next(body.parameters()).device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _is_reward_adapter(name: str) -> bool:
    file = Path(resolve_model(name)) / "adapter_config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("task_type") == "SEQ_CLS"
