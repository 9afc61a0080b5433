"""A LoRA layer as one product and one in-place addition, in place of PEFT's passes over whole outputs.

Legend: N rows of x (tokens), r rank, in and out the layer's widths.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupline.models.products import linear


def fuse_lora(model: nn.Module) -> int:
    """Let the LoRA layers of `model` compute with `FusedLinear`; returns how many changed.

    Only PEFT's own LoRA on a Linear is taken; other layers, and layers whose forward somebody replaced, stay as they
    are. Weights, names and what is saved do not change. A second call changes nothing.
    """
    found = [m for m in model.modules() if type(m) is lora.Linear and "forward" not in m.__dict__]
    for module in found:
        module.__class__ = FusedLinear  # keeps the object: hooks, and references that others hold, stay valid
    return len(found)


class FusedLinear(lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA layer with a forward and backward that make no elementwise pass over [N, out] or [N, in].

    Everything but the plain case (one adapter active, unmerged, no dropout, one dtype, no autocast, no hooks within)
    runs PEFT's own forward.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out]."""
        adapter = None if args or kwargs else self._plain_adapter(x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        base, down, up = self.base_layer, self.lora_A[adapter], self.lora_B[adapter]
        return lora_product(x, base.weight, base.bias, down.weight, up.weight, self.scaling[adapter])

    def _plain_adapter(self, x: Tensor) -> str | None:
        """The one adapter to apply, or None if this call needs PEFT's own forward."""
        if self.disable_adapters or self.merged or torch.is_autocast_enabled(x.device.type):
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or active[0] in self.lora_variant:
            return None
        base, down, up, dropout = (
            self.base_layer, self.lora_A[active[0]], self.lora_B[active[0]], self.lora_dropout[active[0]]
        )  # fmt: skip
        if not (_plain_linear(base) and _plain_linear(down) and _plain_linear(up)):
            return None
        if down.bias is not None or up.bias is not None:
            return None
        if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or dropout.training):
            return None
        tensors = [x, base.weight, down.weight, up.weight] + ([] if base.bias is None else [base.bias])
        if any(type(t) not in (Tensor, nn.Parameter) or t.dtype != x.dtype for t in tensors):
            return None
        return str(active[0])


def _plain_linear(layer: nn.Module) -> bool:
    """Whether calling this layer is its matrix product and nothing else."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


def lora_product(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """x W^T + b + s (x A^T) B^T, differentiable once in every tensor.

    x [..., in], weight W [out, in], bias b [out], down A [r, in], up B [out, r], scaling s -> [..., out]. Keeps x and
    x A^T for the backward. Source of the formula: Hu et al. 2021, arXiv:2106.09685, equation 3.
    """
    rows = x.reshape(-1, x.shape[-1])  # [N, in]; out here, because a Function's own views may not be changed in place
    out: Tensor = _LoraProduct.apply(rows, weight, bias, down, up, scaling)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], out.shape[-1])


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        thin = linear(rows, down)  # [N, r]
        out = linear(rows, weight, bias).addmm_(thin, up.T, alpha=scaling)  # [N, out]
        ctx.save_for_backward(rows, thin, weight, down, up)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable  # x A^T is kept as a constant
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, thin, weight, down, up = ctx.saved_tensors
        need_x, need_weight, need_bias, need_down, need_up = ctx.needs_input_grad[:5]
        grad = grads[0]  # [N, out]
        d_x = d_down = None
        if need_x or need_down:
            d_thin = linear(grad, up.T).mul_(ctx.scaling)  # [N, r]
            if need_x:
                d_x = linear(grad, weight.T).addmm_(d_thin, down)
            if need_down:
                d_down = d_thin.T @ rows
        d_up = (grad.T @ thin).mul_(ctx.scaling) if need_up else None
        d_weight = grad.T @ rows if need_weight else None
        d_bias = grad.sum(0) if need_bias else None
        return d_x, d_weight, d_bias, d_down, d_up, None
