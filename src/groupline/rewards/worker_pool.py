"""Processes that answer requests, each of which may be killed without harm to the run.

Python code that hangs inside a library cannot be stopped from another thread of the same process; a process can.
A worker is `python -m MODULE SECONDS` that writes `{"ready": true}` once it can work, or `{"error": why}`, and then one
JSON line for each JSON line it reads. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Literal

START_SECONDS = 120.0  # imports on a busy machine
Reply = dict[str, Any] | Literal["timeout", "died"]


class WorkerPool:
    """At most `size` processes of one module, started on use and ended with the pool.

    seconds: deadline of one request. A process that is not done by then is killed, and another takes its place.
    """

    def __init__(self, module: str, size: int, seconds: float) -> None:
        if size < 1 or seconds <= 0:
            raise ValueError(f"size is {size} and seconds {seconds}; both must be positive")
        self._workers = [_Worker(module, seconds) for _ in range(size)]
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _stop_all, self._workers)  # at the latest when the interpreter ends

    def map(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """A reply for each request, in order: "timeout" past the deadline, "died" if the process ended by itself.

        Raises:
            RuntimeError: a process does not start; the message says why.
        """
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(requests)):
            todo.put(number)
        replies: list[Reply] = ["died"] * len(requests)

        def serve(worker: _Worker) -> None:
            with _dropping(todo):  # a process does not start: neither will the others
                while (number := _next(todo)) is not None:
                    replies[number] = worker.ask(requests[number])

        busy = self._workers[: len(requests)]
        # Ctrl-C reaches this thread; the others then stop after their present request.
        with self._lock, ThreadPoolExecutor(max(len(busy), 1)) as threads, _dropping(todo):
            list(threads.map(serve, busy))
        return replies

    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [w.process.pid for w in self._workers if w.process is not None]

    def close(self) -> None:
        """End the processes. The pool may be used again."""
        with self._lock:
            _stop_all(self._workers)


class _Worker:
    """One process at a time."""

    def __init__(self, module: str, seconds: float) -> None:
        self.module, self.seconds = module, seconds
        self.process: subprocess.Popen[str] | None = None

    def ask(self, request: Mapping[str, Any]) -> Reply:
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # it ended between requests, which is not this request's doing
        process = self.process or self._start()
        line, late = _exchange(process, json.dumps(request) + "\n", self.seconds)
        if late or not line:
            self.stop()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        return "timeout" if late else "died"

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a process that is gone
                    stream.close()

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join(p for p in sys.path if p)  # the worker finds what this process finds
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": paths},
        )
        line, _ = _exchange(process, "", START_SECONDS)
        said = json.loads(line) if line else {"error": f"it ended, or said nothing for {START_SECONDS:g} s"}
        if "error" in said:
            self.stop()
            raise RuntimeError(f"a worker process of {self.module} does not start: {said['error']}")
        return process


def _exchange(process: subprocess.Popen[str], text: str, seconds: float) -> tuple[str, bool]:
    """(the process's next line, "" if it ended; whether it was killed at the deadline)."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        return _read_line(process, text), _ended(timer, late)
    finally:
        timer.cancel()


def _read_line(process: subprocess.Popen[str], text: str) -> str:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    try:
        stdin.write(text)
        stdin.flush()
    except OSError:  # it is gone
        return ""
    return _whole_line(stdout)


def _whole_line(stream: IO[str]) -> str:
    line = stream.readline()
    return line if line.endswith("\n") else ""  # cut off by a kill


def _ended(timer: threading.Timer, late: threading.Event) -> bool:
    timer.cancel()
    timer.join()  # so that no kill comes after this answer
    return late.is_set()


@contextlib.contextmanager
def _dropping(todo: queue.SimpleQueue[int]) -> Iterator[None]:
    """Empties the queue if something is raised."""
    try:
        yield
    except BaseException:
        while _next(todo) is not None:
            pass
        raise


def _next(todo: queue.SimpleQueue[int]) -> int | None:
    try:
        return todo.get_nowait()
    except queue.Empty:
        return None


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
