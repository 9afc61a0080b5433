"""The command under a launcher: a rank that is killed ends the job, which then goes on from its checkpoint."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from cases import make_model, make_tokenizer, saved_model, sums
from small import LETTERS, rows
from test_ranks import LAUNCH, TOLERANCE, apart, environment

from groupline.cli import main
from groupline.config import Config, ConfigError
from groupline.models.load import save_model
from groupline.parallel.mesh import refuse_ranks
from groupline.training.grpo import train

DEADLINE = 60.0  # seconds after which a job has ended that lost a rank; docs/scaling.md states it


def recipe(folder: Path) -> Config:
    tokenizer = make_tokenizer()
    save_model(make_model(tokenizer), tokenizer, folder / "start")
    problems = [{"prompt": p.prompt, "answer": p.answer} for p in sums(12)]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    return Config(
        model=str(folder / "start"), train_file=str(folder / "problems.jsonl"), eval_problems=0, stop=LETTERS,
        rewards=(f"{Path(__file__).with_name('killed_once.py')}:even_share",), output_dir=str(folder / "run"),
        steps=4, save_steps=1, save_total_limit=2, prompts_per_step=3, num_generations=4, max_completion_length=10,
        learning_rate=1e-3, adam_epsilon=1e-4, parallel="fsdp", device="cpu", micro_batch_tokens=40,
    )  # fmt: skip


def launched(config: Path, *more: str, **env: str) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    command = [*LAUNCH, "-m", "groupline", "train", str(config), *more]
    done = subprocess.run(command, env=environment() | env, capture_output=True, text=True, check=False, timeout=120)
    return done, time.monotonic() - began


def test_a_killed_rank_ends_the_job_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    settings.save(tmp_path / "recipe.yaml")
    mark = tmp_path / "killed"
    first, seconds = launched(tmp_path / "recipe.yaml", KILL_ONCE=str(mark))
    assert first.returncode != 0
    assert time.time() - mark.stat().st_mtime < DEADLINE, seconds
    assert "rank 1 is gone; it was in training of step 3" in first.stderr
    assert "rank 0, step 3, training, " in first.stderr
    assert first.stdout.count("step 2/4") == 1, "rank 0 alone speaks"
    run = tmp_path / "run"
    assert (run / "checkpoint-2" / "manifest.json").exists()
    assert not (run / "model").exists()

    second, _ = launched(tmp_path / "recipe.yaml", "--resume", KILL_ONCE=str(mark))
    assert second.returncode == 0, second.stderr
    assert f"resuming from {run / 'checkpoint-2'}" in second.stdout
    assert "one of 2 processes, each with a share of its layers" in second.stdout
    assert [r["step"] for r in rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
    alone = settings.model_copy(update={"output_dir": str(tmp_path / "alone"), "parallel": "auto"})
    train(alone, lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(run)) < TOLERANCE


def two(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("command", ["ppo", "sft", "dpo", "reward-model", "pairs", "eval", "probe"])
def test_commands_of_one_process_say_so_under_a_launcher(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two(monkeypatch)
    assert main([command]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"groupline {command}: groupline {command} runs in one process, and a launcher started 2; start it without "
        "torchrun (`groupline train` runs on several)\n"
    )
    two(monkeypatch, rank=1)
    assert main([command]) == 2
    assert not capsys.readouterr().err, "rank 0 alone speaks"


def test_one_process_under_a_launcher_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    two(monkeypatch)
    with pytest.raises(ConfigError, match="a launcher started 2"):
        refuse_ranks("this")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_ranks("this")


def test_shares_need_several_processes(tmp_path: Path) -> None:
    from cases import settings, start

    with pytest.raises(ConfigError, match="there is one process; start several: torchrun --nproc-per-node N"):
        start(settings("full", tmp_path / "run", parallel="fsdp"), "full")
