"""Sharing answers out over ranks and micro-batches: nothing lost, nothing twice, no rank far above its share."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from groupline.parallel.deal import balanced, share_out

GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
)


def laid_out(groups: list[tuple[int, list[int]]]) -> tuple[list[list[int]], list[int], list[int]]:
    """(answers of each group, row tokens of each prompt, of each answer)."""
    numbers = itertools.count()
    return (
        [[next(numbers) for _ in own] for _, own in groups],
        [p for p, _ in groups],
        [n for _, own in groups for n in own],
    )


@given(GROUPS, st.integers(8, 80), st.integers(1, 4))
def test_every_answer_is_in_one_piece_and_pieces_keep_to_the_limit(
    groups: list[tuple[int, list[int]]], tokens: int, ranks: int
) -> None:
    alive, prompts, own = laid_out(groups)
    group_of = {i: g for g, answers in enumerate(alive) for i in answers}
    shares = share_out(alive, prompts, own, tokens, ranks)
    assert len(shares) == ranks
    assert sorted(i for bins in shares for answers, _ in bins for i in answers) == list(range(len(own)))
    for answers, size in (piece for bins in shares for piece in bins):
        held = {group_of[i] for i in answers}
        least = sum(own[i] for i in answers) + sum(prompts[g] for g in held)
        assert size >= least  # a group's pieces may meet again in a bin, each with its prompt
        assert size <= tokens or len(answers) == 1


@given(st.lists(st.integers(1, 100), max_size=9), st.integers(1, 3))
def test_the_fullest_rank_is_within_a_third_of_the_best_sharing(sizes: list[int], ranks: int) -> None:
    def fullest(owners: tuple[int, ...] | list[int]) -> int:
        return max(sum(n for n, r in zip(sizes, owners, strict=True) if r == rank) for rank in range(ranks))

    best = (
        min(fullest(owners) for owners in itertools.product(range(ranks), repeat=len(sizes)))
        if len(sizes) < 8
        else None
    )
    found = fullest(balanced(sizes, ranks))
    if best is None:  # too many to try all: no sharing is below the mean or the largest
        best = max(-(-sum(sizes) // ranks), max(sizes))
        assert found <= best + max(sizes)
    else:
        assert found <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_one_group_is_cut_for_two_ranks_unless_its_prompt_is_most_of_it() -> None:
    alive, own = [[0, 1, 2, 3]], [10, 10, 10, 10]
    short, long = ([len(bins) for bins in share_out(alive, [n], own, 1000, 2)] for n in (5, 60))
    assert short == [1, 1]
    assert sorted(long) == [0, 1]
