"""What an answer's length costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def soft_overlong(max_completion_length: int, buffer: int) -> Callable[..., list[float]]:
    """A reward function that punishes answers for coming near the limit: DAPO's soft overlong punishment.

    0 up to `max_completion_length - buffer` tokens, from there on down by the same amount a token, to -1 at
    `max_completion_length` and beyond (arXiv 2503.14476, equation 13).

    Raises:
        ValueError: the buffer is not between 1 and the limit.
    """
    if not 1 <= buffer <= max_completion_length:
        raise ValueError(
            f"the overlong buffer is {buffer} tokens; it must be between 1 and max_completion_length, "
            f"{max_completion_length}"
        )
    free = max_completion_length - buffer

    def soft_overlong(*, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [-min(max(len(ids) - free, 0) / buffer, 1.0) for ids in completion_ids]

    return soft_overlong
