"""A loss of token log-probs with its gradient in one pass over the head: no logit is computed twice.

Legend: N scored tokens, c tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from groupline.models.logprobs import Head, HeadChunks, product_dtype

PerTokenLoss = Callable[[Tensor, slice], Tensor]


def one_pass_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    per_token_loss: PerTokenLoss,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of a loss that is a function of each token's own log-prob, with log-probs and entropies as of
    `token_logprobs`.

    hidden [N, H], targets [N] -> loss (scalar, differentiable in hidden, weight and bias), logp [N] and entropy [N]
    (nats, both detached). per_token_loss(logp [c], rows) -> the weighted losses [c] of those rows, from operations
    that autograd knows; no token's loss may depend on another's log-prob.

    A chunk's gradient is taken as soon as it is scored and kept for the backward pass: 6 V H operations a token where
    scoring it again takes 8 (4 and 6 with a frozen head). So the backward can run only once, and raises RuntimeError
    after that. scale: what the loss will be multiplied with before its backward, so that what is kept in half
    precision is in the range that the scale is for; it does not change the result.
    ValueError: a temperature that is not positive.
    """
    inputs = (hidden, head.weight, head.bias)
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    loss, logp, entropy = _OnePassLoss.apply(*inputs, targets, head, temperature, per_token_loss, scale, needed)  # type: ignore[no-untyped-call]
    return loss, logp, entropy


class _OnePassLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        per_token_loss: PerTokenLoss,
        scale: float,
        needed: list[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = product_dtype(head)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = HeadChunks(hidden, head, targets, temperature, dtype, needed)
            logp, entropy, losses = chunks.per_token(), chunks.per_token(), chunks.per_token()
            for rows in chunks.chunks:
                logp[rows], entropy[rows] = chunks.score(rows)
                with torch.set_grad_enabled(any(needed)):
                    leaf = logp[rows].detach().requires_grad_(any(needed))
                    own = per_token_loss(leaf, rows)  # [c]
                losses[rows] = own.detach()
                if any(needed):
                    (g,) = torch.autograd.grad(own, leaf, torch.full_like(own, scale))
                    chunks.add_gradients(rows, g)
        ctx.gradients, ctx.scale = chunks.gradients, scale
        ctx.mark_non_differentiable(logp, entropy)
        return losses.sum(), logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("one_pass_loss: its gradient was taken once already; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # let go of them, so that autograd need not copy
        factor = float(grads[0]) / ctx.scale
        for d in gradients:
            if d is not None and factor != 1:
                d *= factor
        return (*gradients, *[None] * 6)
