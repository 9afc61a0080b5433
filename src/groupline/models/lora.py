"""LoRA adapters on a policy, and the sampler's view of it with the adapter folded in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from groupline.models.lora_linear import fuse_lora as fuse_lora
from groupline.models.packing import causal_lm
from groupline.parallel.mesh import whole


def add_lora(
    model: nn.Module,
    r: int,
    alpha: int | None = None,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "all-linear",
    *,
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM",
) -> Any:
    """A PEFT model with a fresh LoRA adapter (B = 0, so it starts equal to `model`). alpha defaults to 2 r.

    task: PEFT's; with SEQ_CLS the head `score` is trained whole and saved with the adapter.
    """
    alpha = 2 * r if alpha is None else alpha
    if r < 1 or alpha <= 0:
        raise ValueError(
            f"LoRA needs r >= 1 and alpha > 0 (its output is scaled by alpha / r); got r={r}, alpha={alpha}"
        )
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type=task,
    )
    with warnings.catch_warnings():  # peft asks for an attribute that transformers is renaming
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        policy = get_peft_model(model, config)
    fuse_lora(policy)
    return policy


class Mirror:
    """The policy as the sampler runs it: same structure, same tensors, adapters folded into weights of its own.

    Untouched weights are the policy's own tensors, so a full fine-tune costs nothing to publish. An adapted weight is
    computed afresh from the untouched base at each `refresh`; the base is never changed, so nothing can drift.
    With `dtype`, every weight of another type is kept as a copy in that type.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._source = source = causal_lm(policy)
        shared = {id(t): t for t in chain(source.parameters(), source.buffers())}
        self.borrowed = {id(p) for p in source.parameters()}  # the policy's own, which must stay where they are
        self.model = copy.deepcopy(source, shared)
        self.model.eval()
        self._fills: list[Callable[[], None]] = []
        for name, module in list(self.model.named_modules()):
            if isinstance(module, LoraLayer):
                self._fold(name, module, dtype)
        if dtype is not None:
            self._cast(dtype)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring folded and cast weights up to date with the policy."""
        for fill in self._fills:
            fill()

    def part(self) -> None:
        """Make weights that are the policy's own the sampler's, at their place: the policy will hold others (shares).

        They are then brought up to date like folded ones, by whole values that every rank gathers.
        """
        for name, module in self.model.named_modules():
            for key, own in module._parameters.items():
                if own is not None and id(own) in self.borrowed and own.requires_grad:
                    self._fills.append(_filler(own, self._origin(name, module), key))

    def _origin(self, name: str, module: nn.Module) -> Any:
        """The policy's module that one here is made of: of a folded one its base."""
        source: Any = self._source.get_submodule(name)
        return (
            source.get_base_layer() if isinstance(source, LoraLayer) and not isinstance(module, LoraLayer) else source
        )

    def _fold(self, name: str, layer: Any, dtype: torch.dtype | None) -> None:
        base = layer.get_base_layer()
        active = [a for a in layer.active_adapters if a in layer.lora_A]
        plain_lora = not any(a in layer.lora_variant or layer.lora_bias.get(a, False) for a in active)
        if not isinstance(base, nn.Linear) or not plain_lora:
            return  # the layer keeps its adapter and runs it at every step: slower, never stale
        source: Any = self._source.get_submodule(
            name
        )  # whose weights are looked up anew: sharing a model out replaces them
        plain = copy.copy(base)
        plain._parameters = dict(base._parameters)
        weight = nn.Parameter(torch.empty_like(base.weight, dtype=dtype or base.weight.dtype), requires_grad=False)
        plain._parameters["weight"] = weight
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, plain)

        def fill() -> None:
            total = whole(source.get_base_layer().weight)
            for a in active:
                up, down = whole(source.lora_B[a].weight), whole(source.lora_A[a].weight)
                wide = torch.promote_types(total.dtype, up.dtype)  # peft keeps fp32 adapters on a half-precision base
                total = torch.addmm(total.to(wide), up, down, alpha=source.scaling[a])
            weight.copy_(total)

        self._fills.append(fill)

    def _cast(self, dtype: torch.dtype) -> None:
        copies: dict[int, nn.Parameter] = {}
        for name, module in self.model.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is None or parameter.dtype == dtype or not parameter.is_floating_point():
                    continue
                if id(parameter) not in copies:
                    own = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
                    copies[id(parameter)] = own
                    self._fills.append(_filler(own, self._origin(name, module), key))
                module._parameters[key] = copies[id(parameter)]


def _filler(own: Tensor, module: nn.Module, key: str) -> Callable[[], None]:
    """What copies a parameter of the policy, looked up at each call: sharing a model out replaces it."""

    def fill() -> None:
        source = module._parameters[key]
        if source is not None and source is not own:
            own.copy_(whole(source))

    return fill


def is_peft(model: nn.Module) -> bool:
    return isinstance(model, PeftModel)
