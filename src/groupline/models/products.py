"""Products of rows with a weight, by the fastest routine that torch has for them here.

On CPU in fp32 that is oneDNN's rather than BLAS's, which `nn.functional.linear` takes: 1.2 to 1.6 times its rate on AVX2
cores. A weight that many small batches are multiplied with (`Prepacked`) is laid out for it once, for another 1.3 to 2
times below 64 rows. Everything here equals `nn.functional.linear` up to rounding, and is it on other devices and formats.

Legend: N rows, K inputs, M outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from groupline.models.memory import free_memory

# A weight on the left of 2 to 7 rows is split over threads where others split the rows; measured on two AVX2 cores.
NARROW = range(2, 8)
_PLAIN = (Tensor, nn.Parameter)  # subclasses have ways of their own


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [M, K], bias [M] -> [..., M]. Not for autograd: gradients do not pass through."""
    if not suits(x, weight):
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if rows in NARROW:
        flat = x.reshape(rows, -1).t().contiguous()
        columns = torch.mm(weight, flat) if bias is None else torch.addmm(bias[:, None], weight, flat)
        return columns.t().reshape(*x.shape[:-1], -1)
    y: Tensor = _linear(x, weight, bias, "none", [], "")
    return y


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes the product of the two."""
    return (
        _linear is not None
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


class Prepacked:
    """Linear layers of one input as one product, in a layout of oneDNN's own. `refresh` takes the weights' values."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None]) -> None:
        self._weights, self._biases = weights, biases
        self.refresh()

    def release(self) -> None:
        """Give the memory back; until `refresh` there is nothing to multiply with."""
        self._packed: Any = None
        self.bias: Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        self.release()  # first, so that the new copy takes the old one's memory
        whole = self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)
        self._packed = _reorder(whole.detach(), None)
        parts = [b for b in self._biases if b is not None]
        self.bias = torch.cat(parts) if parts else None

    def tensors(self) -> list[Tensor | None]:
        """What a product reads and can tell the address of."""
        return [self.bias]

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """x [N, K] -> [N, M]; activation: 'none' or 'swish' (SiLU)."""
        y: Tensor = _linear(x, self._packed, self.bias, activation, [], "")
        return y

    def with_other(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        """The product 'add'ed to, or multiplied ('mul') with, other [N, M]."""
        y: Tensor = _binary(x, other, self._packed, self.bias, how)
        return y


def can_prepack(weight: Tensor) -> bool:
    """Whether `Prepacked` takes weights like this one."""
    return suits(torch.empty(1), weight) and not weight.is_meta


def worth_prepacking(model: nn.Module, device: torch.device | None = None, free: int | None = None) -> bool:
    """Whether a copy of all weights takes less than a quarter of the memory that is free, on a CPU.

    device, free: in place of where the model is and of what is free there, for a model that is not loaded.
    """
    parameters = list(model.parameters())
    size, device = sum(p.numel() * p.element_size() for p in parameters), device or parameters[0].device
    return device.type == "cpu" and size < (free_memory(device) if free is None else free) / 4


class FastProducts(TorchFunctionMode):
    """Inside, `nn.functional.linear` (and with it every linear layer of any model) takes `linear`'s way, with gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and suits(args[0], args[1]):
            return differentiable(*args)
        return func(*args, **(kwargs or {}))


def differentiable(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, differentiable once."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], out.shape[-1])
    return linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, (need_x, need_weight, need_bias) = grads[0], ctx.needs_input_grad
        return (
            linear(grad, weight.t()) if need_x else None,
            grad.t() @ x if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


def _find() -> tuple[Any, Any, Any]:
    """Torch's private oneDNN operators, or Nones if this build has none or they give other numbers."""
    ops = torch.ops.mkldnn
    try:
        plain, binary, reorder = (
            ops._linear_pointwise.default, ops._linear_pointwise.binary, ops._reorder_linear_weight.default
        )  # fmt: skip
        x, weight, other = (torch.linspace(-1, 1, a * b).view(a, b) for a, b in ((3, 5), (4, 5), (3, 4)))
        packed, expected = reorder(weight, None), F.linear(x, weight)
        pairs = [
            (plain(x, weight, None, "none", [], ""), expected),
            (plain(x, packed, None, "swish", [], ""), F.silu(expected)),
            (plain(other, weight.t(), None, "none", [], ""), other @ weight),
            (binary(x, other, packed, None, "add"), expected + other),
            (binary(x, other, packed, None, "mul"), expected * other),
        ]
        if all(torch.allclose(a, b, atol=1e-5) for a, b in pairs):
            return plain, binary, reorder
    except (AttributeError, RuntimeError, TypeError):  # a build without oneDNN, or another version's operators
        pass
    return None, None, None


_linear, _binary, _reorder = _find()


def use_linear(model: nn.Module) -> None:
    """Let every plain linear layer of `model`, which must be the caller's own copy, take its products by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _forward.__get__(module)  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)
