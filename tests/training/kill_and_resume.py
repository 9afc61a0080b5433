"""Script of test_kill.py: a run that is killed again and again, and one that is not. Prints what happened as JSON.

Each attempt is a fork of this process, which has loaded everything, and ends by SIGKILL: at a given call inside a save,
or after a random time. Usage: kill_and_resume.py FOLDER SEED
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small import config, make_model, make_tokenizer, run, weights

from groupline.training import checkpoint

STEPS, TIMED = 10, 11
DONE = re.compile(r"step +(\d+)/")
# (function that a save calls, which call of it in this attempt): before it the process kills itself
INSIDE = (
    ("mkdir", 1), ("save_file", 2), ("torch.save", 1), ("fsync", 2), ("fsync", 8), ("rename", 1), ("rename", 2),
    ("rename", 3), ("rmtree", 1),
)  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(function: str, number: int) -> None:
    """Let this process die at that call; the file or folder that it would write is half there, if it is a file."""
    calls = iter(range(1, 10**6))

    def wrap(real: Callable[..., Any], torn: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if next(calls) == number:
                if torn:
                    Path(args[1]).write_bytes(b"half a fi")
                die()
            return real(*args, **more)

        return call

    if function == "mkdir":
        Path.mkdir = wrap(Path.mkdir)  # type: ignore[method-assign]
    elif function == "save_file":
        checkpoint.save_file = wrap(checkpoint.save_file, torn=True)  # type: ignore[attr-defined]
    elif function == "torch.save":
        torch.save = wrap(torch.save, torn=True)
    elif function == "fsync":
        checkpoint.fsync = wrap(checkpoint.fsync)  # type: ignore[attr-defined]
    elif function == "rename":
        os.rename = wrap(os.rename)
    else:
        checkpoint.shutil.rmtree = wrap(checkpoint.shutil.rmtree)  # type: ignore[attr-defined]


def slow_saves() -> None:
    """So that a random moment often falls into a save."""
    real = checkpoint.fsync  # type: ignore[attr-defined]

    def fsync(path: Path) -> None:
        time.sleep(0.004)
        real(path)

    checkpoint.fsync = fsync  # type: ignore[attr-defined]


def train(folder: Path, say: Callable[[str], None], **changes: Any) -> None:
    settings: dict[str, Any] = {"steps": STEPS, "lora_r": 2, "lora_dropout": 0.2, "beta": 0.04, "num_iterations": 2,
                                "lr_scheduler_type": "cosine", "save_steps": 1, "save_total_limit": 2}  # fmt: skip
    policy = make_model(TOKENIZER)
    run(config(folder, **settings | changes), policy, TOKENIZER, say=say)
    torch.save(weights(policy), folder / "ends.pt")


def attempt(folder: Path, inside: tuple[str, int] | None, after: float | None) -> tuple[bool, list[str]]:
    """(whether it was killed, what it said)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        if inside:
            kill_before(*inside)
        if after is not None:
            slow_saves()
        code = 1
        try:
            train(folder, lambda line: (os.write(writer, f"{line}\n".encode()), None)[1], resume=True)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as stream:
        said = stream.read().splitlines()
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"an attempt failed: {said[-3:]}")
    return os.WIFSIGNALED(status), said


def main(folder: Path, seed: int) -> None:
    began = time.perf_counter()
    train(folder / "whole", lambda line: None, save_steps=0)
    once = time.perf_counter() - began
    draw = random.Random(seed)
    kills: list[tuple[str, int] | None] = [*INSIDE, *[None] * TIMED]
    draw.shuffle(kills)
    report: list[dict[str, Any]] = []
    while kills:
        inside = kills.pop()
        killed, said = attempt(folder / "killed", inside, None if inside else draw.uniform(0.02, 0.5) * once)
        found, torn = checkpoint.newest_whole(folder / "killed")
        report.append(
            {
                "killed": killed,
                "inside": inside,
                "whole": found.step if found else 0,
                "torn": [path.name for path, _ in torn],
                "steps": [int(m[1]) for line in said if (m := DONE.match(line))],
                "said": [line for line in said if line.startswith(("passing", "resuming"))],
            }
        )
        if not killed:  # it got to the end first: begin again, so that every kill falls into a run
            kills.append(inside)
            (folder / "killed").rename(folder / f"finished-{len(report)}")
    report.append({"killed": attempt(folder / "killed", None, None)[0]})
    print(json.dumps(report))


TOKENIZER = make_tokenizer()

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
