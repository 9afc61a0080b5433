"""Sums over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 26  # bytes of one all-reduce: large enough for the network's rate, small beside the gradients


@torch.no_grad()
def sum_tensors(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over ranks. Every rank gives tensors of the same shapes in the same order.

    They travel as flat buckets of one format and device each. Reductions put together from one rank's pieces give all
    ranks the same bits, so copies of a model that start alike stay alike.
    """
    for bucket in buckets(tensors, BUCKET):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0])
            continue
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(flat)
        for tensor, summed in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def buckets(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours of one format and device, at most `size` bytes together unless one alone is more."""
    held: list[Tensor] = []
    total = 0
    for tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        same = held and (held[0].dtype, held[0].device) == (tensor.dtype, tensor.device)
        if held and (not same or total + own > size):
            yield held
            held, total = [], 0
        held.append(tensor)
        total += own
    if held:
        yield held
