"""The value model: a decoder with a scalar head, read at the state that each token of an answer is drawn from.

Legend: M scored tokens of a row, H hidden width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from groupline.models.load import VALUE_HEAD, check_weights, load_model, resolve_model, save_model
from groupline.models.lora import fuse_lora
from groupline.models.packing import Ids, PackedRow, by_tokens, decoder, eval_mode, hidden_states, pack
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


def load_value_model(
    name: str | Path,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    *,
    lora_r: int = 0,
    lora_alpha: int | None = None,
    lora_targets: str | Sequence[str] = "all-linear",
    trust_remote_code: bool = False,
) -> ValueModel:
    """A value model from the folder that a PPO run saved one in (`value_model`): its decoder and its head.

    From the folder or hub id of a reward model it takes that one's head over, from a language model's it has a head of 0.
    An adapter there is merged. lora_r: the body is frozen and a fresh adapter trains on it; 0: all weights train.
    Errors are those of `load_reward_model` and `load_model`.
    """
    body, head = _body_and_head(str(name), trust_remote_code)
    body.requires_grad_(True)
    head.requires_grad_(True)
    if lora_r:
        targets = lora_targets if isinstance(lora_targets, str) else list(lora_targets)
        alpha = 2 * lora_r if lora_alpha is None else lora_alpha
        inject_adapter_in_model(LoraConfig(r=lora_r, lora_alpha=alpha, target_modules=targets), body)
        fuse_lora(body)
    return ValueModel(body, head, sharable(body), compute).to(device).eval()


CARD = """# A value model

Of a PPO run of groupline: a decoder in Hugging Face format, and the head of its values in `value_head.safetensors`.
`groupline.load_value_model(FOLDER)` loads it, and the setting `value_model: FOLDER` of `groupline ppo` starts from it.
"""


def save_value_model(model: ValueModel, tokenizer: Any, folder: Path) -> None:
    """Write it for `load_value_model`, with its tokenizer, whole or not at all (see `save_model`).

    An adapter is merged into a copy: the values are then the same up to rounding, without one bit for bit.
    """
    head = {name: weight.detach().cpu().contiguous() for name, weight in model.head.state_dict().items()}
    body = _merged(model.body)
    save_model(body, tokenizer, folder, CARD, also=lambda into: save_file(head, into / VALUE_HEAD))


@torch.no_grad()
def answer_values(model: ValueModel, answers: Iterable[tuple[Ids, Ids]], token_limit: int = 4096) -> list[list[float]]:
    """Of every (prompt ids, answer ids) the value of each state that a token of the answer is drawn from, in order.

    Without dropout. token_limit: most tokens of a packed row, or one prompt with its answer if those alone are more.
    """
    found: list[list[float]] = []
    with eval_mode(model):
        for part in by_tokens(answers, lambda pair: len(pair[0]) + len(pair[1]), token_limit):
            row = pack([p for p, _ in part], [[a] for _, a in part], next(model.parameters()).device)
            found += [own.tolist() for own in model(row).split([len(a) for _, a in part])]
    return found


def _body_and_head(name: str, trust_remote_code: bool) -> tuple[nn.Module, nn.Linear]:
    folder = Path(resolve_model(name))
    if (folder / VALUE_HEAD).exists():
        check_weights(folder, value=True)
        saved = AutoModel.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
        )
        weights = load_file(folder / VALUE_HEAD)
        head = nn.Linear(weights["weight"].shape[1], 1, bias="bias" in weights)
        head.load_state_dict(weights)
        return saved, head
    if is_reward_model(name) or _is_reward_adapter(name):
        model = load_reward_model(name, trust_remote_code=trust_remote_code)
    else:
        model = load_model(name, trust_remote_code=trust_remote_code)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    body = decoder(model)
    score = getattr(model, "score", None)
    return body, score if isinstance(score, nn.Linear) else _zero_head(body)


def _merged(body: nn.Module) -> nn.Module:
    """A copy with its adapters merged, or itself without any."""
    if not any(isinstance(module, BaseTunerLayer) for module in body.modules()):
        return body
    body = copy.deepcopy(body)
    for name, module in list(body.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            body.set_submodule(name, module.get_base_layer())
        elif hasattr(module, "unload_and_optionally_merge_module"):  # a layer that PEFT trains whole
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            body.set_submodule(name, plain)
    return body


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
