"""Who trains: one process that talks to nobody, or the ranks that torchrun started.

The loop is the same for both. It asks a `World` for what others hold, and a world of one answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from groupline.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class World:
    """A single process. `Ranks` overrides everything that others take part in.

    Every rank makes the same calls in the same order; one that does not come is named by the watchdog.
    """

    rank, size = 0, 1
    sharded = False  # whether each rank holds only a share of the model
    words = ""  # how many there are and what each holds, for the plan

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The setting `device` for this rank."""
        return asked

    def now(self, phase: str, step: int | None = None) -> None:
        """This rank begins `phase` (of step `step`, counted from 1): what others are told while they wait for it."""

    def deal(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of what all ranks hold alike: every size-th, from the rank's own number on."""
        return items

    def gather(self, value: T, what: str) -> list[T]:
        """The value of every rank, in the order of ranks, on every rank. what: its name, for whoever must wait."""
        return [value]

    def together(self, work: Callable[[], T], what: str) -> list[T]:
        """The outcome of every rank's own work, in the order of ranks.

        What it raises on any rank is raised on all: there as it is, elsewhere as `Elsewhere`.
        """
        return [work()]

    def from_main(self, work: Callable[[], T], what: str) -> T:
        """What rank 0's work gives, on every rank; the others do not run it. An error is raised on all."""
        return work()

    def agreed(self, work: Callable[[], T], what: str) -> T:
        """This rank's own outcome, which no other needs; what the work raises on any rank is raised on all."""
        return work()

    def exchange(self, what: str) -> AbstractContextManager[None]:
        """Around calls in which ranks exchange shares of a model, so that nobody waits there in silence."""
        return nullcontext()

    def sum_(self, tensors: Iterable[Tensor], what: str) -> None:
        """Replace each tensor by its sum over all ranks, which all then hold bit for bit alike."""

    def stop_if_asked(self) -> None:
        """Raise KeyboardInterrupt on every rank if any was told to stop. A single process is interrupted at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


SOLO = World()


class RankLost(RuntimeError):
    """A rank is gone or does not come; the message says which, what it did last, and who waited where."""


def whole(tensor: Any) -> Tensor:
    """The tensor, gathered from all ranks if each holds a share of it: then every rank must call this."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def own_share(tensor: Any) -> Tensor:
    """What this rank holds of the tensor: its share, or all of it."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "full_tensor") else tensor
    return found


class Elsewhere(RuntimeError):
    """Another rank raised an error that all agreed on; the message is that rank's."""


def launched() -> int:
    """How many processes a launcher started for this program; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in FROM_LAUNCHER) else 1


def is_main() -> bool:
    """Whether this process is the one that writes files and speaks, of those that a launcher started."""
    return launched() == 1 or os.environ["RANK"] == "0"


def join(settings: Any) -> World:
    """The world this process belongs to, to be used as a context manager.

    With several processes the process group is made (nccl on GPUs, gloo on CPU) and the watchdog started; alone,
    torch.distributed is not touched. settings: `device`, `rank_timeout`.
    Raises ConfigError for a device that this rank cannot have.
    """
    if launched() == 1:
        return SOLO
    from groupline.parallel.ranks import Ranks

    return Ranks(str(settings.device), float(settings.rank_timeout))


def refuse_ranks(what: str) -> None:
    """Raises ConfigError if a launcher started several processes for something that runs in one."""
    if launched() > 1:
        raise ConfigError(
            f"{what} runs in one process, and a launcher started {launched()}; start it without torchrun "
            "(`groupline train` runs on several)"
        )
