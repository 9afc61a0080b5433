"""Functions beside each other, timeouts, and scoring group by group."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from groupline.records import Problem
from groupline.rewards import Judging, Reward, RewardError, Scores, call_rewards

LONG = 20  # seconds after which a test that waits in vain fails
PROBLEMS = [Problem(name, "q", str(i)) for i, name in enumerate("aabb")]
TEXTS = ["1", "2", "3", "4"]


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set only when the test is over, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()


def score(*rewards: Reward, **settings: Any) -> Scores:
    return call_rewards(rewards, problems=PROBLEMS, completions=TEXTS, **settings)


def ones(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def test_sync_functions_run_beside_each_other() -> None:
    meeting = threading.Barrier(3, timeout=LONG)

    def meet(completions: list[str]) -> list[float]:
        meeting.wait()  # passes only if three are here at once
        return [1.0] * len(completions)

    rewards = [Reward("x", meet), Reward("y", meet, main_thread=True), Reward("z", meet, timeout=LONG)]
    assert score(*rewards).totals == (3.0,) * 4


def test_async_functions_run_together_on_one_loop() -> None:
    loops = []
    event: asyncio.Event | None = None

    async def waits(completions: list[str]) -> list[float]:
        nonlocal event
        event = asyncio.Event()
        loops.append(asyncio.get_running_loop())
        await asyncio.wait_for(event.wait(), LONG)
        return [1.0] * len(completions)

    async def frees(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        while event is None:
            await asyncio.sleep(0)
        event.set()
        return [2.0] * len(completions)

    assert score(Reward("waits", waits), Reward("frees", frees)).totals == (3.0,) * 4
    assert score(Reward("frees", frees)).totals == (2.0,) * 4
    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1  # and the next call finds the same one


def test_the_thread_a_function_runs_on() -> None:
    def here(completions: list[str]) -> list[float]:
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    other = Reward("other", ones, weight=0.0)
    assert score(Reward("alone", here)).totals == (1.0,) * 4
    assert score(Reward("kept", here, main_thread=True), other).totals == (1.0,) * 4
    assert score(Reward("one of two", here), other).totals == (0.0,) * 4


def test_a_function_that_sets_signals() -> None:
    def alarm(completions: list[str]) -> list[float]:
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"'alarm' raised ValueError .*; Reward\(\.\.\., main_thread=True\) calls"):
        score(Reward("alarm", alarm), Reward("ones", ones))
    assert score(Reward("alarm", alarm, main_thread=True), Reward("ones", ones)).totals == (2.0,) * 4


def test_an_exception_on_the_calling_thread_waits_for_its_turn() -> None:
    def fails(completions: list[str]) -> list[float]:
        raise KeyError("mine")

    first = Reward("first", lambda completions: [1.0], timeout=LONG)
    with pytest.raises(RewardError, match="'first' must return a list of 4"):
        score(first, Reward("second", fails, main_thread=True))
    with pytest.raises(RewardError, match="'second' raised KeyError on row 0"):
        score(Reward("first", ones), Reward("second", fails, main_thread=True))


@pytest.mark.parametrize("beside", [False, True])
def test_a_sync_function_out_of_time(never: threading.Event, beside: bool) -> None:
    def stuck(completions: list[str]) -> list[float]:
        never.wait(LONG)
        return [1.0] * len(completions)

    others = [Reward("ones", ones)] if beside else []
    with pytest.raises(RewardError, match=r"'stuck' took longer than 0\.05 s on rows 0 to 3 \(problems 'a', 'b'\)"):
        score(Reward("stuck", stuck, timeout=0.05), *others)
    scores = score(Reward("stuck", stuck, timeout=0.05, on_timeout="none"), *others)
    assert [row["stuck"] for row in scores.rows] == [None] * 4
    assert scores.totals == ((1.0,) * 4 if beside else (None,) * 4)
    assert scores.timeouts == {"stuck": 4}


def test_an_async_function_out_of_time_is_cancelled() -> None:
    ended = threading.Event()

    async def stuck(completions: list[str]) -> list[float]:
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.set()
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"'stuck' took longer than 0\.05 s on rows 0 to 3"):
        score(Reward("stuck", stuck, timeout=0.05))
    assert ended.wait(LONG)


def test_an_async_function_that_blocks_the_loop(never: threading.Event) -> None:
    async def blocks(completions: list[str]) -> list[float]:
        never.wait(LONG)
        return [1.0] * len(completions)

    async def later(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    assert score(Reward("blocks", blocks, timeout=0.05, on_timeout="none")).timeouts == {"blocks": 4}
    assert score(Reward("later", later)).totals == (1.0,) * 4


def test_a_timeout_error_of_its_own_is_an_exception_like_others() -> None:
    def sync(completions: list[str]) -> list[float]:
        raise TimeoutError("the service is away")

    async def later(completions: list[str]) -> list[float]:
        raise TimeoutError("the service is away")

    for function in (sync, later):
        reward = Reward("f", function, timeout=LONG, on_timeout="none")
        with pytest.raises(RewardError, match=r"'f' raised TimeoutError on row 0 .*: the service is away"):
            score(reward)


def test_in_time_is_no_timeout() -> None:
    scores = score(Reward("ones", ones, timeout=LONG, on_timeout="none"), Reward("free", ones, timeout=LONG))
    assert scores.totals == (2.0,) * 4
    assert scores.timeouts == {"ones": 0}


def rank(completions: list[str], **kwargs: Any) -> list[float]:
    """How many of the answers beside it are smaller: right only where a call holds one group."""
    return [sum(other < text for other in completions) for text in completions]


@pytest.mark.parametrize(
    ("by_group", "group_size", "expected"),
    [(False, 2, (0, 1, 2, 3)), (True, 2, (0, 1, 0, 1)), (True, None, (0, 1, 0, 1)), (True, 1, (0, 0, 0, 0))],
)
def test_whole_batch_or_group_by_group(by_group: bool, group_size: int | None, expected: tuple[float, ...]) -> None:
    assert score(Reward("rank", rank, by_group=by_group), group_size=group_size).totals == expected


def test_a_group_is_judged_before_the_batch_is_whole() -> None:
    judged = threading.Event()
    calls: list[list[str]] = []

    def early(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(completions)
        judged.set()
        return rank(completions)

    rewards = [Reward("early", early, by_group=True), Reward("whole", rank)]
    with Judging(rewards) as judging:
        assert judging.by_group
        judging.add(1, problems=PROBLEMS[2:], completions=TEXTS[2:])
        assert judged.wait(LONG)
        scores = judging.finish(problems=PROBLEMS, completions=TEXTS, group_size=2)
    assert calls == [["3", "4"], ["1", "2"]]
    assert scores.rows == tuple({"early": float(i % 2), "whole": float(i)} for i in range(4))
    assert not Judging([Reward("whole", rank)]).by_group


def test_what_goes_wrong_in_a_group_names_the_batches_rows(never: threading.Event) -> None:
    def wrong(completions: list[str]) -> list[Any]:
        return [float("nan") if text == "4" else 1.0 for text in completions]

    def raises(completions: list[str]) -> list[float]:
        return [1 / (4 - int(text)) for text in completions]

    def stuck(completions: list[str]) -> list[float]:
        if "3" in completions:
            never.wait(LONG)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"row 3 \(problem 'b'\) is 'nan'"):
        score(Reward("wrong", wrong, by_group=True))
    with pytest.raises(RewardError, match=r"'raises' raised ZeroDivisionError on row 3 \(problem 'b'\)"):
        score(Reward("raises", raises, by_group=True))
    skipped = score(Reward("raises", raises, by_group=True), on_error="skip")
    assert skipped.totals == (1 / 3, 1 / 2, 1.0, None)
    assert skipped.errors == {"raises": 1}
    with pytest.raises(RewardError, match=r"'stuck' took longer than 0\.2 s on rows 2 to 3 \(problem 'b'\)"):
        score(Reward("stuck", stuck, by_group=True, timeout=0.2))
    counted = score(Reward("stuck", stuck, by_group=True, timeout=0.2, on_timeout="none"))
    assert counted.totals == (1.0, 1.0, None, None)
    assert counted.timeouts == {"stuck": 2}


def test_calls_of_one_sync_function_take_turns() -> None:
    busy = threading.Lock()

    def alone(completions: list[str]) -> list[float]:
        assert busy.acquire(blocking=False)
        threading.Event().wait(0.01)
        busy.release()
        return [1.0] * len(completions)

    assert score(Reward("alone", alone, by_group=True), group_size=1).totals == (1.0,) * 4
