"""No rank waits in silence: every rank tells a shared store where it is, and a waiting one reads who is missing.

A thread of each rank writes a beat to torchrun's key-value store twice a second. While the rank waits for others longer
than `NOTICE`, the thread says for whom, again and again; after the deadline, or when a beat has stopped for `LOST`, it
writes every thread's stack and ends the process. The others read its verdict from the store and do the same, so that
the one that hangs shows where.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from groupline.parallel.mesh import Elsewhere, RankLost

BEAT = 0.5  # seconds between two beats
ALL_THERE = "all ranks are there, and the exchange does not end"
NOTICE = 30.0  # seconds of waiting between two notices
LOST = 60.0  # seconds without a beat after which a rank that others wait for is gone
LOST_STOPPING = 5.0  # the same once this process was told to stop: launchers stop the rest when one has died


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself. calls: collectives it has entered. seconds: how long it is in its phase."""

    number: int = 0
    step: int | None = None
    phase: str = "start"
    seconds: float = 0.0
    calls: int = 0
    waiting: str | None = None
    left: str | None = None  # why it ended, if by an error

    def words(self) -> str:
        where = f"{self.phase}{'' if self.step is None else f' of step {self.step}'}"
        return f"{where}, {'waiting at ' + self.waiting if self.waiting else f'for {self.seconds:.0f} s'}"


@dataclass
class Peer:
    """Another rank as this one sees it. changed: when its beat last did, by this rank's clock."""

    beat: Beat = field(default_factory=Beat)
    changed: float = field(default_factory=time.monotonic)


