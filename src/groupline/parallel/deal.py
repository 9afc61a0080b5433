"""Sharing a step's answers out over micro-batches and ranks. Bookkeeping without torch."""

from __future__ import annotations

from collections.abc import Sequence

Piece = tuple[list[int], int]  # answers, and the row tokens they take with their prompts


def share_out(
    alive: Sequence[Sequence[int]], prompts: Sequence[int], own: Sequence[int], tokens: int, ranks: int = 1
) -> list[list[Piece]]:
    """For each rank its micro-batches.

    alive: the answers of each group that are trained on. prompts: row tokens of each group's prompt. own: row tokens of
    each answer. tokens: most row tokens of a micro-batch; a larger group is cut by answers, its prompt repeated, and
    one answer that alone is more stands alone.
    With several ranks a group above an even share is cut too, as far as every piece can be half answers: no rank
    should compute one group while the others wait.
    """
    groups = [g for g in range(len(alive)) if alive[g]]
    limits = dict.fromkeys(groups, tokens)
    if ranks > 1:
        pieces = [piece for g in groups for piece in _split(alive[g], prompts[g], own, tokens)]
        even = -(-sum(n for _, n in pieces) // ranks)
        limits = {g: min(tokens, max(even, 2 * prompts[g])) for g in groups}
    items = [piece for g in groups for piece in _split(alive[g], prompts[g], own, limits[g])]
    owner = balanced([n for _, n in items], ranks)
    return [_bins([item for item, r in zip(items, owner, strict=True) if r == rank], tokens) for rank in range(ranks)]


def balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the largest first, each to the rank that has least so far.

    The fullest rank has at most 4/3 of what the best sharing would give it (Graham 1969). Ties go to the lower rank and
    the earlier item, so every rank finds the same.
    """
    load = [0] * ranks
    found = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = min(range(ranks), key=load.__getitem__)
        found[item] = rank
        load[rank] += sizes[item]
    return found


def _split(alive: Sequence[int], prompt: int, own: Sequence[int], tokens: int) -> list[Piece]:
    """One group in pieces of at most `tokens` (or one answer, if that alone is more).

    Each piece repeats the prompt, so few are wanted. They are not evened out: a full piece and a small rest that finds
    room beside other groups' rests make fewer micro-batches than equal pieces do.
    """
    pieces = _bins([([i], own[i]) for i in alive], tokens - prompt)
    return [(sorted(piece), prompt + n) for piece, n in pieces]


def _bins(items: Sequence[Piece], tokens: int) -> list[Piece]:
    """First-fit decreasing, sizes within `tokens` but for single ones over it: few bins, and like sizes together."""
    bins: list[Piece] = []
    for answers, size in sorted(items, key=lambda item: -item[1]):
        for k, (held, total) in enumerate(bins):
            if total + size <= tokens:
                bins[k] = ([*held, *answers], total + size)
                break
        else:
            bins.append((answers, size))
    return bins
