"""vLLM inside the trainer's process, and ranks that share one server: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_real_vllm import CLOSE, python, settings

from groupline.runlog import read_jsonl

pytestmark = pytest.mark.vllm
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HERE = {"vllm_mode": "colocate", "vllm_python": None}


def ran(program: str, folder: Path, *before: str, **changes: Any) -> list[tuple[int, ...]]:
    """The command, with that Python; the token ids of the answers that the first step drew, from the starting weights."""
    settings(folder / "run", learning_rate=1e-4, device="cpu", **changes).save(folder / "recipe.yaml")
    command = [program, *before, "-m", "groupline", "train", str(folder / "recipe.yaml")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          check=False, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ready after") == 1
    metrics = list(read_jsonl(folder / "run" / "metrics.jsonl"))
    assert len(metrics) == 3
    assert all(row["sampling/sampling_logp_difference/max"] < CLOSE for row in metrics)
    drawn = list(read_jsonl(folder / "run" / "rollouts.jsonl"))
    assert [row["policy_version"] for row in drawn] == [0] * 16 + [1] * 16 + [2] * 16
    return [tuple(row["ids"]) for row in drawn[:16]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """By two ranks, over the one server that the first of them starts."""
    return ran(sys.executable, tmp_path_factory.mktemp("served"), *RANKS)


def test_two_ranks_share_the_server_that_one_starts(served: list[tuple[int, ...]]) -> None:
    assert len(set(served)) > 8


@pytest.mark.parametrize(
    ("before", "changes"),
    [((), {}), ((), {"lora_r": 4}), (RANKS, {"parallel": "fsdp"})],
    ids=["one process", "adapter", "two ranks, each with shares"],
)
def test_in_the_trainers_process_it_draws_what_a_server_draws(
    before: tuple[str, ...], changes: dict[str, Any], served: list[tuple[int, ...]], tmp_path: Path
) -> None:
    assert ran(python(), tmp_path, *before, **HERE | changes) == served


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_sleep_and_wake_in_the_trainers_process(kind: str, tmp_path: Path) -> None:
    command = [python(), str(Path(__file__).with_name("asleep.py")), str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert found["asleep"]
    assert found["awake"]
    assert found["undisturbed"]
    assert found["changed"]
    assert found["versions"] == [0, 1]
    assert found["gap"] < CLOSE
    assert found["plain_apart"]
    assert found["refused"] == "vLLM knows no argument --no-such (vllm_args)"
    assert len(found["said"]) == 2
    assert found["log"] > 1000
