"""Activation checkpointing on packed rows: a layer keeps its input and computes the rest again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from groupline.models.attention import active_plan, planned, shared_attention
from groupline.models.packing import causal_lm, decoder, layers_of
from groupline.models.products import FastProducts


def checkpoint_layers(model: nn.Module) -> int:
    """Let every decoder layer of `model` compute its activations again in the backward; returns how many there are.

    Call it on the policy itself, after copies of it were made: they would call the policy's layers. Passes without
    gradients are as before. The second computation has the same attention plan, products, autocast and dropout.
    """
    layers = layers_of(decoder(model))
    for layer in layers:
        if isinstance(layer.forward, _Checkpointed):  # a model that was passed in a second time
            continue
        layer.forward = _Checkpointed(layer.forward, causal_lm(model))
    return len(layers)


class _Checkpointed:
    def __init__(self, forward: Any, model: nn.Module) -> None:
        self.forward, self.model = forward, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        plan = active_plan()

        @contextmanager
        def again() -> Iterator[None]:
            with ExitStack() as stack:
                if plan is not None:
                    stack.enter_context(shared_attention(self.model))
                    stack.enter_context(planned(plan))
                stack.enter_context(FastProducts())
                yield

        return checkpoint(
            self.forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs
        )
