"""Run by two ranks under torchrun, all cases in one start: ranks.py FOLDER. The last one hangs, to be ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, HALF, SAVED, recorded, settings, start
from small import EVEN, even_share, sums

from groupline.config import ConfigError
from groupline.rewards import Reward

RANK = int(os.environ["RANK"])


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


def note(folder: Path, name: str, value: Any) -> None:
    """What each rank found, as one file."""
    found = gathered(value)
    if RANK == 0:
        (folder / f"{name}.json").write_text(json.dumps(found))


def laws(folder: Path) -> None:
    for kind in ("replicate", "fsdp"):
        for case in CASES:
            name = f"{kind} {case}"
            with recorded() as (gradients, micro_batches):
                results = start(settings(case, folder / name, parallel=kind), case)
            note(folder, f"{name} counts", micro_batches)
            note(folder, f"{name} results", results["steps"])
            if RANK == 0:
                torch.save(gradients, folder / f"{name}.pt")
        with recorded() as (gradients, _):
            start(settings("lora", folder / f"{kind} half", parallel=kind, **HALF), "lora")
        if RANK == 0:
            torch.save(gradients, folder / f"{kind} half.pt")


def checkpoints(folder: Path) -> None:
    for kind in ("replicate", "fsdp"):
        case = "lora" if kind == "fsdp" else "full"
        run = folder / f"saved by {kind}"
        start(settings(case, run, parallel=kind, **SAVED), case)
        for other in ("replicate", "fsdp"):
            again = folder / f"saved by {kind}, on 2 as {other}"
            if RANK == 0:
                shutil.copytree(run, again)
                shutil.copytree(run, folder / f"saved by {kind}, on 1", dirs_exist_ok=True)
            dist.barrier()
            resumed = settings(case, again, parallel=other, resume=str(again / "checkpoint-2"), **SAVED)
            start(resumed, case)


def bad_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    if RANK == 1:
        raise RuntimeError("no such number")
    return even_share(completion_ids)


def told_to_stop(completion_ids: list[list[int]], **_: Any) -> list[float]:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return even_share(completion_ids)


def never_comes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    if RANK == 1:
        time.sleep(100)
    return even_share(completion_ids)


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def endings(folder: Path) -> None:
    try:
        start(settings("full", folder / "raises"), "full", rewards=[Reward("bad", bad_reward)])
    except Exception as error:
        note(folder, "raises", words(error))
    try:
        start(settings("full", folder / "not alike"), "full", problems=sums(12 + RANK))
    except ConfigError as error:
        note(folder, "not alike", words(error))
    results = start(settings("full", folder / "stopped"), "full", rewards=[Reward("stop", told_to_stop)])
    note(folder, "stopped", [results["interrupted"], len(results["steps"])])
    results = start(settings("full", folder / "few", prompts_per_step=1, eval_problems=3), "full", held_out=sums(3))
    note(folder, "few", results["held_out"]["after"]["pass@1"]["value"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    laws(place)
    checkpoints(place)
    endings(place)
    if RANK == 0:
        (place / "done").touch()
    assert EVEN
    start(settings("full", place / "hangs", rank_timeout=2), "full", rewards=[Reward("never", never_comes)])
