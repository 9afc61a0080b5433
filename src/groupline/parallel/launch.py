"""What a launcher gives to each rank, what it makes of how ranks end, and when it begins anew. Knows no launcher."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

INTERRUPTED = 130  # the exit status of a run that was told to stop, and did with its model saved


@dataclass(frozen=True)
class Place:
    """Where a rank runs. node: its machine's id. gpus: ids of the GPUs it was given, as CUDA_VISIBLE_DEVICES has them."""

    node: str
    address: str
    gpus: tuple[str, ...] = ()


def rank_environments(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank, given where each runs. port: a free one on the machine of rank 0.

    All ranks of a machine see the same GPUs, those of all of them in the order of their LOCAL_RANK, as under torchrun.
    """
    found = []
    for rank, place in enumerate(places):
        here = [r for r, other in enumerate(places) if other.node == place.node]
        env = {
            "RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here),
            "MASTER_ADDR": places[0].address, "MASTER_PORT": port,
        }  # fmt: skip
        gpus = ",".join(gpu for r in here for gpu in places[r].gpus)
        found.append(
            {name: str(value) for name, value in env.items()} | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        )
    return found


def torchrun(arguments: Sequence[str], nproc: int, max_restarts: int) -> list[str]:
    """The command that runs `groupline train` with these arguments in `nproc` processes of this machine."""
    own = ["--standalone", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *own, "-m", "groupline", "train", *arguments]


def resumed(arguments: Sequence[str]) -> list[str]:
    """These arguments of `train`, to go on from the newest checkpoint, whatever they said of it."""
    rest = [a for a in arguments if not a.startswith("--resume=")]
    if "--resume" in rest:
        at = rest.index("--resume")
        alone = at + 1 == len(rest) or rest[at + 1].startswith("--")
        del rest[at : at + (1 if alone else 2)]
    return [*rest, "--resume"]


def mark(run: Path) -> int | None:
    """Changes when a start of `train` has made the run's folder its own; None while there is none.

    A start that failed before it did has left nothing to go on from; what lies there may be an older run's.
    """
    file = run / "config.yaml"
    return file.stat().st_mtime_ns if file.exists() else None


def describe(status: int, last: str) -> str:
    """How a process ended. last: the last line it wrote on stderr."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}{f': {last}' if last else ''}"


def first_cause(ends: Mapping[int, str]) -> int:
    """Of ranks that failed together: one that was killed, as the others' errors are about its loss; else one that spoke."""
    return min(ends, key=lambda rank: (ends[rank].startswith("ended with status"), ":" not in ends[rank], rank))


class Stop:
    """Between enter and exit, SIGINT and SIGTERM only set `asked`; the second press raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
