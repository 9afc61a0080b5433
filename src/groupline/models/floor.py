"""The least time one optimiser step can take: its arithmetic over the matrix rate, its bytes over the bandwidth.

Pure functions. What is counted is what no exact method can leave out: every prompt once for all of its answers, the
last token of an answer drawn but never fed, groups without signal not trained on when there is no KL penalty, the
language-model head on answer tokens only, no old log-probs, no recomputation but that of attention scores. A product
of an [n, a] and an [a, b] matrix takes 2 n a b operations. Norms, activations, softmax, drawing, rewards and the folding of
adapters into sampling weights count nothing, so the floor cannot be reached.

Legend: N trunk weights in matrix products, H head weights, A adapter weights, L layers, h heads, d head width,
P prompt tokens, C an answer's tokens, F operations a second, W bytes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A dense transformer as the floor sees it.

    trainable: weights that the optimiser updates. element: bytes of a weight that the sampler reads, and of a cached key
    or value.
    """

    trunk: int
    head: int
    adapter: int
    trainable: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    element: int = 4

    @property
    def pair(self) -> int:
        """Operations of one query against one key and its value, all layers and heads: 4 L h d."""
        return 4 * self.layers * self.heads * self.head_width

    @property
    def cache(self) -> int:
        """Bytes of one token's keys and values: 2 L kv_heads d, `element` each."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.element


@dataclass(frozen=True)
class Load:
    """One step: `prompts` groups of answers with these `lengths`; prompt: tokens of a prompt (a mean need not be whole)."""

    prompt: float
    prompts: int
    lengths: Sequence[int]
    trained_groups: int
    reference: bool


def floor(shape: Shape, load: Load, rate: float, bandwidth: float) -> dict[str, float]:
    """Seconds of one step by phase, and their `total`. rate: operations a second; bandwidth: bytes a second."""
    seconds = {
        "prefill": _prefill(shape, load, rate, bandwidth),
        "decode": _decode(shape, load, rate, bandwidth),
        "reference": _reference(shape, load, rate),
        "train": _train(shape, load, rate),
        "optimiser": 28 * shape.trainable / bandwidth,  # AdamW: weight, gradient, two moments in; all but one out
    }
    return seconds | {"total": sum(seconds.values())}


def _prefill(shape: Shape, load: Load, rate: float, bandwidth: float) -> float:
    """Each prompt once; its last token gives the first token of all its answers."""
    work = load.prompts * (2 * shape.trunk * load.prompt + 2 * shape.head + shape.pair * load.prompt**2 / 2)
    return max(work / rate, shape.element * (shape.trunk + shape.head) / bandwidth)


def _decode(shape: Shape, load: Load, rate: float, bandwidth: float) -> float:
    """Forward t feeds token t of every answer that has another to draw: the weights and keys read, or the products."""
    total = 0.0
    for t in range(1, max(load.lengths)):
        live = sum(length > t for length in load.lengths)
        keys = load.prompts * (load.prompt + live * t)  # a group's answers share the prompt's
        read = shape.element * (shape.trunk + shape.head) + shape.cache * keys
        rows = load.prompts * live
        work = 2 * (shape.trunk + shape.head) * rows + shape.pair * rows * (load.prompt + t)
        total += max(read / bandwidth, work / rate)
    return total


def _rows(load: Load) -> tuple[float, int, float]:
    """Of the groups trained on: (tokens fed, tokens scored, query-key pairs)."""
    fed = [length - 1 for length in load.lengths]
    tokens = load.trained_groups * (load.prompt + sum(fed))
    scored = load.trained_groups * sum(load.lengths)
    pairs = load.trained_groups * (load.prompt**2 / 2 + sum(c * load.prompt + c * c / 2 for c in fed))
    return tokens, scored, pairs


def _reference(shape: Shape, load: Load, rate: float) -> float:
    if not load.reference:
        return 0.0
    tokens, scored, pairs = _rows(load)
    return (2 * shape.trunk * tokens + 2 * shape.head * scored + shape.pair * pairs) / rate


def _train(shape: Shape, load: Load, rate: float) -> float:
    """Products forward, and backward to inputs and trained weights; attention costs 2.5 times its forward backward."""
    tokens, scored, pairs = _rows(load)
    passes = 4 if shape.adapter else 6
    work = passes * (shape.trunk * tokens + shape.head * scored) + 6 * shape.adapter * tokens
    return (work + 3.5 * shape.pair * pairs) / rate
