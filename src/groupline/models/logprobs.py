"""Token log-probs from hidden states, a chunk of logits at a time.

Legend: N scored tokens, c tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from groupline.models.products import linear, suits

CHUNK_LOGITS = 3 << 22  # logits of a chunk (48 MiB in fp32): at a vocabulary of 49,152 the fastest of 2^21 .. 2^24


@dataclass(frozen=True)
class Head:
    """The map from hidden states to logits: z = cap * tanh((W h + b) * scale / cap)."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V] in fp32 (fp64 if the hidden states are)."""
        z = nn.functional.linear(hidden, self.weight, self.bias)
        return self.shape(z if z.dtype == torch.float64 else z.float())

    def shape(self, z: Tensor) -> Tensor:
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z


def find_head(model: nn.Module) -> Head:
    """The head of a transformers causal LM (its PEFT wrapper removed), with the scale and cap its config names."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if layer is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings; groupline trains causal language models")
    base = getattr(layer, "base_layer", layer)
    weight: Tensor = base.weight
    bias: Tensor | None = getattr(base, "bias", None)
    for name in getattr(layer, "active_adapters", []) if base is not layer else []:
        if not layer.disable_adapters and name in layer.lora_A:  # LoRA on the head: its effective weight and bias
            if name in layer.lora_variant:
                raise ValueError(
                    f"adapter {name!r} on the head is a variant of LoRA (DoRA for instance); use plain LoRA there"
                )
            scaling, up = layer.scaling[name], layer.lora_B[name]
            weight = (weight + scaling * (up.weight @ layer.lora_A[name].weight)).to(base.weight.dtype)
            if up.bias is not None:
                bias = (scaling * up.bias if bias is None else bias + scaling * up.bias).to(base.weight.dtype)
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(weight, bias, scale, getattr(config, "final_logit_softcapping", None))


def token_logprobs(hidden: Tensor, head: Head, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, in nats.

    hidden [N, H], targets [N] -> logp [N] (differentiable in hidden, weight and bias), entropy [N] (detached).
    At most `CHUNK_LOGITS` logits are scored at a time; the backward computes them again. Where a token's loss is a
    function of its own log-prob alone, `one_pass_loss` saves that. ValueError: a temperature that is not positive.
    """
    logp, entropy = _TokenLogProbs.apply(hidden, head.weight, head.bias, targets, head, temperature)  # type: ignore[no-untyped-call]
    return logp, entropy


