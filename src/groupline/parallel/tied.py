"""Runs a module as `python -m` does, in a process that lives no longer than the one that started it.

`python -m groupline.parallel.tied MODULE [ARGUMENT...]`, with a pipe as standard input that the parent keeps open. It
closes however the parent ends, and then this process is killed: a rank without its actor must not go on writing beside
the one that takes its place.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _end_with_the_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
