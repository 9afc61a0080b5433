"""A decoder with a scalar head: the value model, and the reward model read at an answer's end.

Legend: M scored tokens of a row, H hidden width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from groupline.models.load import check_weights, load_model, resolve_model
from groupline.models.lora import fuse_lora
from groupline.models.packing import Ids, PackedRow, decoder, hidden_states, pack

_TEXT_HEADS = ("score", "classifier")  # what transformers calls the head of a sequence classifier


class ScalarModel(nn.Module):
    """One number for every state: head(hidden). `body` is a transformers decoder, with or without adapters.

    shared: whether packed rows with the prompt once give the body's own numbers (`sharable`). compute: number format
    of the body's passes; the head's own product is in fp32.
    """

    def __init__(
        self, body: nn.Module, head: nn.Linear, shared: bool = True, compute: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.body, self.head, self.shared, self.compute = body, head, shared, compute

    def forward(self, row: PackedRow) -> Tensor:
        """[M], differentiable, fp32: the number of the state that each scored token of the row is drawn from."""
        with self._autocast(row.input_ids.device):
            hidden = hidden_states(self.body, row, self.shared)
        value: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return value

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, self.compute, enabled=self.compute != torch.float32)


def value_of_policy(policy: nn.Module, shared: bool = True, compute: torch.dtype = torch.float32) -> ScalarModel:
    """A value model on its own copy of the policy's decoder, which trains what trains there (all weights, or adapters).

    The head starts at 0, so every value does: an advantage is then at first what was rewarded, and no more.
    """
    body = copy.deepcopy(decoder(policy))
    weight = next(body.parameters())
    head = nn.Linear(_width(body), 1, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return ScalarModel(body, head, shared, compute)


def load_scalar(
    name: str,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    *,
    lora_r: int = 0,
    lora_alpha: int | None = None,
    lora_targets: str | Sequence[str] = "all-linear",
    new_head: bool = False,
    trust_remote_code: bool = False,
) -> ScalarModel:
    """From a folder or hub id in the format of AutoModelForSequenceClassification with one label (or its adapter).

    new_head: also take a causal language model, whose head then starts at 0. lora_r: freeze the body and put a fresh
    adapter on it. Raises ValueError for another kind of model or number of labels, naming them.
    """
    source = resolve_model(name)
    kind, labels = _kind_of(source, trust_remote_code)
    if kind.endswith("ForSequenceClassification"):
        if labels != 1:
            raise ValueError(f"{name} is a classifier of {labels} labels; one label, a score, is needed (num_labels=1)")
        model = _load_classifier(source, trust_remote_code)
        (found,) = [getattr(model, h) for h in _TEXT_HEADS if isinstance(getattr(model, h, None), nn.Linear)] or [None]
        if found is None:
            raise ValueError(f"{name} is a {type(model).__name__} whose head is not one linear layer called score")
        head: nn.Linear = found
        body: Any = decoder(model)
    elif new_head:
        body = decoder(load_model(name, trust_remote_code=trust_remote_code))
        head = nn.Linear(_width(body), 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    else:
        raise ValueError(
            f"{name} is a {kind}; a reward model has a score head: a folder in the format of "
            "AutoModelForSequenceClassification with one label, as `groupline reward-model` writes"
        )
    body.requires_grad_(True)
    if lora_r:
        settings = LoraConfig(
            r=lora_r,
            lora_alpha=2 * lora_r if lora_alpha is None else lora_alpha,
            target_modules=lora_targets if isinstance(lora_targets, str) else list(lora_targets),
        )
        inject_adapter_in_model(settings, body)
        fuse_lora(body)
    scalar = ScalarModel(body, head, compute=compute).to(device).eval()
    scalar.shared = sharable(body)
    return scalar


@torch.no_grad()
def sharable(body: nn.Module) -> bool:
    """Whether packed rows give this decoder's own hidden states, tried on two short groups."""
    device, vocabulary = next(body.parameters()).device, int(body.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    draw = torch.Generator().manual_seed(0)

    def some(n: int) -> list[int]:
        return torch.randint(0, vocabulary, (n,), generator=draw).tolist()

    row = pack([some(7), some(4)], [[some(5), some(3)], [some(6)]], device)
    plain = hidden_states(body, row, shared=False)
    try:
        packed = hidden_states(body, row, shared=True)
    except RuntimeError:  # its attention cannot be shared, and says so
        return False
    return float((packed - plain).abs().max() / plain.abs().max()) < 1e-3


@torch.no_grad()
def reward_scores(
    model: ScalarModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Ids]], tokens: int = 4096
) -> list[list[float]]:
    """The score of every answer, read at its last token. answers[b] are the answers to prompts[b].

    tokens: most row tokens of a pass, a memory setting (a single larger group goes alone).
    """
    device = next(model.parameters()).device
    found: list[list[float]] = []
    part: list[int] = []
    size = 0

    def flush() -> None:
        if not part:
            return
        # A further token at the end of each answer makes its last real one a state that is scored; it is never fed.
        row = pack([prompts[b] for b in part], [[[*a, 0] for a in answers[b]] for b in part], device)
        lengths = torch.bincount(row.sequence.cpu())
        last = lengths.cumsum(0) - 1
        flat = model(row).cpu()[last].tolist()
        for b in part:
            found.append(flat[: len(answers[b])])
            del flat[: len(answers[b])]
        part.clear()

    for b, own in enumerate(answers):
        length = len(prompts[b]) + sum(map(len, own))
        if part and size + length > tokens:
            flush()
            size = 0
        part.append(b)
        size += length
    flush()
    return found


def _kind_of(source: str, trust_remote_code: bool) -> tuple[str, int]:
    """(architecture, labels) of what lies there; of an adapter, its task's."""
    adapter = Path(source) / "adapter_config.json"
    if adapter.exists():
        settings = json.loads(adapter.read_text(encoding="utf-8"))
        sequence = settings.get("task_type") == "SEQ_CLS"
        return ("AdapterForSequenceClassification", 1) if sequence else ("adapter", 0)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return next(iter(config.architectures or ["model without an architecture"])), int(config.num_labels)


def _load_classifier(source: str, trust_remote_code: bool) -> Any:
    if Path(source).is_dir():
        check_weights(Path(source))
    adapter = Path(source) / "adapter_config.json"
    base = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"] if adapter.exists() else source
    model = AutoModelForSequenceClassification.from_pretrained(
        resolve_model(base),
        num_labels=1,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
    )
    if not adapter.exists():
        return model
    return PeftModel.from_pretrained(model, source).merge_and_unload()


def _width(body: Any) -> int:
    return int(body.config.get_text_config().hidden_size)
