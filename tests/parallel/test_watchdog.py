"""What the watchdog says and when it ends the process, on a store in memory and a clock that is set."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from groupline.parallel.watchdog import LOST, LOST_STOPPING, NOTICE, Watchdog


class Store(dict[str, bytes]):
    """As much of torch's key-value store as is used."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


class Ended(Exception):
    pass


def end(status: int) -> None:
    raise Ended(status)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return now


def trio(clock: list[float], timeout: float = 100.0) -> tuple[Watchdog, list[Watchdog], Store]:
    """Rank 0, whose verdicts are read, and ranks 1 and 2 on one store."""
    store, made = Store(), Watchdog.made
    dogs = []
    for rank in range(3):
        Watchdog.made = made  # as each process counts its own
        dogs.append(Watchdog(rank, 3, timeout, end))
        dogs[-1]._store = store
    return dogs[0], dogs[1:], store


def beat(*dogs: Watchdog) -> None:
    for dog in dogs:
        dog._beats += 1
        dog._beat()


def test_a_notice_names_who_is_missing_and_where_it_is(clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    dog, (one, two), _ = trio(clock)
    for each in (dog, one, two):
        each.now("training", 3)
    dog.wait("gradients")
    two.wait("gradients")
    beat(one, two)
    clock[0] += NOTICE - 1
    beat(one, two)
    dog._judge(NOTICE - 1)
    assert not capfd.readouterr().err
    clock[0] += 2
    beat(one, two)
    dog._judge(NOTICE + 1)
    told = capfd.readouterr().err
    assert "rank 0, step 3, training, gradients, has waited 31 s: rank 1 is in training of step 3, for 31 s" in told
    assert "rank 2" not in told
    dog._judge(NOTICE + 2)  # not again at once
    assert not capfd.readouterr().err


def test_after_the_deadline_the_process_ends_with_the_name_and_the_stacks(
    clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    dog, (one, two), _store = trio(clock)
    dog.wait("gradients")
    two.wait("gradients")
    beat(one, two)
    clock[0] += 101
    beat(one, two)
    with pytest.raises(Ended, match="1"):
        dog._judge(101)
    told = capfd.readouterr().err
    assert "rank 1 is in start, for 101 s; rank_timeout is 100 s" in told
    assert "where rank 0 is:" in told
    assert "test_watchdog.py" in told
    assert two._verdict_of_others() is not None


@pytest.mark.parametrize(("stopping", "limit"), [(False, LOST), (True, LOST_STOPPING)])
def test_a_rank_whose_beat_stops_is_gone(
    stopping: bool, limit: float, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    dog, (one, two), _ = trio(clock, timeout=10_000)
    dog._stopping = stopping
    one.now("scoring", 2)
    beat(one, two)
    dog.wait("all ranks' answers")
    dog._judge(1)  # now it is known
    clock[0] += limit - 0.1
    beat(two)
    dog._judge(limit)
    clock[0] += 0.2
    beat(two)
    with pytest.raises(Ended):
        dog._judge(limit)
    assert "rank 1 is gone; it was in scoring of step 2" in capfd.readouterr().err


def test_a_rank_that_ended_in_an_error_is_quoted_at_once(clock: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    dog, (one, two), _ = trio(clock)
    beat(one, two)
    dog.wait("gradients")
    one.now("training", 1)
    one.stop("ValueError: no such column")
    with pytest.raises(Ended):
        dog._judge(6)
    assert "rank 1 has ended in training: ValueError: no such column" in capfd.readouterr().err


def test_a_broken_exchange_is_explained_only_if_a_rank_is_gone(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, (one, two), _store = trio(clock)
    one.now("training", 4)
    dog.now("training", 4)
    dog.wait("gradients")
    beat(one, two)
    told = dog.explain(RuntimeError("Connection closed by peer\nand a stack"))
    assert told == (
        "rank 0, step 4, training, gradients: rank 1 is gone; it was in training of step 4, for 0 s; "
        "rank 2 is gone; it was in start, for 0 s (Connection closed by peer)"
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: beat(one, two))
    assert dog.explain(RuntimeError("out of memory")) is None


def test_beats_are_plain_json(clock: list[float]) -> None:
    dog, _, store = trio(clock)
    dog.now("training", 7)
    dog.wait("gradients")
    clock[0] += 3
    beat(dog)
    (value,) = [json.loads(v) for k, v in store.items() if k.endswith("beat/0")]
    assert value == {
        "number": 1, "step": 7, "phase": "training", "seconds": 3.0, "calls": 1, "waiting": "gradients", "left": None
    }  # fmt: skip
