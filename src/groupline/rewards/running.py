"""Running reward functions beside each other: sync ones in a thread each, async ones together on one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from groupline.rewards.contract import RewardFunction

GRACE = 0.5  # seconds that the event loop may be late to end a call whose time is over


class Expired(Exception):
    """A call took longer than its timeout."""


class Lane:
    """The calls of one function. Those of a sync function take turns, so it need not be safe for threads.

    timeout: most seconds a call may take, from its own start. here: a call runs on the thread that waits for it.
    """

    def __init__(self, function: RewardFunction, timeout: float | None = None, here: bool = False) -> None:
        self.function, self.timeout, self.here = function, timeout, here
        self.is_async = is_async(function)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._working = False
        self._started: list[Future[Any]] = []

    def start(self, keywords: Mapping[str, Any]) -> Callable[[], Any]:
        """Begin a call. What comes back waits for it: it returns the result, or raises what the function raised.

        Raises:
            Expired: (the waiting) the call took longer than the timeout.
        """
        if self.is_async:
            return self._start_async(keywords)
        call = functools.partial(_resolved, self.function, keywords)
        if self.here:
            return call
        job: Future[Any] = Future()
        within = functools.partial(_within, call, self.timeout)
        self._started.append(job)
        self._jobs.put(functools.partial(contextvars.copy_context().run, _fulfil, job, within))
        if not self._working:
            self._working = True
            threading.Thread(target=self._work, name="groupline-reward", daemon=True).start()
        return job.result

    def _start_async(self, keywords: Mapping[str, Any]) -> Callable[[], Any]:
        begun = time.monotonic()
        loop = _Loop.current()
        job = asyncio.run_coroutine_threadsafe(_bounded(self.function, keywords, self.timeout), loop.loop)
        self._started.append(job)

        def result() -> Any:
            if self.timeout is not None:
                wait([job], max(0.0, begun + self.timeout + GRACE - time.monotonic()))
                if not job.done():  # something keeps the loop itself from going on
                    loop.leave()
                    raise Expired(f"over {self.timeout:g} s")
            return job.result()

        return result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Drop calls that have not begun, cancel those on the event loop, and let the thread end."""
        for job in self._started:
            job.cancel()
        self._jobs.put(None)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, a partial of one, or an object with an async call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _fulfil(job: Future[Any], call: Callable[[], Any]) -> None:
    if not job.set_running_or_notify_cancel():
        return
    try:
        job.set_result(call())
    except BaseException as error:  # raised again where the result is asked for
        job.set_exception(error)


def _within(call: Callable[[], Any], timeout: float | None) -> Any:
    if timeout is None:
        return call()
    job: Future[Any] = Future()
    run = functools.partial(contextvars.copy_context().run, _fulfil, job, call)
    threading.Thread(target=run, name="groupline-reward-call", daemon=True).start()
    wait([job], timeout)
    if not job.done():
        raise Expired(f"over {timeout:g} s")
    return job.result()


def _resolved(function: RewardFunction, keywords: Mapping[str, Any]) -> Any:
    """The function's result, awaited if a function that does not look async gives something to await."""
    result = function(**keywords)
    if inspect.isawaitable(result):
        return asyncio.run_coroutine_threadsafe(_awaited(result), _Loop.current().loop).result()
    return result


async def _awaited(result: Any) -> Any:
    return await result


async def _bounded(function: RewardFunction, keywords: Mapping[str, Any], timeout: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            return await function(**keywords)
    except TimeoutError:
        if limit.expired():
            raise Expired(f"over {timeout:g} s") from None
        raise


class _Loop:
    """One event loop in a thread of its own for all async functions, kept for as long as it works.

    Clients that a function keeps from call to call belong to the loop they were opened on.
    """

    _current: _Loop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._until_left()), name="groupline-reward-loop", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    async def _until_left(self) -> None:
        self.loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._left.wait()

    @classmethod
    def current(cls) -> _Loop:
        with cls._lock:
            if cls._current is None or not cls._current._thread.is_alive():  # none yet, left, or lost in a fork
                cls._current = cls()
            return cls._current

    def leave(self) -> None:
        """Give up a loop that a function blocks: it ends when it can, and the next call opens another."""
        with _Loop._lock:
            if _Loop._current is self:
                _Loop._current = None
        self.loop.call_soon_threadsafe(self._left.set)