class Watchdog:
    """Watches one rank's waiting. `now`, `wait` and `arrived` are called by the main thread."""

    made = 0  # in this process; every rank makes them alike

    def __init__(self, rank: int, size: int, timeout: float, end: Callable[[int], Any] = os._exit) -> None:
        """timeout: most seconds to wait for others. end: ends the process, given its status."""
        self.rank, self.size, self.timeout, self._end = rank, size, timeout, end
        self._own = Beat()  # changed by the main thread alone
        self._beats = 0
        self._phase_since = time.monotonic()
        self._waiting_since: float | None = None
        self._noticed = 0.0
        self._stopping = False  # once this process was told to
        self.signals: int | None = None  # a file descriptor from which numbers of signals can be read, without waiting
        Watchdog.made += 1
        # Keys of this start of the job, as a launcher that starts it again keeps the store, and of this run in it.
        self._prefix = f"groupline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{Watchdog.made}"
        self._peers = {r: Peer() for r in range(size) if r != rank}
        self._store: Any = None
        self._lock = threading.Lock()  # of the store
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="groupline-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, error: str | None) -> None:
        """The run is over. error: why, if it failed; others are told."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._own = replace(self._own, left=error)
        self._beat()

    def now(self, phase: str, step: int | None) -> None:
        self._own = replace(self._own, phase=phase, step=self._own.step if step is None else step)
        self._phase_since = time.monotonic()
        self._beat()  # at once: the last that others know of this rank should be where it is

    def wait(self, what: str) -> None:
        self._own = replace(self._own, waiting=what, calls=self._own.calls + 1)
        self._waiting_since, self._noticed = time.monotonic(), 0.0

    def arrived(self) -> None:
        self._waiting_since = None
        self._own = replace(self._own, waiting=None)

    def explain(self, error: BaseException) -> str | None:
        """The message for an exchange that failed: where this rank was, and which ranks are gone. None if none is."""
        if isinstance(error, (RankLost, Elsewhere)) or self._store is None:
            return None
        what = self._own.waiting
        if not self._read():  # the store's host is gone, and its process most often is rank 0's, or the launcher
            return (
                f"rank {self.rank}, {self._place(what)}: the connection to the launcher's store broke ({_first(error)})"
            )
        before = {r: p.beat.number for r, p in self._peers.items()}
        time.sleep(5 * BEAT)
        self._read()
        same = _first(error)  # of ranks that all fail alike, none is lost to the others
        gone = [
            r for r, p in self._peers.items()
            if (same not in p.beat.left if p.beat.left else p.beat.number == before[r])
        ]  # fmt: skip
        return f"rank {self.rank}, {self._place(what)}: {self._who(gone)} ({_first(error)})" if gone else None

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            if self._store is None:
                self._connect()
            self._stopping = self._stopping or self._signalled()
            self._beats += 1
            self._beat()
            verdict = self._verdict_of_others()
            if verdict is not None:
                self._give_up(verdict)
            since = self._waiting_since
            waited = 0.0 if since is None else time.monotonic() - since
            if waited > 10 * BEAT or self._stopping:
                self._judge(waited)

    def _judge(self, waited: float) -> None:
        """Say for whom this rank waits, or end it."""
        known, now = self._read(), time.monotonic()
        own = self._own
        limit = LOST_STOPPING if self._stopping else LOST
        gone = [r for r, p in self._peers.items() if known and (p.beat.left or self._silent(p, now - limit))]
        if not own.waiting and not (self._stopping and gone):
            return
        missing = gone or [r for r, p in self._peers.items() if p.beat.calls < own.calls]
        if gone or waited > self.timeout:
            what = self._who(missing, gone) or ALL_THERE
            why = "" if gone else f"; rank_timeout is {self.timeout:g} s"
            self._conclude(f"rank {self.rank}, {self._place(own.waiting)}, waited {waited:.0f} s: {what}{why}")
        elif waited - self._noticed > NOTICE and all(r in missing for r in range(self.rank)):  # one speaks for all
            self._noticed = waited
            self._say(
                f"rank {self.rank}, {self._place(own.waiting)}, has waited {waited:.0f} s: {self._who(missing, []) or ALL_THERE}"
            )

    def _silent(self, peer: Peer, since: float) -> bool:
        """Whether it has not been heard of since then. One that never was may still be loading its program."""
        return peer.changed < since and (self._stopping or peer.beat.number > 0)

    def _place(self, what: str | None) -> str:
        step = "" if self._own.step is None else f"step {self._own.step}, "
        return f"{step}{self._own.phase}" + (f", {what}" if what else "")

    def _who(self, ranks: Sequence[int], gone: Sequence[int] | None = None) -> str:
        """These ranks and what is known of each. gone: those of them that no longer live; by default all."""
        told = []
        for r in ranks:
            beat = self._peers[r].beat
            if beat.left:
                told.append(f"rank {r} has ended in {beat.phase}: {beat.left}")
            elif gone is None or r in gone:
                told.append(f"rank {r} is gone; it was in {beat.words()}" if beat.number else f"rank {r} never came")
            else:
                told.append(f"rank {r} is in {beat.words()}" if beat.number else f"rank {r} has not come yet")
        return "; ".join(told)

    def _conclude(self, verdict: str) -> NoReturn:
        self._try(lambda store: store.set(f"{self._prefix}/verdict", verdict))
        self._give_up(verdict)

    def _give_up(self, verdict: str) -> NoReturn:
        self._say(f"{verdict}\nwhere rank {self.rank} is:")
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        time.sleep(4 * BEAT)  # others still read the verdict, perhaps from a store that ends with this process
        self._end(1)
        raise SystemExit(1)

    def _verdict_of_others(self) -> str | None:
        key = f"{self._prefix}/verdict"
        found = self._try(lambda store: store.get(key).decode() if store.check([key]) else None)
        return None if found is None else str(found)

    def _signalled(self) -> bool:
        """Whether the process was told to stop since the last time."""
        if self.signals is None:
            return False
        try:
            return bool(os.read(self.signals, 64))
        except OSError:  # nothing to read, or closed at the end
            return False

    def _connect(self) -> None:
        """A connection of the thread's own: the default one may be held by a call that waits."""
        if not dist.is_initialized() and not os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
            return  # rank 0 makes the store with the process group
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, False, timedelta(seconds=10), wait_for_workers=False
            )
        except (RuntimeError, ConnectionError):  # tried again at the next beat
            self._store = None

    def _beat(self) -> None:
        own = replace(self._own, number=self._beats, seconds=time.monotonic() - self._phase_since)
        self._try(lambda store: store.set(f"{self._prefix}/beat/{self.rank}", json.dumps(asdict(own))))

    def _read(self) -> bool:
        """Bring `_peers` up to date; whether the store answered."""

        def read(store: Any) -> bool:
            for rank, peer in self._peers.items():
                key = f"{self._prefix}/beat/{rank}"
                beat = Beat(**json.loads(store.get(key))) if store.check([key]) else Beat()
                if beat != peer.beat:
                    peer.beat, peer.changed = beat, time.monotonic()
            return True

        return bool(self._try(read))

    def _try(self, ask: Callable[[Any], Any]) -> Any:
        """What the store answers; None if there is no store, or no longer."""
        with self._lock:
            if self._store is None:
                return None
            try:
                return ask(self._store)
            except (RuntimeError, ConnectionError):  # its host is gone; the collectives themselves will say so
                return None

    def _say(self, line: str) -> None:
        print(f"groupline: {line}", file=sys.__stderr__, flush=True)


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
