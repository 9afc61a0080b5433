"""`groupline launch --ray`: the processes that torchrun would start, each held by a Ray actor, started again if one dies.

An actor starts its rank as a child process, `groupline train` with torchrun's variables, and hands on what it writes. The
rank knows nothing of Ray. The driver asks every actor how its rank is several times a second, so it notices a rank that
ended, an actor that died and a machine that is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from groupline.config import ConfigError
from groupline.parallel.launch import (
    INTERRUPTED,
    Place,
    Stop,
    describe,
    first_cause,
    mark,
    rank_environments,
    resumed,
)
from groupline.parallel.mesh import RankLost

POLL = 0.2  # seconds between two looks at the ranks
LOST = 60.0  # seconds without an answer after which an actor is taken for lost
SETTLE = 2.0  # seconds after the first failure in which others may show its cause, before they are told to stop
GRACE = 30.0  # seconds that ranks have to end after another failed; torchrun's own
START = 120.0  # seconds within which actors must have started
STRATEGIES = ("PACK", "SPREAD")
OBJECT_STORE = 80_000_000  # bytes, for a local cluster: near Ray's least, as only lines of text go through it


@dataclass(frozen=True)
class RayOptions:
    """nproc: ranks; None: one for each GPU of the cluster, or 1. address: None starts a cluster on this machine.

    strategy: PACK, on as few machines as possible; SPREAD, on as many. wait: seconds for busy CPUs or GPUs to be free.
    """

    nproc: int | None = None
    max_restarts: int = 0
    address: str | None = None
    strategy: str = "PACK"
    wait: float = 60.0


class Rank:
    """The actor: one rank's process. Every method returns at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []

    def place(self) -> Place:
        ray = import_ray()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), gpus)

    def free_port(self) -> int:
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def start(self, arguments: Sequence[str], env: dict[str, str], folder: str) -> None:
        """`groupline train` with these arguments, in this folder, by the Python of this machine."""
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"{socket.gethostname()} has no folder {folder}, where `groupline launch` was called"
            )
        command = [sys.executable, "-m", "groupline.parallel.tied", "groupline", "train", *arguments]
        self._process = subprocess.Popen(
            command, env={"OMP_NUM_THREADS": "1"} | os.environ | env | {"PYTHONUNBUFFERED": "1"}, cwd=folder, text=True,
            errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            self._readers.append(threading.Thread(target=self._read, args=(name, stream), daemon=True))
            self._readers[-1].start()

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._lock:
                    self._lines.append((name, line))

    def poll(self) -> tuple[list[tuple[str, str]], int | None]:
        """(what it wrote since the last call, as (stdout or stderr, line); its exit status, None while it runs)."""
        status = self._process.poll() if self._process else None
        if status is not None:
            for reader in self._readers:
                reader.join(timeout=1)  # a grandchild may still hold the pipe
            if self._process and self._process.stdin:
                self._process.stdin.close()
        with self._lock:
            lines, self._lines = self._lines, []
        return lines, status

    def stop(self, number: int) -> None:
        """Send it this signal."""
        if self._process is not None:
            self._process.send_signal(number)


def launch_ray(arguments: Sequence[str], run: Path, device: str, options: RayOptions) -> int:
    """`groupline train` with these arguments in ranks on a Ray cluster; the exit status, 0 or 130.

    run, device: the recipe's output_dir and device. On the CPU a rank takes one CPU of the cluster, else one GPU. Raises
    ConfigError if there is no cluster at the address or it is too small, RankLost if a rank died once more than
    `max_restarts`; ImportError without Ray.
    """
    ray = import_ray()
    _connect(ray, options.address)
    try:
        with Stop() as stop:  # after Ray has set handlers of its own
            has = ray.cluster_resources()
            kind = "GPU" if device.startswith("cuda") or (device == "auto" and has.get("GPU")) else "CPU"
            nproc = options.nproc or int(has.get("GPU", 0) if kind == "GPU" else 1) or 1
            if nproc > has.get(kind, 0):
                raise ConfigError(
                    f"{nproc} ranks need {nproc} {kind}s, one each, and the Ray cluster has {has.get(kind, 0):g}; give a "
                    "smaller --nproc, or add machines to it"
                )
            job, left = Job(ray, kind, nproc, options, stop), options.max_restarts
            while True:
                before = mark(run)
                failed = job.once(arguments)
                if stop.asked:
                    if isinstance(failed, str):
                        print(f"groupline launch: while it was stopped, {failed}", file=sys.stderr)
                    return INTERRUPTED
                if isinstance(failed, int):
                    return failed
                if not left:
                    raise RankLost(f"{failed}; --max-restarts is {options.max_restarts}")
                arguments = arguments if mark(run) == before else resumed(arguments)
                left -= 1
                how = "from the newest checkpoint" if arguments[-1] == "--resume" else "from the beginning"
                print(f"groupline launch: {failed}; starting again {how}, restarts left: {left}", file=sys.stderr)
    finally:
        ray.shutdown()


class Job:
    """One placement of the ranks after another."""

    def __init__(self, ray: Any, kind: str, nproc: int, options: RayOptions, stop: Stop) -> None:
        self.ray, self.kind, self.nproc, self.options, self.stop = ray, kind, nproc, options, stop

    def once(self, arguments: Sequence[str]) -> int | str:
        """Run all ranks to their end: the exit status; or, if one failed, which and how, once all have ended."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self.ray.remote(Rank)
        group = placement_group([{self.kind: 1}] * self.nproc, strategy=self.options.strategy)
        actors: list[Any] = []
        try:
            if not self._placed(group):
                return INTERRUPTED
            for i in range(self.nproc):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
                share = {"num_cpus": int(self.kind == "CPU"), "num_gpus": int(self.kind == "GPU")}
                actors.append(actor.options(scheduling_strategy=where, **share).remote())
            failed = self._start(actors, arguments)
            return failed or self._watch(actors)
        finally:
            for one in actors:
                self.ray.kill(one)
            remove_placement_group(group)

    def _placed(self, group: Any) -> bool:
        """Wait for the group's CPUs or GPUs; whether it has them, rather than being told to stop."""
        deadline = time.monotonic() + self.options.wait
        while not group.wait(POLL):
            if self.stop.asked:
                return False
            if time.monotonic() > deadline:
                free = self.ray.available_resources().get(self.kind, 0)
                raise ConfigError(
                    f"{self.nproc} ranks need {self.nproc} {self.kind}s, and {free:g} of the Ray cluster's "
                    f"{self.ray.cluster_resources().get(self.kind, 0):g} are free after {self.options.wait:g} s; wait for "
                    "other jobs to end, or give a smaller --nproc"
                )
        return True

    def _start(self, actors: Sequence[Any], arguments: Sequence[str]) -> str | None:
        """Start every actor's rank; what went wrong."""
        errors = self.ray.exceptions
        try:
            places = self.ray.get([a.place.remote() for a in actors], timeout=START)
            self._addresses = [place.address for place in places]
            port = self.ray.get(actors[0].free_port.remote(), timeout=LOST)
            envs = rank_environments(places, port)
            begun = [a.start.remote(arguments, e, os.getcwd()) for a, e in zip(actors, envs, strict=True)]
            self.ray.get(begun, timeout=LOST)
        except errors.RayTaskError as error:  # what `Rank` itself raised
            raise ConfigError(str(error.cause)) from error
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            return f"the ranks' actors did not all start ({_first(error)})"
        return None

    def _watch(self, actors: Sequence[Any]) -> int | str:
        """Hand on what ranks write until all have ended; the first failure, or a stop asked for, ends the others."""
        errors = self.ray.exceptions
        statuses: dict[int, int] = {}
        ends: dict[int, str] = {}  # of ranks that failed before others were told to stop
        told, failed_at = False, float("inf")
        last = [""] * len(actors)
        alive = list(range(len(actors)))
        while alive and time.monotonic() < failed_at + SETTLE + GRACE:
            for rank in list(alive):
                lost = ""
                try:
                    lines, status = self.ray.get(actors[rank].poll.remote(), timeout=LOST)
                except errors.RayActorError:
                    lines, status, lost = [], None, "lost its actor, which died"
                except errors.GetTimeoutError:
                    lines, status, lost = [], None, f"lost its actor, which has not answered for {LOST:g} s"
                for name, line in lines:
                    print(line, end="", file=getattr(sys, name), flush=True)
                    last[rank] = line.strip() if name == "stderr" and line.strip() else last[rank]
                if status is None and not lost:
                    continue
                alive.remove(rank)
                if status is not None:
                    statuses[rank] = status
                if status not in (0, INTERRUPTED):
                    failed_at = min(failed_at, time.monotonic())
                    if not told or not ends:
                        ends[rank] = lost or describe(status or 0, last[rank])
            if not told and (self.stop.asked or time.monotonic() > failed_at + SETTLE):
                told = True
                for rank in alive:
                    actors[rank].stop.remote(int(signal.SIGTERM))
            time.sleep(POLL)
        if ends:  # ranks that are still alive are killed next, with their actors
            cause = first_cause(ends)
            return f"rank {cause} of {len(actors)} (on {self._addresses[cause]}) {ends[cause]}"
        return max(statuses.values())


def import_ray() -> Any:
    """The package ray. Raises ImportError with what to install."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read on import: nothing is sent unless asked for
    try:
        import ray
    except ImportError:
        raise ImportError("launch --ray needs Ray: pip install 'groupline[ray]'") from None
    return ray


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        return
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal():  # where nobody listens Ray would wait for a minute and end the process
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except Exception as error:  # of several kinds, Ray's own among them: one for a token that is missing
        raise ConfigError(
            f"--address {address}: no Ray cluster to be used there ({_first(error)}); start one with `ray start --head`, "
            "or leave --address out to start one here for this run"
        ) from error


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
