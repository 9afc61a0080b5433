"""The command line: what it prints, its exit status, and how it ends when it is told to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from training.small import LETTERS, make_start, rows
from transformers import AutoModelForCausalLM

from groupline.arguments import settings
from groupline.cli import main
from groupline.config import Config, ConfigError
from groupline.training.ppo import PpoConfig


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture
def recipe(tmp_path: Path, start: Path) -> Path:
    return write_recipe(tmp_path, start)


def write_recipe(folder: Path, start: Path, **changes: Any) -> Path:
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}+{i}=", "answer": 2 * i}) + "\n" for i in range(12)), encoding="utf-8"
    )
    (folder / "judge.py").write_text(
        "def even(completion_ids, **_):\n"
        "    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]\n"
    )
    values = {
        "model": str(start), "train_file": str(folder / "sums.jsonl"), "eval_file": str(folder / "sums.jsonl"),
        "rewards": ["correct_number", f"{folder}/judge.py:even"], "steps": 2, "prompts_per_step": 2,
        "num_generations": 4, "max_completion_length": 8, "learning_rate": "1e-3", "beta": 0.0, "eval_problems": 3,
        "eval_samples": 4, "stop": list(LETTERS), "output_dir": str(folder / "run"),
    } | changes  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml"


def status(*args: object) -> int:
    try:
        return main([str(a) for a in args])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], ["-h"], ["help"]):
        assert status(*args) == 0
        out = capsys.readouterr().out
        for command in ("train", "launch", "ppo", "eval", "sft", "dpo", "merge", "import-gguf", "doctor", "explain"):
            assert f"groupline {command}" in out
    assert status() == 2


@pytest.mark.parametrize(("command", "kind"), [("train", Config), ("ppo", PpoConfig), ("eval", Config)])
def test_help_lists_every_setting(command: str, kind: type[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(command, "--help") == 0
    out = capsys.readouterr().out
    for name in kind.model_fields:
        assert f"--{name.replace('_', '-')}" in out
    assert ("Answers to each prompt; 1 will do" if kind is PpoConfig else "Answers to each prompt: the group.") in out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("trian") == 2
    said = capsys.readouterr()
    assert said.out == ""
    commands = (
        "train, ppo, eval, sft, pairs, reward-model, dpo, compare, merge, import-gguf, compat, doctor, report, watch, "
        "audit-reward, probe, plan, launch, explain"
    )
    assert said.err == f"groupline: there is no command 'trian'; commands: {commands}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stepz", "3"], "unknown setting 'stepz'; did you mean 'steps'?"),
        (["--max-steps=3"], "unknown setting 'max_steps'; here it is steps"),
        (["nowhere.yaml"], "there is no file nowhere.yaml"),
    ],
)
def test_unusable_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", *args) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"groupline train: {message}\n"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--learning-rate", "fast"], ["--learning-rate", "fast"]),
        (["--learning-rate", "-1"], ["learning_rate is -1.0", "greater than 0"]),
        (["--num-generations", "1"], ["num_generations is 1", "at least 2"]),
        (["--overwrite", "perhaps"], ["--overwrite"]),
    ],
)
def test_values_that_do_not_fit(args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", *args) == 2
    said = capsys.readouterr()
    text = re.sub(r"[\s│]+", " ", said.out + said.err)  # without the frame and its line breaks
    for part in parts:
        assert part in text


def test_arguments_win_over_the_recipe(recipe: Path) -> None:
    read = settings(Config, [str(recipe)])
    assert (read.steps, read.learning_rate, read.overwrite) == (2, 1e-3, False)
    changed = settings(
        Config,
        [str(recipe), "--steps", "7", "--learning-rate=2e-4", "--overwrite", "true", "--log-rollouts", "False", "--beta", "0.1",
         "--rewards", "think_format", "correct_number", "--stop", "\n", "--lora_r", "4", "--scale-rewards", "none"],
    )  # fmt: skip
    kept = {k: v for k, v in read.model_dump().items() if k not in changed.model_fields_set or v == getattr(changed, k)}
    assert changed.model_dump() == kept | {
        "steps": 7, "learning_rate": 2e-4, "overwrite": True, "log_rollouts": False, "beta": 0.1,
        "rewards": ("think_format", "correct_number"), "stop": ("\n",), "lora_r": 4, "scale_rewards": "none",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        settings(Config, [str(recipe), "--step", "7"])


def test_train_prints_plan_lines_and_table(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", recipe) == 0
    out = capsys.readouterr().out
    assert "2 prompts x 4 answers = 8 answers" in out
    assert re.findall(r"^step (\d/2)  reward ", out, re.MULTILINE) == ["1/2", "2/2"]
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    held = results["held_out"]
    for k in (1, 2, 4):
        (row,) = re.findall(rf"^pass@{k} .*", out, re.MULTILINE)
        for when in ("before", "after"):
            low, high = held[when][f"pass@{k}"]["wilson"]
            assert f"{held[when][f'pass@{k}']['value']:.1%}" in row
            assert f"{low:.1%} to {high:.1%}" in row
    for place in ("figures", "rollouts.jsonl", "results.json", "model"):
        assert str(tmp_path / "run" / place) in out
        assert (tmp_path / "run" / place).exists()
    assert len(list((tmp_path / "run" / "figures").glob("*.png"))) == 4
    assert status("train", recipe) == 2  # case G4
    assert "already holds a run; give another output_dir, or --overwrite True" in capsys.readouterr().err
    assert status("train", recipe, "--overwrite", "True", "--steps", "1") == 0
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 1


def test_figures_are_no_condition(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert status("train", recipe, "--steps", "1", "--eval-problems", "0") == 0
    out = capsys.readouterr().out
    assert "no figures: figures need matplotlib: pip install 'groupline[plot]'" in out
    assert "pass@" not in out
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize("lora", [0, 4])
def test_eval_of_a_run(lora: int, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder is measured with its own settings; the figures are those that training ended with."""
    assert status("train", recipe, "--lora-r", lora, "--learning-rate", "1e-2") == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    assert status("eval", tmp_path / "run") == 0
    measured = json.loads(capsys.readouterr().out)
    after = results["held_out"]["after"]
    assert measured["problems"] == 3
    assert measured["pass@1"] == after["pass@1"]
    assert measured["reward"] == pytest.approx(after["reward"], abs=1e-9)
    assert measured["completion_length"] == after["completion_length"]
    assert status("eval", tmp_path / "run", "--eval-samples", "2") == 0
    assert "pass@4" not in json.loads(capsys.readouterr().out)


