"""DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), by hand and beside TRL's."""

from __future__ import annotations

import pytest
from trl.rewards import get_soft_overlong_punishment

from groupline.rewards import soft_overlong

LENGTHS = [1, 7, 8, 9, 10, 11, 12, 40]


def test_by_hand() -> None:
    """Limit 12, buffer 4: free up to 8, then a quarter a token."""
    found = soft_overlong(12, 4)(completion_ids=[[0] * n for n in LENGTHS])
    assert found == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


@pytest.mark.parametrize(("limit", "buffer"), [(12, 4), (12, 12), (7, 1), (30, 13)])
def test_as_trl(limit: int, buffer: int) -> None:
    answers = [[0] * n for n in range(1, limit + 5)]
    theirs = get_soft_overlong_punishment(limit, buffer)(completion_ids=answers)
    assert soft_overlong(limit, buffer)(completion_ids=answers) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("buffer", [0, 13, -1])
def test_a_buffer_that_does_not_fit(buffer: int) -> None:
    with pytest.raises(ValueError, match=rf"the overlong buffer is {buffer} tokens; .* between 1 and .* 12"):
        soft_overlong(12, buffer)