class HeadChunks:
    """Scores and gradients of a head, chunk after chunk, in buffers [c, V] that every chunk uses again.

    To be used without autograd and without autocast: products are in `dtype`, everything else in fp32 or better.
    gradients: those of hidden [N, H], weight [V, H] and bias [V], None where not needed; `add_gradients` fills them.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        needed: Sequence[bool] = (False, False, False),
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; log-probs to train on need a positive one")
        self.hidden, self.head, self.targets, self.temperature = hidden, head, targets, temperature
        self.weight = head.weight.to(dtype)
        self.bias = None if head.bias is None else head.bias.to(dtype)
        vocabulary = len(head.weight)
        self.chunks = _chunks(len(hidden), vocabulary)
        size = (max((len(hidden[rows]) for rows in self.chunks), default=0), vocabulary)
        self._z = hidden.new_empty(size, dtype=torch.promote_types(dtype, torch.float32))
        self._fast = dtype == torch.float32 and suits(self._z, self.weight)  # then `linear` brings its own buffer
        if self._fast:
            self._z = self._z.new_empty((size[0], 0))
        self._e = self._z.new_empty(size)
        self._slope = torch.empty_like(self._e) if head.softcap and any(needed) else None
        self._half = None if dtype == self._z.dtype else hidden.new_empty(size, dtype=dtype)
        tensors = (hidden, head.weight, head.bias)
        self.gradients = [
            torch.zeros_like(x) if need and x is not None else None for x, need in zip(tensors, needed, strict=True)
        ]

    def per_token(self) -> Tensor:
        """An empty [N] in the format of log-probs."""
        return self._z.new_empty(len(self.hidden))

    def score(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Log-probs [c] and entropies [c] of these rows."""
        z = self._scaled_logits(rows)
        z -= z.amax(-1, keepdim=True)
        of_target = z.gather(-1, self.targets[rows, None])
        e = torch.exp(z, out=self._e[: len(z)])
        self._total = e.sum(-1, keepdim=True)  # [c, 1]
        log_total = self._total.log()
        self._logp = of_target - log_total
        return self._logp.squeeze(-1), (log_total - z.mul_(e).sum(-1, keepdim=True) / self._total).squeeze(-1)

    def add_gradients(self, rows: slice, g: Tensor) -> None:
        """What g = d loss / d logp [c] gives for the rows scored last: once, as it uses up their buffers."""
        e, h = self._e[: len(g)], self.hidden[rows].to(self.weight.dtype)
        # total * (softmax - onehot) = -total * d logp / d z: e but for the target. The rest of the factor is a number
        # a row, cheaper to apply to the narrow sides of the products.
        e.scatter_(-1, self.targets[rows, None], self._total * torch.expm1(self._logp))
        if self._slope is not None:
            e *= self._slope[: len(g)]
        factor = g[:, None] * (-self.head.scale / self.temperature) / self._total  # [c, 1]
        d_hidden, d_weight, d_bias = self.gradients
        if d_bias is not None:
            d_bias += e.T @ factor.squeeze(-1)
        if self._half is not None:
            e, factor = torch.mul(e, factor, out=self._half[: len(g)]), torch.ones_like(factor, dtype=h.dtype)
        if d_hidden is not None:
            d_hidden[rows] = linear(e, self.weight.T).mul_(factor)
        if d_weight is not None:
            if d_weight.dtype == e.dtype:
                d_weight.addmm_(e.T, h * factor)
            else:
                d_weight += e.T @ h

    def _scaled_logits(self, rows: slice) -> Tensor:
        """Logits / temperature [c, V], in the first buffer."""
        h, cap = self.hidden[rows].to(self.weight.dtype), self.head.softcap
        scale = self.head.scale / (cap or self.temperature)
        if self._fast:
            z = linear(h * scale, self.weight, None if self.bias is None else self.bias * scale)
        elif self._half is None:  # the scale costs nothing inside the product
            z = self._product(h, self._z[: len(h)], scale)
        else:
            z = self._z[: len(h)].copy_(self._product(h, self._half[: len(h)], 1.0))
            if scale != 1.0:
                z *= scale
        if cap:
            z.tanh_()
            if self._slope is not None:
                torch.square(z, out=self._slope[: len(h)]).neg_().add_(1)
            z *= cap / self.temperature
        return z

    def _product(self, h: Tensor, out: Tensor, scale: float) -> Tensor:
        if self.bias is None:
            return out.addmm_(h, self.weight.T, beta=0, alpha=scale)  # beta 0: what was in `out` is not read
        return torch.addmm(self.bias, h, self.weight.T, beta=scale, alpha=scale, out=out)


def chunk_bytes(rows: int, vocabulary: int, product: torch.dtype, softcap: bool = False) -> int:
    """Bytes of the buffers that `HeadChunks` uses for `rows` scored tokens: two of [c, V] in fp32, one more for a
    soft cap's slope, and one in the products' format where that is half.
    """
    c = max((part.stop - part.start for part in _chunks(rows, vocabulary)), default=0)
    wide = torch.promote_types(product, torch.float32).itemsize
    half = 0 if product.itemsize == wide else product.itemsize
    return c * vocabulary * (wide * (3 if softcap else 2) + half)


def product_dtype(head: Head) -> torch.dtype:
    """The format that the head's products are computed in here: autocast's, where it is on, as for `nn.Linear`."""
    device, dtype = head.weight.device.type, head.weight.dtype
    autocast = torch.is_autocast_enabled(device) and dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else dtype


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.temperature, ctx.dtype = head, temperature, product_dtype(head)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = HeadChunks(hidden, head, targets, temperature, ctx.dtype)
            logp, entropy = chunks.per_token(), chunks.per_token()
            for rows in chunks.chunks:
                logp[rows], entropy[rows] = chunks.score(rows)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = HeadChunks(hidden, head, targets, ctx.temperature, ctx.dtype, ctx.needs_input_grad[:3])
            for rows in chunks.chunks:
                chunks.score(rows)
                chunks.add_gradients(rows, grads[0][rows])
        return (*chunks.gradients, None, None, None)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    """Rows in chunks of at most `CHUNK_LOGITS` logits (at least one row), as even as they can be."""
    most = max(1, CHUNK_LOGITS // vocabulary)
    step = math.ceil(rows / max(1, math.ceil(rows / most)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, max(1, step))]
