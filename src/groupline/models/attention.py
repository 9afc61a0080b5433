"""Attention over packed rows in which every prompt stands once and its answers share it.

Any transformers decoder that takes its attention from `AttentionInterface` runs on one row of tokens

    [prompt 1 | answer 1 | ... | answer G | prompt 2 | ...]        position ids restart at the prompt's length

where an answer attends to its prompt and, causally, to itself. Layers other than attention work token by token,
so they need no change; attention asks the active `AttentionPlan` who may see whom. Masks are by segment and
position, never by place in the row, so sliding windows stay right.

Legend: N tokens in the row, h query heads, k key/value heads, d head width, B prompts, S answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

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


class PackedPlan:
    """Shared-prefix attention for training, scoring and prefill.

    Answers are padded to a common length for the attention product only, with keys [prompt ; own]: padded queries
    are dropped on the way out and padded keys are hidden by causality, so nothing else in the model sees padding.
    Backward needs no accumulating scatter but one: prompt keys receive the sum over their group's answers.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        answer_lengths: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        keep: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """answer_lengths[b] holds the row lengths of prompt b's answers (an answer may have length 0).

        keep, if given, receives (layer, key [N, k, d], value [N, k, d]) of every layer, e.g. to fill a cache.
        """
        if len(prompt_lengths) != len(answer_lengths):
            raise ValueError(f"{len(prompt_lengths)} prompts but answers for {len(answer_lengths)}")
        if not prompt_lengths or min(prompt_lengths) < 1:
            raise ValueError("every packed prompt needs at least one token")
        self.keep = keep
        self.device = device
        prompts: list[range] = []
        answers: list[range] = []
        owner: list[int] = []
        place = 0
        for b, (length, own) in enumerate(zip(prompt_lengths, answer_lengths, strict=True)):
            prompts.append(range(place, place + length))
            place += length
            for n in own:
                if n:
                    answers.append(range(place, place + n))
                    owner.append(b)
                    place += n
        self.tokens = place
        self.prompt_lengths = list(prompt_lengths)
        self.width = max(prompt_lengths)  # prompt columns
        self.depth = max((len(a) for a in answers), default=0)  # answer columns
        self.owner = torch.tensor(owner, dtype=torch.long, device=device)  # [S]
        pad_prompt, back_prompt = _padding(prompts, self.width, place)
        pad_answer, back_answer = _padding(answers, self.depth, place)
        # Where each row token sits in [padded prompts ; padded answers].
        unpad = torch.where(back_prompt >= 0, back_prompt, back_answer + len(pad_prompt))  # [N]
        self._to_prompt = _Moves(pad_prompt, back_prompt, device)
        self._to_answer = _Moves(pad_answer, back_answer, device)
        self._to_row = _Moves(unpad, torch.cat([pad_prompt, pad_answer]), device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        if self.keep is not None:
            self.keep(layer, key, value)
        b, s = len(self.prompt_lengths), len(self.owner)
        queries, keys, values = (self._to_prompt(x).view(b, self.width, *x.shape[1:]) for x in (query, key, value))
        parts = [_sdpa(queries, keys, values, self._prompt_mask(window), scaling).flatten(0, 1)]
        if s:
            own_q, own_k, own_v = (self._to_answer(x).view(s, self.depth, *x.shape[1:]) for x in (query, key, value))
            all_k = torch.cat([keys.index_select(0, self.owner), own_k], 1)  # [S, width + depth, k, d]
            all_v = torch.cat([values.index_select(0, self.owner), own_v], 1)
            parts.append(_sdpa(own_q, all_k, all_v, self._answer_mask(window), scaling).flatten(0, 1))
        out = torch.cat(parts) if s else parts[0]
        return self._to_row(out)

    def _prompt_mask(self, window: int | None) -> Tensor | None:
        """None means plain causal: padding stands at the end, where causality hides it."""
        if window is None or window >= self.width:
            return None
        at = torch.arange(self.width, device=self.device)
        gap = at[:, None] - at[None, :]
        return (gap >= 0) & (gap < window)

    def _answer_mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            lengths = torch.tensor(self.prompt_lengths, device=self.device)[self.owner]  # [S]
            rows = torch.arange(self.depth, device=self.device)  # own position within the answer
            cols = torch.arange(self.width, device=self.device)
            own = rows[:, None] - rows[None, :]
            see_own = (own >= 0) & (own < (window or self.depth + 1))  # [depth, depth]
            same = bool((lengths == self.width).all())
            if same:
                lengths = lengths[:1]
            see_prompt = (cols < lengths[:, None])[:, None, :]  # [S or 1, 1, width]
            if window is not None:
                gap = lengths[:, None, None] + rows[None, :, None] - cols[None, None, :]
                see_prompt = see_prompt & (gap < window)
            see_prompt = see_prompt.expand(-1, self.depth, -1)
            mask = torch.cat([see_prompt, see_own.expand(len(lengths), -1, -1)], -1)
            self._masks[window] = mask[:, None]  # [S or 1, 1, depth, width + depth]
        return self._masks[window]


def _padding(rows: list[range], width: int, total: int) -> tuple[Tensor, Tensor]:
    """Index that lays rows side by side at `width` (padding: -1), flattened, and its inverse [total] (absent: -1)."""
    pad = torch.full((len(rows), width), -1)
    for i, row in enumerate(rows):
        pad[i, : len(row)] = torch.arange(row.start, row.stop)
    pad = pad.flatten()
    back = torch.full((total,), -1)
    cells = (pad >= 0).nonzero().squeeze(1)
    back[pad[cells]] = cells
    return pad, back


class _Moves:
    """A move of token rows that reads each row at most once (index -1: zeros), so its backward is the inverse move."""

    def __init__(self, index: Tensor, inverse: Tensor, device: torch.device | str) -> None:
        self.forth, self.back = _Take(index, device), _Take(inverse, device)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _Move.apply(x, self)  # type: ignore[no-untyped-call]
        return out


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: _Moves) -> Tensor:
        ctx.moves = moves
        return moves.forth(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.moves.back(grads[0]), None


class _Take:
    def __init__(self, index: Tensor, device: torch.device | str) -> None:
        absent = (index < 0).nonzero().squeeze(1)
        self.index = index.clamp(min=0).to(device)
        self.absent = absent.to(device) if len(absent) else None

    def __call__(self, x: Tensor) -> Tensor:
        out = x.index_select(0, self.index)
        if self.absent is not None:
            out.index_fill_(0, self.absent, 0)
        return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[B, Q, h, d] x [B, K, k, d] -> [B, Q, h, d]; mask None is plain causal."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2)
