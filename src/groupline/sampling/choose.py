"""Drawing tokens: temperature and filters, one uniform number a draw, and the log-prob under that very distribution.

Legend: b rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupline.records import SamplingParams

BLOCK = 128  # tokens summed at once when a cumulative distribution is searched


def uniforms(seed: int, key: object, number: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`count` uniform numbers for one answer, from a counter-based generator keyed by (seed, key, number).

    They depend on nothing else, so an answer draws the same tokens wherever and whenever it runs.
    """
    digest = hashlib.blake2b(f"{seed}|{key}|{number}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


class NonFiniteLogits(ValueError):
    """The model's logits, or weights, are NaN or infinite."""


def choose(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    logits [b, V] in fp32 or fp64, uniform [b] in [0, 1) -> ids [b], log-probs [b] under the sampled distribution,
    log-probs [b] under the plain model. Greedy (temperature 0) has sampled log-prob 0. Weights are rounded to the
    logits' precision and summed in fp64, so a token's probability is exact to about 6e-8 of itself in fp32.
    Raises NonFiniteLogits if a row has a non-finite normaliser, which means the model produced NaN or infinity.
    """
    drawn = draw(logits, uniform, params)
    refuse_non_finite((torch.isfinite(drawn[1]) & torch.isfinite(drawn[2])).cpu().numpy())
    return drawn


def refuse_non_finite(finite: NDArray[np.bool_]) -> None:
    """Raise NonFiniteLogits, naming rows of the batch, unless all are finite."""
    if not finite.all():
        rows = np.flatnonzero(~finite).tolist()
        raise NonFiniteLogits(
            f"the model's logits are not finite in rows {rows[:8]} of the batch; its weights may have diverged"
        )


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """`choose` without waiting for the device: a row whose normaliser is not finite gets some token, and a log-prob
    (its plain one at least) that is not finite.
    """
    if params.temperature == 0:
        plain = torch.logsumexp(logits, -1, keepdim=True)
        ids = logits.argmax(-1)
        return ids, torch.zeros_like(plain[:, 0]), (logits.gather(-1, ids[:, None]) - plain)[:, 0]
    if params.temperature == 1 and not params.filters:
        ids, logp = _invert(logits, uniform)
        return ids, logp, logp
    plain = torch.logsumexp(logits, -1, keepdim=True)  # [b, 1]
    ids, logp = _invert(filtered(logits / params.temperature, params), uniform)
    return ids, logp, (logits.gather(-1, ids[:, None]) - plain)[:, 0]


def _invert(scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [b] drawn from softmax(scores [b, V]) by the uniform numbers [b], their log-probs [b]).

    Two searches, first among sums of blocks and then within one, so that no cumulative sum over V is written.
    """
    vocabulary = scores.shape[-1]
    top = scores.amax(-1, keepdim=True)  # [b, 1]
    weights = torch.exp_(scores - top)  # [b, V] in (0, 1]
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    if weights.stride(0) == 1:  # [V, b] in memory, as narrow products leave it
        blocks = weights.t().reshape(-1, BLOCK, len(weights)).sum(1).t()
    else:
        blocks = weights.reshape(len(weights), -1, BLOCK).sum(-1)  # [b, V / BLOCK]
    ends = blocks.double().cumsum(-1)
    total = ends[:, -1:]
    point = _below(uniform.double()[:, None] * total, total)
    # Clamped for rows that are not finite: their search ends beyond the last token.
    block = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[-1] - 1)  # [b, 1]
    start = (ends - blocks).gather(-1, block)
    inside = weights.gather(-1, block * BLOCK + torch.arange(BLOCK, device=scores.device)).double().cumsum(-1)
    place = torch.searchsorted(inside, _below(point - start, inside[:, -1:]), right=True)
    ids = (block * BLOCK + place).clamp_(max=vocabulary - 1)  # [b, 1]
    logp = (scores.gather(-1, ids) - top).double() - total.log()
    return ids[:, 0], logp[:, 0].to(scores.dtype)


def _below(point: Tensor, end: Tensor) -> Tensor:
    """Below the end whatever the rounding, so that a token without probability is never drawn."""
    return torch.minimum(point.clamp(min=0), torch.nextafter(end, torch.zeros_like(end)))


def filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores with the tokens outside top-k, then top-p, then min-p set to -inf, each on what the one before left."""
    drop = -torch.inf
    if 0 < params.top_k < scores.shape[-1]:
        smallest = scores.topk(params.top_k, -1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, drop)
    if params.top_p < 1:
        ordered, index = scores.sort(-1, descending=True)
        p = torch.softmax(ordered, -1)
        outside = p.cumsum(-1) - p >= params.top_p  # what stands before a token already reaches top_p
        outside[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), drop)
    if params.min_p > 0:
        p = torch.softmax(scores, -1)
        scores = scores.masked_fill(p < params.min_p * p.amax(-1, keepdim=True), drop)
    return scores
