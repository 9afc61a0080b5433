"""A reward function of rank 1: in step 2 the process that started it is killed, and in step 4 its own, once each."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def even_share(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    step = trainer_state.global_step + 1
    if os.environ.get("RANK") == "1" and (marks := os.environ.get("DIE_MARKS")) and step in (2, 4):
        mark = Path(marks) / f"{step}"
        if not mark.exists():
            mark.write_text(f"{os.getpid()}")
            os.kill(os.getppid() if step == 2 else os.getpid(), signal.SIGKILL)
            time.sleep(60)  # its end must not be a matter of time
            mark.write_text("outlived its actor")
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