def test_eval_of_a_model_by_settings(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("eval", recipe, "--eval-problems", "2") == 0
    assert json.loads(capsys.readouterr().out)["problems"] == 2
    assert status("eval", recipe, "--eval-problems", "0") == 2
    assert "eval_problems is 0: there is nothing to evaluate" in capsys.readouterr().err
    assert status("eval", recipe.parent / "nothing") == 2
    assert "there is no file" in capsys.readouterr().err


def test_sft_and_eval_of_its_folder(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "model": str(start),
        "task": "arithmetic_en",
        "problems": 8,
        "steps": 2,
        "batch_size": 4,
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    assert status("sft", tmp_path / "sft.yaml", "--learning-rate", "1e-3") == 0
    assert "step 2/2  loss" in capsys.readouterr().out
    assert (
        status("eval", tmp_path / "run", "--eval-problems", "2", "--eval-samples", "2", "--max-completion-length", "4")
        == 0
    )
    assert json.loads(capsys.readouterr().out)["judge"] == "correct_number"
    assert status("sft", tmp_path / "sft.yaml") == 2
    assert "already holds a run" in capsys.readouterr().err


def test_import_gguf_refuses_what_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("import-gguf", tmp_path / "no.gguf", tmp_path / "out") == 2
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "no.gguf").write_bytes(b"PK\x03\x04 a zip file")
    assert status("import-gguf", tmp_path / "no.gguf", tmp_path / "out") == 2
    assert "no.gguf is not a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert status("import-gguf") == 2


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPLINE_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="there is no file"):
        main(["train", "nowhere.yaml"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_whole(name: str, tmp_path: Path, start: Path) -> None:
    """Ctrl-C, and a scheduler's stop: exit status 130, a model that loads, whole files."""
    recipe = write_recipe(tmp_path, start, steps=100_000, eval_problems=0)
    process = subprocess.Popen(
        [sys.executable, "-m", "groupline.cli", "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + 120
        for line in process.stdout:
            assert time.monotonic() < deadline
            if line.startswith("step      3/"):
                break
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "saving the model as it is" in out
    run = tmp_path / "run"
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    done = len(results["steps"])
    assert done >= 3
    assert [m["step"] for m in rows(run / "metrics.jsonl")][:done] == [*range(1, done + 1)]
    assert len(rows(run / "rollouts.jsonl")) >= 8 * done
    assert AutoModelForCausalLM.from_pretrained(run / "model").num_parameters() > 0
    assert not [p.name for p in run.iterdir() if p.name.startswith(".")]


def test_resume_alone_means_the_newest(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(Config, [str(recipe), "--resume"]).resume is True
    assert settings(Config, [str(recipe), "--resume", "--steps", "3"]).resume is True
    assert settings(Config, [str(recipe), "--resume", "false"]).resume is False
    assert settings(Config, [str(recipe), "--resume=runs/x/checkpoint-2"]).resume == "runs/x/checkpoint-2"
    assert status("train", recipe, "--save-steps", "1", "--eval-problems", "0") == 0
    assert status("train", recipe, "--resume", "--seed", "4", "--eval-problems", "0") == 2
    assert "groupline train: resume: seed was 0 and is 4 now" in capsys.readouterr().err
    assert status("train", tmp_path / "run" / "config.yaml", "--resume", tmp_path / "run" / "checkpoint-1") == 0
    assert f"resuming from {tmp_path}/run/checkpoint-1, after step 1 of 2" in capsys.readouterr().out
    assert [m["step"] for m in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_eval_of_two_models(recipe: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings from the run that is compared; a model against itself has nothing to tell."""
    assert status("train", recipe, "--steps", "1", "--eval-problems", "0") == 0
    run, out = tmp_path / "run", tmp_path / "found.json"
    capsys.readouterr()
    common = ("--k", "2,1,2", "--eval-problems", "3", f"--out={out}")
    assert status("eval", "--compare", start, run, *common) == 0
    said = capsys.readouterr()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["models"] == {"before": str(start), "after": str(run)}
    assert (found["k"], found["samples"], found["problems"]) == ([1, 2], 4, 3)  # the recipe's eval_samples are more
    assert set(found["right_per_problem"]["before"]) == {"sums-1", "sums-2", "sums-3"}
    assert said.out.rstrip().endswith(found["verdict"]["text"])
    assert f"{out.with_suffix('.svg')}" in said.err

    assert status("eval", recipe, "--compare", start, start, *common, "--eval-samples", "1") == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["right_per_problem"]["before"] == found["right_per_problem"]["after"]
    assert (found["samples"], found["verdict"]["label"]) == (2, "within noise")

    capsys.readouterr()
    assert status("eval", recipe, "--k", "1,3", "--eval-samples", "2", "--out", out) == 0
    said = capsys.readouterr()
    assert [k for k in json.loads(said.out) if k.startswith("pass@")] == ["pass@1", "pass@3"]
    assert json.loads(said.out)["samples"] == 3
    assert sum(json.loads(out.read_text())["right_per_problem"].values()) <= 9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--compare", "builtin"], "--compare needs 2 values after it"),
        (["--compare", "builtin", "--k", "1"], "--compare needs 2 values after it"),
        (["--k"], "--k needs 1 value after it"),
        (["--k", "1,two"], "--k is '1,two'; it must be whole numbers from 1"),
        (["--k=0,1"], "--k is '0,1'; it must be whole numbers from 1"),
        (["--compare", "builtin", "no/such/folder", "--eval-problems", "2", "--k", "1"], "no/such/folder"),
    ],
)
def test_what_eval_refuses(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("eval", *args) == 2
    assert message in capsys.readouterr().err


def test_ppo_then_eval_of_its_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with single answers, planned, made and measured again from its folder."""
    single = ("--num-generations", 1)
    assert status("ppo", recipe, *single, "--dry-run") == 0
    assert "objective  ppo: baseline none" in capsys.readouterr().out
    assert status("ppo", recipe, *single, "--value_learning_rate", "1e-2") == 0
    out = capsys.readouterr().out
    assert "value explains" in out
    assert "held out: 3 problems, 4 answers each" in out
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["models"].keys() == {"policy", "value"}  # beta 0: no reference
    assert status("eval", tmp_path / "run") == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["pass@1"]["value"] == results["held_out"]["after"]["pass@1"]["value"]
    assert status("train", recipe, "--objective", "ppo", "--overwrite", "true") == 2
    assert "PPO needs a value model beside the policy: `groupline ppo`" in capsys.readouterr().err
