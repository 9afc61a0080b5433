"""A reward function; once, it lets rank 1 die by SIGKILL in the backward pass of step 3."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from groupline.training.optim import Optimiser


def even_share(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    mark = os.environ.get("KILL_ONCE")
    if mark and os.environ.get("RANK") == "1" and trainer_state.global_step == 2 and not Path(mark).exists():
        Path(mark).touch()
        Optimiser.backward = lambda self, loss: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
