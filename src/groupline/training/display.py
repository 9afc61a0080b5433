"""What a run says: a live status with finished lines above it on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


class Display:
    """`say` prints a line; on a terminal a spinner below it shows that the run is alive."""

    def __init__(self) -> None:
        self._status: Status | None = None
        if sys.stdout.isatty():
            self._console = Console(highlight=False, soft_wrap=True)
            self._status = self._console.status("working; Ctrl-C saves the model and ends")

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def say(self, line: str) -> None:
        if self._status:
            self._console.print(line, markup=False)
        else:
            print(line, flush=True)
