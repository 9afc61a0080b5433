"""What a pass over packed rows keeps in memory, found by running the model on tensors that have shapes and no numbers.

The code that is run is the trainer's own, so whatever the architecture keeps for its backward is counted, LoRA, dropout
and autocast included. Nothing is loaded and nothing computed. A model of many layers that are alike is run with one layer
and with two, and the rest follows: everything here grows evenly with layers and with tokens.

Legend: N row tokens, L layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from groupline.models.attention import PackedPlan, UnsupportedAttention, planned, shared_attention
from groupline.models.checkpointing import checkpoint_layers
from groupline.models.live import LiveBytes
from groupline.models.packing import causal_lm, decoder, hidden_states, pack


class Untraceable(RuntimeError):
    """The model does not run without numbers (it chooses by them what to compute, for instance); the message says why."""


@dataclass(frozen=True)
class Line:
    """fixed + per_token * N bytes."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> int:
        return max(0, round(self.fixed + self.per_token * tokens))


@dataclass(frozen=True)
class Passes:
    """Bytes beyond weights and gradients, as functions of the row tokens.

    saved: what the trunk's forward leaves for its backward. backward: the most that is held in forward and backward,
    `saved` included, until the gradient reaches the embeddings; embeddings: the most from there on, where they train.
    forward: the most that is held in a forward without gradients.
    """

    saved: Line
    backward: Line
    embeddings: Line
    forward: Line

    def peak(self, tokens: float) -> int:
        """The most that forward and backward hold."""
        return max(self.backward(tokens), self.embeddings(tokens))


@dataclass(frozen=True)
class Group:
    """The rows that are tried: a prompt of `prompt` tokens with `answers` answers of `answer` tokens."""

    prompt: int
    answers: int
    answer: int

    @property
    def tokens(self) -> int:
        """Row tokens: an answer's last token is scored and not fed."""
        return self.prompt + self.answers * (self.answer - 1)

    @property
    def scored(self) -> int:
        return self.answers * self.answer


def trace(
    policy: nn.Module,
    group: Group,
    compute: torch.dtype,
    *,
    split: bool,
    shared: bool = True,
    checkpointing: bool = False,
) -> Passes:
    """policy: on any device, meta too; it is left as it is. compute: number format of the forward passes.

    split: attention is done as on a CPU (see `packed_plan`). shared: packed rows, or plain padded ones.
    checkpointing: layers compute their activations again in the backward.
    Raises Untraceable if the model cannot run without numbers.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _fake_copy(policy, mode)
    if checkpointing:
        checkpoint_layers(model)
    layers = _layers(decoder(model))
    total = 0 if layers is None else len(layers)
    counts = (2, 1) if layers is not None and total > 2 and _alike(layers) else (total,)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for count in counts:
        if layers is not None:
            del layers[count:]
        for groups in (1, 2):
            try:
                found[count, groups] = _run(model, mode, group, groups, compute, split, shared)
            except UnsupportedAttention as error:
                raise Untraceable(str(error)) from None
            except RuntimeError as error:  # the family of errors of tensors without numbers
                raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}") from error
    lines = []
    for kind in range(4):
        at = []
        for groups in (1, 2):
            value = float(found[counts[0], groups][kind])
            if len(counts) > 1:
                value += (total - 2) * (value - found[1, groups][kind])
            at.append(value)
        slope = (at[1] - at[0]) / group.tokens
        lines.append(Line(at[0] - slope * group.tokens, slope))
    return Passes(*lines)


def _run(
    model: Any, mode: Any, group: Group, groups: int, compute: torch.dtype, split: bool, shared: bool
) -> tuple[int, ...]:
    """The numbers of `Passes`, in its order, for `groups` groups. Gradients are there before, as from the second row on."""
    row = pack([[0] * group.prompt] * groups, [[[0] * group.answer] * group.answers] * groups)
    plan = PackedPlan([group.prompt] * groups, [[group.answer - 1] * group.answers] * groups)
    plan.joined()  # made here, as it looks into its indices: windows take it
    if not split:
        plan.blocks.clear()

    def run() -> Tensor:
        with torch.autocast("cpu", compute, enabled=compute != torch.float32):
            if not shared:
                return hidden_states(model, row, shared)
            with shared_attention(causal_lm(model)), planned(plan):
                ids, positions = row.input_ids[None], row.position_ids[None]
                out = decoder(model)(input_ids=ids, position_ids=positions, use_cache=False)
            hidden: Tensor = out.last_hidden_state[0].index_select(0, row.score_at)
            return hidden

    with mode:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        given = (row.input_ids, row.position_ids, row.score_at, row.targets, row.sequence)
        with LiveBytes(chain(model.parameters(), model.buffers(), gradients, given)) as live:
            with torch.no_grad():
                hidden = run()
            del hidden
            forward = live.peak
            live.restart()
            reached: list[int] = []

            def at_embeddings(_: Any) -> None:
                reached.append(live.peak)
                live.restart()

            def embedded(_: Any, __: Any, out: Any) -> None:
                if out.requires_grad:
                    out.register_hook(at_embeddings)

            handle = causal_lm(model).get_input_embeddings().register_forward_hook(embedded)  # type: ignore[operator]
            hidden = run()
            handle.remove()
            saved = live.live
            hidden.backward(torch.ones_like(hidden))  # type: ignore[no-untyped-call]
        return saved, reached[0] if reached else live.peak, live.peak if reached else 0, forward


def _fake_copy(policy: nn.Module, mode: Any) -> nn.Module:
    """The same modules on tensors without numbers, as if on a CPU."""
    memo: dict[int, Any] = {}
    with mode:
        for tensor in chain(policy.parameters(), policy.buffers()):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(policy, memo)


def _layers(body: nn.Module) -> nn.ModuleList | None:
    """The list of modules that holds most of the weights."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=None)


def _alike(layers: nn.ModuleList) -> bool:
    """Whether all have parts of the same kinds and sizes."""
    kinds = {
        tuple((type(m), *((p.shape, p.requires_grad) for p in m.parameters(recurse=False))) for m in layer.modules())
        for layer in layers
    }
    return len(kinds) == 1
