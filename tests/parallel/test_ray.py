"""The command on real Ray clusters of this machine, with 2 CPUs: `make test-ray`. Left out of `make test`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cases import make_model, make_tokenizer, saved_model, sums
from small import LETTERS, rows
from test_ranks import TOLERANCE, apart, environment

from groupline.config import Config
from groupline.models.load import save_model
from groupline.training.grpo import train

pytestmark = pytest.mark.ray
REWARDS = Path(__file__).with_name("dies_twice.py")
TWO_CPUS = """import ray
init = ray.init
ray.init = lambda **given: init(**given, **({"num_cpus": 2} if given["address"] == "local" else {}))
"""
MAIN = [sys.executable, "-c", TWO_CPUS + "from groupline.cli import main; raise SystemExit(main())", "launch", "--ray"]


def recipe(folder: Path, **changes: Any) -> Config:
    tokenizer = make_tokenizer()
    save_model(make_model(tokenizer), tokenizer, folder / "start")
    problems = [{"prompt": p.prompt, "answer": p.answer} for p in sums(12)]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    settings: dict[str, Any] = {
        "model": str(folder / "start"), "train_file": str(folder / "problems.jsonl"), "eval_problems": 0, "stop": LETTERS,
        "rewards": (f"{REWARDS}:even_share",), "output_dir": str(folder / "run"), "steps": 5, "save_steps": 1,
        "save_total_limit": 2, "prompts_per_step": 3, "num_generations": 4, "max_completion_length": 10,
        "learning_rate": 1e-3, "adam_epsilon": 1e-4, "device": "cpu", "micro_batch_tokens": 40,
    }  # fmt: skip
    made = Config(**settings | changes)
    made.save(folder / "recipe.yaml")
    return made


def launched(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*MAIN, *args, str(folder / "recipe.yaml")]
    return subprocess.run(
        command, env=environment() | env, cwd=folder, capture_output=True, text=True, check=False, timeout=400
    )


def test_a_killed_actor_and_a_killed_rank_cost_a_restart_each(tmp_path: Path) -> None:
    """And the weights at the end are those of one process that nobody disturbed, which this test trains itself."""
    settings = recipe(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    done = launched(tmp_path, "--nproc", "2", "--max-restarts", "2", DIE_MARKS=str(marks))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("groupline launch: ")]
    assert len(said) == 2, done.stderr
    assert "rank 1 of 2" in said[0]
    assert "lost its actor, which died; starting again from the newest checkpoint, restarts left: 1" in said[0]
    assert "was ended by SIGKILL; starting again from the newest checkpoint, restarts left: 0" in said[1]
    for mark in ("2", "4"):  # the marks hold the rank's process id, and no such process goes on
        assert not Path(f"/proc/{int((marks / mark).read_text())}").exists()
    run = tmp_path / "run"
    assert f"resuming from {run / 'checkpoint-1'}" in done.stdout
    assert f"resuming from {run / 'checkpoint-3'}" in done.stdout
    assert done.stdout.count("step 5/5") == 1, "rank 0 alone speaks"
    assert [r["step"] for r in rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]

    train(settings.model_copy(update={"output_dir": str(tmp_path / "alone")}), lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(run)) < TOLERANCE


def test_a_run_that_goes_well_and_one_whose_restarts_are_used_up(tmp_path: Path) -> None:
    settings = recipe(tmp_path, steps=2)
    done = launched(tmp_path, "--nproc", "2", "--strategy", "SPREAD")
    assert done.returncode == 0, done.stderr
    assert "groupline" not in done.stderr
    train(settings.model_copy(update={"output_dir": str(tmp_path / "alone")}), lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(tmp_path / "run")) < TOLERANCE

    again = launched(tmp_path, "--nproc", "2")  # the folder holds a run: every start of this fails
    assert again.returncode == 2
    assert "already holds a run; give another output_dir" in again.stderr
    assert "groupline launch: rank 0 of 2" in again.stderr
    assert "--max-restarts is 0" in again.stderr


def test_too_few_cpus_are_said_and_not_waited_for(tmp_path: Path) -> None:
    recipe(tmp_path)
    began = time.monotonic()
    done = launched(tmp_path, "--nproc", "3")
    assert done.returncode == 2
    assert done.stderr == (
        "groupline launch: 3 ranks need 3 CPUs, one each, and the Ray cluster has 2; give a smaller --nproc, or add "
        "machines to it\n"
    )
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_with_the_model_saved(name: str, tmp_path: Path) -> None:
    recipe(tmp_path, steps=100_000, save_steps=0)
    process = subprocess.Popen(
        [*MAIN, "--nproc", "2", str(tmp_path / "recipe.yaml")], env=environment(), cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step      3/"):
                break
        if name == "SIGINT":  # as a terminal does: to the whole group, Ray's processes too
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "saving the model as it is" in out
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert saved_model(tmp_path / "run")
