"""recipes/gsm8k_thai_qwen3_0.6b.yaml from end to end, on a random model of Qwen3's shape and MGSM Thai."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from training.small import rows

from groupline.arguments import switch
from groupline.cli import main
from groupline.config import Config, ConfigError
from groupline.models.load import save_model
from groupline.models.new import NewModel, new_model, new_tokenizer

RECIPE = Path(__file__).parents[1] / "recipes" / "gsm8k_thai_qwen3_0.6b.yaml"
SHARED = Path(os.environ.get("GROUPLINE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
MADE_UP = [(f"มานีมีส้ม {n} ผล ซื้อมาอีก {n + 3} ผล มานีมีส้มกี่ผล", 2 * n + 3) for n in range(2, 30)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gsm8k_th.jsonl in GSM8K's form and mgsm_th.tsv: from MGSM Thai, or made up where that is absent."""
    folder = tmp_path_factory.mktemp("data")
    if (SHARED / "mgsm_th.tsv").is_file():
        lines = (SHARED / "mgsm_th.tsv").read_text(encoding="utf-8").splitlines()
        pairs: list[tuple[str, Any]] = [(q, a) for q, a in (line.split("\t") for line in lines)]
    else:
        pairs = list(MADE_UP)
    held, train = pairs[:5], pairs[5:25]
    (folder / "mgsm_th.tsv").write_text("".join(f"{q}\t{a}\n" for q, a in held), encoding="utf-8")
    worked = [{"question": q, "answer": f"ทีละขั้น\n#### {a}"} for q, a in train]
    (folder / "gsm8k_th.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def start(data: Path) -> Path:
    """A folder with a random Qwen3 whose tokenizer knows some Thai."""
    texts = [str(yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["system_prompt"]), *(q for q, _ in MADE_UP)]
    tokenizer = new_tokenizer(texts, 400)
    shape = NewModel(hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=16, positions=2048)
    folder = data / "model"
    save_model(new_model(shape, tokenizer, 0), tokenizer, folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    return folder


def arguments(data: Path, start: Path, run: Path, *more: object) -> list[str]:
    """The recipe with what stands for its model and data."""
    given = {
        "model": start,
        "train-file": data / "gsm8k_th.jsonl",
        "eval-file": data / "mgsm_th.tsv",
        "output-dir": run,
    }
    given |= {"prompts-per-step": 2, "max-prompt-length": 1200, "eval-samples": 1}
    return ["train", str(RECIPE), *(str(a) for k, v in given.items() for a in (f"--{k}", v)), *map(str, more)]


def test_the_two_settings() -> None:
    full, fast = Config.load(RECIPE), Config.load(RECIPE, fast=True)
    assert (full.model, full.lora_r > 0, full.num_generations, full.max_completion_length) == (
        "Qwen/Qwen3-0.6B", True, 8, 256,
    )  # fmt: skip
    assert (full.steps * full.num_iterations, full.steps * full.prompts_per_step) == (16, 128)
    assert (fast.num_generations, fast.max_completion_length, fast.steps) == (4, 192, 16)


def test_dry_run_then_train_in_the_same_folder(
    data: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(arguments(data, start, run, "--fast", "--dry-run", "--steps", "1")) == 0
    out = capsys.readouterr().out
    assert sorted(p.name for p in run.iterdir()) == ["config.yaml", "plan.txt"]
    plan = (run / "plan.txt").read_text(encoding="utf-8")
    assert plan in out
    assert "2 prompts x 4 answers = 8 answers" in plan
    assert "1 steps x 1 = 1; at most 1,536 new tokens" in plan  # 2 x 4 x 192
    assert "1 x correct_number, 0.2 x language_share" in plan
    assert f"{run / 'plan.txt'}" in out
    planned = Config.load(run / "config.yaml")
    assert (planned.num_generations, planned.max_completion_length, planned.steps) == (4, 192, 1)

    assert main(arguments(data, start, run, "--fast", "--steps", "1")) == 0
    trained = (run / "plan.txt").read_text(encoding="utf-8")
    assert without_memory(trained) == without_memory(plan)
    assert main(arguments(data, start, run, "--dry-run", "--overwrite", "true")) == 2  # a plan replaces no run
    assert "already holds a run" in capsys.readouterr().err
    assert len(rows(run / "metrics.jsonl")) == 1


def without_memory(plan: str) -> list[str]:
    """The line that depends on how much is free left out."""
    return [line for line in plan.splitlines() if not line.startswith("    memory")]


def test_the_recipe_trains(data: Path, start: Path, tmp_path: Path) -> None:
    """Problems, prompts, rewards, groups and the saved adapter are what the recipe and the files say."""
    run = tmp_path / "run"
    assert main(arguments(data, start, run, "--fast=true", "--steps", "2", "--max-completion-length", "24")) == 0
    answers = rows(run / "rollouts.jsonl")
    assert len(answers) == 2 * 2 * 4
    asked = {row["question"]: row["answer"] for row in rows(data / "gsm8k_th.jsonl")}
    for answer in answers:
        system, user = answer["prompt"]
        assert system["content"] == Config.load(RECIPE).system_prompt
        assert asked[user["content"]].endswith(f"#### {answer['gold']}")
        assert set(answer["rewards"]) == {"correct_number", "language_share"}
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["held_out"]["problems"] == 5
    assert [m["step"] for m in rows(run / "metrics.jsonl")] == [1, 2]
    assert json.loads((run / "model" / "adapter_config.json").read_text())["r"] == 16


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ([], None), (["--fast"], True), (["--fast", "true"], True), (["--fast", "False"], False),
        (["--fast=false"], False), (["--fast", "--seed", "1"], True), (["--fast", "recipe.yaml"], True),
    ],
)  # fmt: skip
def test_switches(args: list[str], found: bool | None) -> None:
    rest = [a for a in args if a in ("--seed", "1", "recipe.yaml")]
    assert switch(["x.yaml", *args, "--lora-r", "4"], "fast") == (found, ["x.yaml", *rest, "--lora-r", "4"])


def test_switches_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert switch(["--dry_run"], "dry-run") == (True, [])
    with pytest.raises(ConfigError, match="--fast is 'perhaps'; it must be true or false"):
        switch(["--fast=perhaps"], "fast")
    assert main(["train", "--fast"]) == 2
    assert "--fast takes the fast_settings of a recipe, and no recipe is given" in capsys.readouterr().err
