"""Who attends to whom on a packed row, [prompt 1 | answer 1 | ... | answer G | prompt 2 | ...], in two ways.

On CPU attention is split: every segment (a prompt or an answer) attends causally to itself, all answers of a group to
their prompt in one product, and log-sum-exps merge the two. Nothing is copied for it and little or nothing padded.
Elsewhere, and where a window cuts, `JoinedAttention` gives the same numbers.

Legend: N tokens in the row, h query heads, k key/value heads, d head width, P tokens of a prompt, Q of its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from groupline.models.packed_blocks import Block, cut
from groupline.models.packed_joined import JoinedAttention

# Private, but the only operators on CPU that return and take the log-sum-exp; key/value heads may be fewer.
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

# In query-key pairs of all heads, forward and backward. Measured on one CPU thread: a call costs 400 pairs in a model
# of 9 heads of 64 and some 4,000 in one of 4 heads of 32; copying a row into a block and back costs 20.
_CALL, _MOVE = 2_000, 20
_CALL_ELSEWHERE = 2**19  # accelerators: launches are dear and pairs cheap; an estimate


class PackedPlan:
    """Shared-prefix attention for training, scoring and prefill."""

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        answer_lengths: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        keep: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """answer_lengths[b] holds the row lengths of prompt b's answers (an answer may have length 0).

        keep, if given, receives (layer, key [N, k, d], value [N, k, d]) of every layer, e.g. to fill a cache.
        Raises ValueError if the two differ in length, if there is no prompt, or on an empty one.
        """
        if len(prompt_lengths) != len(answer_lengths):
            raise ValueError(f"{len(prompt_lengths)} prompts but answers for {len(answer_lengths)}")
        if not prompt_lengths or min(prompt_lengths) < 1:
            raise ValueError("every packed prompt needs at least one token")
        self.keep = keep
        self.device = torch.device(device)
        self.longest = max(p + max(own, default=0) for p, own in zip(prompt_lengths, answer_lengths, strict=True))
        self._prompts: list[range] = []
        self._answers: list[range] = []
        self._owners: list[range] = []  # the prompt of each answer
        segments: list[range] = []
        self.groups: list[tuple[slice, slice]] = []  # rows of a prompt, rows of its answers
        place = 0
        for length, own in zip(prompt_lengths, answer_lengths, strict=True):
            prompt = range(place, place + length)
            place += length
            self._prompts.append(prompt)
            segments.append(prompt)
            for n in own:
                if n:
                    self._owners.append(prompt)
                    self._answers.append(range(place, place + n))
                    segments.append(self._answers[-1])
                    place += n
            if place > prompt.stop:
                self.groups.append((slice(prompt.start, prompt.stop), slice(prompt.stop, place)))
        self.tokens = place
        self.blocks: list[Block] = []  # of segments; none where attention is not split
        self._joined: JoinedAttention | None = None
        if self.device.type == "cpu" and _flash is not None:
            # Threads share the pairs of a call, not its cost.
            parts = cut(segments, call=_CALL * torch.get_num_threads(), move=_MOVE)
            self.blocks = [Block([segments[i] for i in part]) for part in parts]
        else:
            self.joined()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [N, h, d], key and value [N, k, d] -> [N, h, d]; a token sees the `window` positions up to its own."""
        if self.keep is not None:
            self.keep(layer, key, value)
        if window is not None and window >= self.longest:
            window = None
        one_kind = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
        if not self.blocks or window is not None or not one_kind:
            return self.joined()(query, key, value, scaling, window)
        out: Tensor = _Split.apply(query, key, value, self, scaling)  # type: ignore[no-untyped-call]
        return out

    def joined(self) -> JoinedAttention:
        """The other way, made on first use where attention is split."""
        if self._joined is None:
            call = _CALL * torch.get_num_threads() if self.device.type == "cpu" else _CALL_ELSEWHERE
            self._joined = JoinedAttention(self._prompts, self._answers, self._owners, self.device, call)
        return self._joined


class _Split(torch.autograd.Function):
    """Attention in two parts, merged: if outputs a and b over two sets of keys have log-sum-exps l and m, attention
    over both has output a + sigmoid(m - l) (b - a) and log-sum-exp log(e^l + e^m).

    (The online softmax of Milakov and Gimelshein, arXiv:1805.02867; with a shared prefix: Hydragen, arXiv:2402.05099.)
    In the backward each part is given the merged output and log-sum-exp, from which it makes its share of the whole
    softmax: algorithm 2 of FlashAttention-2, arXiv:2307.08691, needs no more.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: PackedPlan, scaling: float) -> Tensor:
        assert _flash is not None
        query, key, value = (_unit_stride(x) for x in (query, key, value))
        out = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in plan.blocks:
            own = _flash(*(block.read(x) for x in (query, key, value)), 0.0, True, scale=scaling)
            for x, part in zip((out, lse), own, strict=True):
                block.write(x, part)
        heads = _Heads(query, key)
        for prompt, answers in plan.groups:
            k, v = (heads.repeated(x[prompt]) for x in (key, value))
            near, near_lse = heads.split(out[answers]), heads.split(lse[answers])
            far, far_lse = _flash(heads.split(query[answers]), k, v, 0.0, False, scale=scaling)
            share = torch.sigmoid(far_lse - near_lse)  # of the probability, the prompt's
            near.lerp_(far, share.unsqueeze(-1).to(far.dtype))
            near_lse.copy_(torch.logaddexp(near_lse, far_lse))
        ctx.plan, ctx.scaling = plan, scaling
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert _flash_backward is not None
        query, key, value, out, lse = ctx.saved_tensors
        grad = _unit_stride(grads[0])
        results = to_query, to_key, to_value = [x.new_empty(x.shape) for x in (query, key, value)]
        for block in ctx.plan.blocks:
            inputs = (block.read(x) for x in (grad, query, key, value, out, lse))
            for x, part in zip(results, _flash_backward(*inputs, 0.0, True, scale=ctx.scaling), strict=True):
                block.write(x, part)
        heads = _Heads(query, key)
        for prompt, answers in ctx.plan.groups:
            g, q, o, m = (heads.split(x[answers]) for x in (grad, query, out, lse))
            k, v = (heads.repeated(x[prompt]) for x in (key, value))
            to_q, to_k, to_v = _flash_backward(g, q, k, v, o, m, 0.0, False, scale=ctx.scaling)
            heads.split(to_query[answers]).add_(to_q)
            to_key[prompt] += to_k.sum(1).transpose(0, 1)
            to_value[prompt] += to_v.sum(1).transpose(0, 1)
        return *results, None, None


class _Heads:
    """Views with the k key/value heads as the batch and the h / k query heads of each as its heads.

    The operator's backward shares the products of key/value heads among threads; so there are h to share, not k.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.kv = key.shape[1]
        self.repeat = query.shape[1] // self.kv

    def split(self, x: Tensor) -> Tensor:
        """[Q, h, d] -> [k, h / k, Q, d], or [Q, h] -> [k, h / k, Q]."""
        return x.view(len(x), self.kv, self.repeat, *x.shape[2:]).movedim(0, 2)

    def repeated(self, x: Tensor) -> Tensor:
        """[P, k, d] -> [k, h / k, P, d]."""
        return x.transpose(0, 1).unsqueeze(1).expand(-1, self.repeat, -1, -1)


def _unit_stride(x: Tensor) -> Tensor:
    """The operators read the last dimension as contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
