"""Drawing tokens: temperature and filters, one uniform number a draw, and the log-prob under that very distribution.

Legend: b rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from groupline.records import SamplingParams


def uniforms(seed: int, key: object, number: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`count` uniform numbers for one answer, from a counter-based generator keyed by (seed, key, number).

    They depend on nothing else, so an answer draws the same tokens wherever and whenever it runs.
    """
    digest = hashlib.blake2b(f"{seed}|{key}|{number}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def choose(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    logits [b, V] in fp32 or fp64, uniform [b] in [0, 1) -> ids [b], log-probs [b] under the sampled distribution,
    log-probs [b] under the plain model. Greedy (temperature 0) has sampled log-prob 0. The cumulative sum is rounded to
    the logits' precision, so a token's probability is exact to about 6e-8 in fp32.
    Raises ValueError if a row has a non-finite normaliser, which means the model produced NaN or infinity.
    """
    plain = torch.logsumexp(logits, -1, keepdim=True)  # [b, 1]
    if not bool(torch.isfinite(plain).all()):
        rows = (~torch.isfinite(plain.squeeze(-1))).nonzero().squeeze(-1).tolist()
        raise ValueError(
            f"the model's logits are not finite in rows {rows[:8]} of the batch; its weights may have diverged"
        )
    if params.temperature == 0:
        ids = logits.argmax(-1)
        return ids, torch.zeros_like(plain[:, 0]), (logits.gather(-1, ids[:, None]) - plain)[:, 0]
    scores, normaliser = logits, plain
    if params.temperature != 1 or params.filters:
        scores = filtered(logits / params.temperature if params.temperature != 1 else logits, params)
        normaliser = torch.logsumexp(scores, -1, keepdim=True)
    cumulative = torch.exp(scores - normaliser).cumsum_(-1)  # [b, V]
    total = cumulative[:, -1:]
    # Below the total whatever the rounding, so a token without probability is never drawn.
    point = torch.minimum(
        uniform.to(cumulative.dtype)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    ids = torch.searchsorted(cumulative, point, right=True)  # [b, 1]
    return ids[:, 0], (scores.gather(-1, ids) - normaliser)[:, 0], (logits.gather(-1, ids) - plain)[:, 0]


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
