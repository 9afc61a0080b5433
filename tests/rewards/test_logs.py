"""What functions record with `log_extra` and `log_metric`."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupline.records import Problem
from groupline.rewards import Reward, RewardError, Scores, call_rewards

PROBLEMS = [Problem(name, "q") for name in "aabb"]


def score(*rewards: Reward | Callable[..., Any], **settings: Any) -> Scores:
    made = [r if isinstance(r, Reward) else Reward(f"f{i}", r) for i, r in enumerate(rewards)]
    return call_rewards(made, problems=PROBLEMS, completions=["1", "2", "3", "4"], **settings)


def test_columns_and_means() -> None:
    def named(completions: Any, log_extra: Any = None, log_metric: Any = None) -> list[float]:
        log_extra("parsed", [int(text) for text in completions])
        log_metric("share", 0.25)
        return [1.0] * 4

    def by_kwargs(completions: Any, **kwargs: Any) -> list[float]:
        for text in completions:  # one at a time, as TRL allows
            kwargs["log_extra"]("text", [text * 2])
        kwargs["log_metric"]("share", 0.75)
        kwargs["log_metric"]("own", torch.tensor(2))
        return [1.0] * 4

    scores = score(named, by_kwargs)
    assert scores.extras == tuple({"parsed": i, "text": f"{i}{i}"} for i in (1, 2, 3, 4))
    assert scores.metrics == {"share": 0.5, "own": 2.0}


def test_group_by_group() -> None:
    def group(completions: Any, log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("place", list(range(len(completions))))
        log_metric("first", int(completions[0]))
        return [1.0] * 2

    scores = score(Reward("group", group, by_group=True))
    assert scores.extras == tuple({"place": i} for i in (0, 1, 0, 1))
    assert scores.metrics == {"first": 2.0}  # of 1 and 3


def test_two_functions_with_one_column() -> None:
    def logs(value: str) -> Callable[..., Any]:
        def function(log_extra: Any, **kwargs: Any) -> list[float]:
            log_extra("note", [value] * 4)
            return [1.0] * 4

        return function

    assert score(logs("x"), logs("y")).extras == ({"note": "x", "f1/note": "y"},) * 4


def test_values_become_plain(tmp_path: Path) -> None:
    values = [np.float32(0.5), torch.tensor([1, 2]), {"a": (np.int64(1), {2}, Fraction(1, 4))}, tmp_path]

    def function(log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("value", values)
        return [1.0] * 4

    found = [row["value"] for row in score(function).extras]
    assert json.loads(json.dumps(found)) == [0.5, [1, 2], {"a": [1, [2], 0.25]}, str(tmp_path)]


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    def short(log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("note", ["x"] * 3)
        return [1.0] * 4

    def text(log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("share", "a third")
        return [1.0] * 4

    with pytest.raises(RewardError, match=r"'f0' logged 3 values of 'note' with log_extra; .* its 4 completions"):
        score(short)
    with pytest.raises(RewardError, match=r"'f0' logged 'a third' \(str\) as metric 'share' .* a number"):
        score(text)


def test_rows_that_were_skipped_record_nothing() -> None:
    def function(completions: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("seen", completions)
        return [1 / (2 - int(text)) for text in completions]

    scores = score(function, on_error="skip")
    assert scores.extras == tuple({"seen": x} for x in ("1", None, "3", "4"))
