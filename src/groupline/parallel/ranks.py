"""The processes that a launcher started, over torch.distributed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from groupline.config import ConfigError
from groupline.parallel.mesh import Elsewhere, RankLost, World
from groupline.parallel.sums import sum_tensors
from groupline.parallel.watchdog import Watchdog

T = TypeVar("T")
BROKEN = (RuntimeError, ConnectionError)  # what gloo, nccl and the store raise: several kinds of the former
SAME_SIGNAL = 3.0  # seconds


class Ranks(World):
    """This process among several. Made by `join`; leaving it takes the process group down again if it made it."""

    def __init__(self, device: str, timeout: float) -> None:
        """timeout: seconds that a rank may keep the others waiting. ConfigError: a device that this rank cannot have."""
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._device = own_device(device, int(os.environ.get("LOCAL_RANK", self.rank)))
        self._owns_group = not dist.is_initialized()
        self._asked: float | None = None  # when this process was told to stop
        self._watchdog = Watchdog(self.rank, self.size, timeout)
        self._watchdog.start()
        if self._owns_group:
            cuda = self._device.startswith("cuda")
            if cuda:
                torch.cuda.set_device(self._device)
            with self._waiting("the process group"):
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if cuda else "gloo",
                    timeout=timedelta(seconds=timeout + 60),  # the watchdog, which knows more, is to speak first
                )
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        if threading.current_thread() is threading.main_thread():
            # Python's handlers wait until a call into C returns, and one that waits for a lost rank may not: the
            # interpreter also writes every signal into this pipe, at once, which the watchdog's thread reads.
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._watchdog.signals = self._pipe[0]
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._before[kind] = signal.signal(kind, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        lost = self._watchdog.explain(error) if isinstance(error, BROKEN) else None
        self._watchdog.stop(None if error is None else f"{type(error).__name__}: {error}")
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for end in self._pipe:
                os.close(end)
        if lost is not None:
            raise RankLost(lost) from error
        if self._owns_group and error is None:  # after an error others may be in a collective: leave it to the end
            dist.destroy_process_group()

    def device(self, asked: str) -> str:
        return self._device

    def now(self, phase: str, step: int | None = None) -> None:
        self._watchdog.now(phase, step)

    def deal(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.size]

    def gather(self, value: T, what: str) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._waiting(what):
            dist.all_gather_object(found, value)
        return found

    def together(self, work: Callable[[], T], what: str) -> list[T]:
        outcome, error = _attempt(work)
        return self._agreed(self.gather((outcome, _words(error)), what), error, what)

    def from_main(self, work: Callable[[], T], what: str) -> T:
        outcome, error = _attempt(work) if self.main else (None, None)
        return cast(T, self._agreed(self.gather((outcome, _words(error)), what), error, what)[0])

    def agreed(self, work: Callable[[], T], what: str) -> T:
        outcome, error = _attempt(work)
        self._agreed(self.gather((None, _words(error)), what), error, what)
        return cast(T, outcome)

    def exchange(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._waiting(what) if self.sharded else contextlib.nullcontext()

    def _agreed(self, found: list[Any], own: Exception | None, what: str) -> list[Any]:
        if own is not None:
            raise own
        for rank, (_, words) in enumerate(found):
            if words is not None:
                raise Elsewhere(f"rank {rank}, {what}: {words}")
        return [outcome for outcome, _ in found]

    def sum_(self, tensors: Iterable[Tensor], what: str) -> None:
        with self._waiting(what):
            sum_tensors(tensors)

    def stop_if_asked(self) -> None:
        if any(self.gather(self._asked is not None, "whether to stop")):
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: Any) -> None:
        """The first signal asks for an end after this step, where all ranks can agree on it; a later one insists.

        A terminal and the launcher may both pass one on, so what comes within seconds of the first is the same.
        """
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        elif now - self._asked > SAME_SIGNAL:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """A collective: counted, timed by the watchdog, and its failure explained."""
        self._watchdog.wait(what)
        try:
            yield
        except BROKEN as error:
            lost = self._watchdog.explain(error)
            if lost is None:  # not for want of another rank
                raise
            raise RankLost(lost) from error
        finally:
            self._watchdog.arrived()


def own_device(asked: str, local_rank: int) -> str:
    """The device of the `local_rank`-th process of a machine. ConfigError if it cannot have one of its own."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked != "cuda":
        if asked.startswith("cuda:"):
            raise ConfigError(f"device is {asked!r}, for every process alike; with torchrun use cuda, or auto")
        return asked
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} CUDA devices and process {local_rank} of it (counted from 0) "
            "has none of its own; start at most as many processes as devices, or set device: cpu"
        )
    return f"cuda:{local_rank}"


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # raised again by `_agreed`, on every rank
        return None, error


def _words(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__
