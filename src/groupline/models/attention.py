"""Attention over packed rows in which every prompt stands once and its answers share it.

Any transformers decoder that takes its attention from `AttentionInterface` runs on one row of tokens

    [prompt 1 | answer 1 | ... | answer G | prompt 2 | ...]        position ids restart at the prompt's length

where an answer attends to its prompt and, causally, to itself. Layers other than attention work token by token,
so they need no change; attention asks the active `AttentionPlan` who may see whom (`PackedPlan`, or the sampler's).
Masks are by segment and position, never by place in the row, so sliding windows stay right.

Legend: N tokens in the row, h query heads, k key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from groupline.models.packed_plan import PackedPlan as PackedPlan

NAME = "groupline"
# Arguments that change the result of attention and that plans do not implement.
_REFUSED = ("s_aux", "position_bias", "alibi", "head_mask", "sinks")


class UnsupportedAttention(RuntimeError):
    """The model's attention cannot run on packed rows; the message says why. Callers fall back to padded rows."""


class AttentionPlan(Protocol):
    """Decides who attends to whom for one forward pass over a packed row."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [N, h, d], key and value [N, k, d] -> [N, h, d]."""
        ...


_active: ContextVar[AttentionPlan | None] = ContextVar("groupline_attention_plan", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, h, N, d]
    key: Tensor,  # [1, k, N, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    plan = _active.get()
    if plan is None:
        raise RuntimeError(f"attention implementation {NAME!r} runs only inside `planned(plan)`; use 'sdpa' elsewhere")
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if softcap is not None:
        refused.append("softcap")
    if dropout:
        refused.append("dropout (set attention_dropout to 0)")
    layer = getattr(module, "layer_idx", None)
    if refused or layer is None or query.shape[0] != 1:
        what = ", ".join(refused) or ("no layer_idx" if layer is None else f"batch of {query.shape[0]}")
        raise UnsupportedAttention(f"{type(module).__name__} needs {what}, which packed rows do not carry")
    _check_window(module, int(layer), sliding_window)
    out = plan.attend(
        int(layer),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return out.unsqueeze(0), None


def _check_window(module: nn.Module, layer: int, window: int | None) -> None:
    """A layer that is local by its configuration must say so in its call: its mask is the only other place."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or layer >= len(kinds):
        return
    kind = kinds[layer]
    if kind == "sliding_attention" and window != getattr(config, "sliding_window", None):
        raise UnsupportedAttention(f"layer {layer} is {kind} but passes the window {window}")
    if kind == "full_attention" and window is not None:
        raise UnsupportedAttention(f"layer {layer} is {kind} but passes the window {window}")
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedAttention(f"layer {layer} is {kind}, whose state packed rows do not carry")


AttentionInterface.register(NAME, _attention)


def active_plan() -> AttentionPlan | None:
    """The plan that forwards run under now, if any."""
    return _active.get()


@contextmanager
def planned(plan: AttentionPlan) -> Iterator[None]:
    """Run forwards of models whose attention is `NAME` under `plan`."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


def set_attention(model: nn.Module, name: str) -> None:
    """Set the attention implementation of every configuration inside `model`."""
    for config in _configs(model):
        config._attn_implementation_internal = name


@contextmanager
def shared_attention(model: nn.Module) -> Iterator[None]:
    """Switch `model` to packed attention, and back to what each part had."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    set_attention(model, NAME)
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _configs(model: nn.Module) -> list[Any]:
    seen = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in seen.values() if hasattr(c, "_attn_implementation_internal")]
