"""Token log-probs from hidden states, a chunk of logits at a time.

Legend: N scored tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_LOGITS = 1 << 23  # logits held at once (32 MiB in fp32): small enough to stay in cache-friendly pieces


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
    At most `CHUNK_LOGITS` logits exist at a time, forward and backward.
    """
    if temperature <= 0:
        raise ValueError(f"token_logprobs: temperature is {temperature}; log-probs to train on need a positive one")
    logp, entropy = _TokenLogProbs.apply(hidden, head.weight, head.bias, targets, head, temperature)  # type: ignore[no-untyped-call]
    return logp, entropy


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        for rows in _chunks(len(hidden), weight.shape[0]):
            z = head.logits(hidden[rows]).div_(temperature)  # [c, V]
            lse[rows] = torch.logsumexp(z, -1)
            logp[rows] = z.gather(-1, targets[rows, None]).squeeze(-1) - lse[rows]
            p = torch.exp(z - lse[rows, None])
            entropy[rows] = lse[rows] - torch.linalg.vecdot(p, z)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.head, ctx.temperature = head, temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        head: Head = ctx.head
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight) if need_weight else None
        d_bias = torch.zeros_like(bias) if need_bias else None
        for rows in _chunks(len(hidden), weight.shape[0]):
            g = grads[0][rows, None] / ctx.temperature  # [c, 1]
            h = hidden[rows].to(weight.dtype)  # under autocast the two may differ, and no autocast is on here
            z = head.logits(h)
            # d logp / d (z / temperature) = onehot - softmax
            dz = torch.exp(z / ctx.temperature - lse[rows, None]).mul_(-g)
            dz.scatter_add_(-1, targets[rows, None], g)
            if head.softcap:
                dz *= 1 - (z / head.softcap) ** 2
            if head.scale != 1.0:
                dz *= head.scale
            dz = dz.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (dz @ weight).to(hidden.dtype)
            if d_weight is not None:
                d_weight.addmm_(dz.T, h)
            if d_bias is not None:
                d_bias += dz.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    step = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
