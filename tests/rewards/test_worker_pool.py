"""Worker processes: replies in order, deadlines, deaths, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupline.rewards.worker_pool import WorkerPool

WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    word = json.loads(line)["word"]
    if word == "hang":
        time.sleep(600)
    if word == "die":
        os._exit(3)
    if word == "half":
        print("{", end="", flush=True)
        os._exit(3)
    print(json.dumps({"word": word, "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    (tmp_path / "echo_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    pool = WorkerPool("echo_worker", 3, 0.5)
    yield pool
    pool.close()


def ask(pool: WorkerPool, *words: str) -> list[str]:
    return [reply if isinstance(reply, str) else reply["word"] for reply in pool.map([{"word": w} for w in words])]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_replies_in_order_whatever_becomes_of_the_workers(pool: WorkerPool) -> None:
    words = [str(n) for n in range(30)]
    words[4], words[11], words[12], words[29] = "hang", "die", "half", "hang"
    expected = list(words)
    expected[4] = expected[29] = "timeout"
    expected[11] = expected[12] = "died"
    assert ask(pool, *words) == expected
    assert ask(pool) == []
    assert ask(pool, "ไทย\n") == ["ไทย\n"]


def test_no_more_processes_than_asked_for_or_needed(pool: WorkerPool) -> None:
    assert pool.pids() == []
    ask(pool, "a")
    assert len(pool.pids()) == 1
    ask(pool, *"abcdefgh")
    assert len(pool.pids()) == 3
    pids = pool.pids()
    pool.close()
    assert all(map(gone, pids))
    assert ask(pool, "b") == ["b"]
    (last,) = pool.pids()
    del pids
    pool._end()  # what happens when the pool is forgotten, or the interpreter ends
    assert gone(last)


def test_a_worker_killed_between_requests_costs_none_of_them(pool: WorkerPool) -> None:
    ask(pool, "a")
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    worker = pool._workers[0].process
    assert worker is not None
    worker.wait()
    assert ask(pool, "b") == ["b"]


def test_a_worker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_worker.py").write_text('print(\'{"error": "no library"}\')')
    monkeypatch.syspath_prepend(tmp_path)
    for module, why in (("no_worker", "no library"), ("never_there", "it ended")):
        pool = WorkerPool(module, 2, 1.0)
        with pytest.raises(RuntimeError, match=f"a worker process of {module} does not start: {why}"):
            pool.map([{}, {}, {}])
        assert pool.pids() == []
    with pytest.raises(ValueError, match=r"size is 0 and seconds 1\.0; both must be positive"):
        WorkerPool("json", 0, 1.0)


def test_what_is_left_is_dropped_when_a_worker_cannot_start(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other two are at their first requests then; the 40 after those are never asked."""
    asked: list[str] = []
    original = type(pool._workers[0]).ask

    def failing(self: object, request: dict[str, str]) -> object:
        asked.append(request["word"])
        if self is pool._workers[2]:
            raise RuntimeError("no library")
        return original(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pool._workers[0]), "ask", failing)
    with pytest.raises(RuntimeError, match="no library"):
        ask(pool, *["hang"] * 43)
    assert len(asked) <= 3
