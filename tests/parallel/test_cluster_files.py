"""Files for schedulers, in recipes/launch/: read as far as this machine can, and run with stand-ins for their tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import saved_model
from small import rows
from test_launch import recipe
from test_ranks import TOLERANCE, apart, environment

from groupline.training.grpo import train

FOLDER = Path(__file__).parents[2] / "recipes" / "launch"
SBATCH, SKY = FOLDER / "slurm.sbatch", FOLDER / "skypilot.yaml"
# Long options of sbatch(1) with the form of their values, of those that could stand in such a file.
OPTIONS = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": r"\d+", "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+", "time": r"(\d+-)?\d+:\d\d:\d\d", "requeue": r"", "open-mode": r"append|truncate",
    "output": r"\S+", "error": r"\S+", "signal": r"(B:)?\w+@\d+", "partition": r"\S+", "account": r"\S+", "mem": r"\d+[KMGT]?",
    "exclusive": r"", "constraint": r"\S+", "qos": r"\S+",
}  # fmt: skip
# The shell that stands for the machines: each task of `srun` here is a process of this one.
STAND_INS = {
    "scontrol": '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] && printf "127.0.0.1\\nother\\n"\n',
    "srun": (
        '#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] && shift\n'
        'SLURM_NODEID=0 "$@" & one=$!\nSLURM_NODEID=1 "$@" & two=$!\nwait $one && wait $two\n'
    ),
}


def directives() -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == SBATCH.read_text(encoding="utf-8").count("\n#SBATCH")
    return dict(found)


def test_sbatch_directives_are_options_of_sbatch() -> None:
    found = directives()
    assert not [f"--{name}={value}" for name, value in found.items() if not re.fullmatch(OPTIONS[name], value)]
    assert found["ntasks-per-node"] == "1", "torchrun starts the others"
    assert "requeue" in found
    # sbatch reads no directive after the first command
    before, command, after = SBATCH.read_text(encoding="utf-8").partition("\nset -euo pipefail\n")
    assert command
    assert "#SBATCH" in before
    assert "#SBATCH" not in after
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


def test_the_skypilot_task() -> None:
    task: dict[str, Any] = yaml.safe_load(SKY.read_text(encoding="utf-8"))
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "envs", "file_mounts", "setup", "run"}
    assert (FOLDER.parents[1] / task["envs"]["CONFIG"]).exists()
    assert task["envs"]["OUTPUT_DIR"].startswith(f"{next(iter(task['file_mounts']))}/")
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


@pytest.mark.ray  # as it takes as long
@pytest.mark.parametrize("scheduler", ["slurm", "skypilot"])
def test_two_machines_train_as_one_process(scheduler: str, tmp_path: Path, free_port: int) -> None:
    settings = recipe(tmp_path).model_copy(update={"steps": 2, "save_total_limit": 2})
    settings.save(tmp_path / "recipe.yaml")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = environment() | {"PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])}
    if scheduler == "slurm":
        command = ["bash", str(SBATCH), str(tmp_path / "recipe.yaml")]
        env |= {"SLURM_JOB_ID": str(free_port - 20000), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    else:
        run = yaml.safe_load(SKY.read_text(encoding="utf-8"))["run"]
        (tmp_path / "run.sh").write_text("set -e\n" + run.replace("29500", str(free_port)))
        both = (
            f"for r in 0 1; do SKYPILOT_NODE_RANK=$r bash {tmp_path}/run.sh & all+=($!); done; "
            "for p in ${all[@]}; do wait $p; done"
        )
        command = ["bash", "-ec", both]
        env |= {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "CONFIG": str(tmp_path / "recipe.yaml"), "OUTPUT_DIR": str(tmp_path / "run"),
        }  # fmt: skip
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "holds no whole checkpoint: beginning at the beginning" in done.stdout
    assert "one of 2 processes" in done.stdout
    assert [r["step"] for r in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    alone = settings.model_copy(update={"output_dir": str(tmp_path / "alone"), "parallel": "auto"})
    train(alone, lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(tmp_path / "run")) < TOLERANCE


@pytest.fixture
def free_port() -> int:
    """Of those that the sbatch file may choose: 20000 to 29999."""
    import socket

    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")
