"""SFT, DPO and the reward model: a run that goes on from a checkpoint is the run that never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import rows, same, twin
from torch import Tensor, nn

from groupline import DpoConfig, Pair, Problem, RewardModelConfig, SftConfig, dpo, reward_model, sft
from groupline.cli import main
from groupline.config import ConfigError
from groupline.training import loop
from groupline.training.checkpoint import checkpoints, read_checkpoint
from groupline.training.optim import NonFinite
from groupline.training.ppo import PpoConfig, ppo

PROBLEMS = [Problem(f"sum-{i}", f"{i}+{i}=", columns={"solution": f"{i} twice is {2 * i}"}) for i in range(13)]
PAIRS = [Pair(f"{i}+{i}=", f"{2 * i}", f"{2 * i}99", f"pair-{i}", columns={"margin": i / 9}) for i in range(13)]
DATA: dict[str, dict[str, Any]] = {
    "sft": {"problems": PROBLEMS[:9], "held_out": PROBLEMS[9:]},
    "dpo": {"pairs": PAIRS[:9], "eval_pairs": PAIRS[9:]},
    "reward_model": {"pairs": PAIRS[:9], "eval_pairs": PAIRS[9:]},
}
KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SftConfig, sft),
    "dpo": (DpoConfig, dpo),
    "reward_model": (RewardModelConfig, reward_model),
}
LORA = {"lora_r": 2, "lora_dropout": 0.3}


class Stopped(Exception):
    """In place of a kill: nothing of the library runs after it."""


def stop_after(step: int) -> Any:
    def say(line: str) -> None:
        if line.startswith(f"step {step}/"):
            raise Stopped

    return say


def silent(_: str) -> None:
    pass


def settings(method: str, folder: Path, **changes: Any) -> Any:
    given = {"steps": 7, "batch_size": 4, "learning_rate": 5e-3, "output_dir": str(folder), "save_steps": 2}
    return KINDS[method][0](**given | changes)


def train(method: str, config: Any, model: nn.Module | None, tokenizer: Any, say: Any = silent, **given: Any) -> Any:
    return KINDS[method][1](config, say, model=model, tokenizer=tokenizer, **DATA[method] | given)


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder / "metrics.jsonl")]


def saved(folder: Path) -> dict[str, Tensor]:
    """The trained model's weights, as its file has them."""
    (file,) = (folder / "model").glob("*.safetensors")
    return dict(load_file(file))


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    del found["seconds"]
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("changes", [{"warmup_steps": 3, "weight_decay": 0.1}, LORA], ids=["full", "lora with dropout"])
@pytest.mark.parametrize("method", KINDS)
def test_a_resumed_run_is_the_run_that_never_stopped(
    method: str, changes: dict[str, Any], tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    """Weights, log, held-out measures, moments and generators; the run is stopped twice, in another process each."""
    whole, two = tmp_path / "whole", tmp_path / "two"
    torch.manual_seed(1)
    train(method, settings(method, whole, **changes), twin(first), tokenizer)
    config = settings(method, two, **changes)
    torch.manual_seed(1)
    with pytest.raises(Stopped):
        train(method, config, twin(first), tokenizer, stop_after(3))
    again = config.model_copy(update={"resume": True})
    for stop in (stop_after(6), silent):
        torch.manual_seed(99)  # another process has other generators
        try:
            train(method, again, twin(first), tokenizer, stop)
        except Stopped:
            assert [row["step"] for row in untimed(two)] == [1, 2, 3, 4, 5, 6]  # each once, not as two runs have them
    assert same(saved(two), saved(whole))
    assert untimed(two) == untimed(whole)
    assert [row["step"] for row in untimed(two)] == [1, 2, 3, 4, 5, 6, 7]
    assert results(two) == results(whole)
    assert [p.name for p in checkpoints(two)] == ["checkpoint-4", "checkpoint-6"]
    ends = [read_checkpoint(folder / "checkpoint-6") for folder in (two, whole)]
    assert equal(*(e.torch_state() for e in ends))
    assert equal(*(e.tensors("weights") for e in ends))
    assert ends[0].state["files"].keys() == {"metrics.jsonl"}


def test_the_law_can_fail(tmp_path: Path, first: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its generators a run with dropout does not come back: what the law above compares does depend on them."""
    train("sft", settings("sft", tmp_path / "whole", **LORA), twin(first), tokenizer)
    config = settings("sft", tmp_path / "two", **LORA)
    with pytest.raises(Stopped):
        train("sft", config, twin(first), tokenizer, stop_after(3))
    monkeypatch.setattr("groupline.training.loop_resume.set_random_state", lambda state: None)
    train("sft", config.model_copy(update={"resume": True}), twin(first), tokenizer)
    assert untimed(tmp_path / "two") != untimed(tmp_path / "whole")


def test_dpo_keeps_its_reference(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Nothing but the checkpoint leads back to the start of a model that was passed in: its log-probs are in there."""
    train("dpo", settings("dpo", tmp_path / "whole"), twin(first), tokenizer)
    config = settings("dpo", tmp_path / "two")
    with pytest.raises(Stopped):
        train("dpo", config, twin(first), tokenizer, stop_after(3))
    other = twin(first)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    train("dpo", config.model_copy(update={"resume": True}), other, tokenizer)
    assert same(saved(tmp_path / "two"), saved(tmp_path / "whole"))
    assert untimed(tmp_path / "two") == untimed(tmp_path / "whole")


# Which checkpoint, and what must stay


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory, first: nn.Module, tokenizer: Any) -> Any:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    config = settings("dpo", folder, save_steps=1, save_total_limit=None, **LORA)
    with pytest.raises(Stopped):
        train("dpo", config, twin(first), tokenizer, stop_after(4))
    return config


@pytest.fixture
def stopped(stopped_once: Any, tmp_path: Path) -> Any:
    """Settings to go on with a DPO run of 7 updates that was stopped after the fourth, with checkpoints 1, 2 and 3."""
    shutil.copytree(stopped_once.output_dir, tmp_path / "run")
    return stopped_once.model_copy(update={"resume": True, "output_dir": str(tmp_path / "run")})


def test_a_corrupt_newest_checkpoint_is_named_and_passed_over(
    stopped: Any, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    folder, said = tmp_path / "run", list[str]()
    file = folder / "checkpoint-3" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the size stays
    file.write_bytes(content)
    train("dpo", stopped, twin(first), tokenizer, said.append)
    assert said[0] == (
        f"passing over {folder}/checkpoint-3: weights.safetensors does not have the contents that were written"
    )
    assert f"resuming from {folder}/checkpoint-2, after step 2 of 7" in said
    assert f"a later checkpoint is set aside as {folder}/set-aside-checkpoint-3; the run writes it anew" in said
    assert [row["step"] for row in untimed(folder)] == [1, 2, 3, 4, 5, 6, 7]
    train("dpo", settings("dpo", tmp_path / "whole", **LORA), twin(first), tokenizer)
    assert untimed(folder) == untimed(tmp_path / "whole")
    assert same(saved(folder), saved(tmp_path / "whole"))


def test_one_that_is_named_is_taken(stopped: Any, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    said: list[str] = []
    named = stopped.model_copy(update={"resume": str(tmp_path / "run" / "checkpoint-1")})
    train("dpo", named, twin(first), tokenizer, said.append)
    assert f"resuming from {tmp_path}/run/checkpoint-1, after step 1 of 7" in said
    assert DpoConfig.load(tmp_path / "run" / "config.yaml") == stopped.model_copy(update={"resume": False})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"learning_rate was 0\.005 and is 0\.5 now"),
        ({"beta": 0.5, "batch_size": 8}, r"batch_size was 4 and is 8 now; beta was 0\.1 and is 0\.5 now"),
        ({"steps": 9}, r"steps was 7 and is 9 now"),  # the rate falls to 0 by the last update
        ({"lora_dropout": 0.0}, r"lora_dropout was 0\.3 and is 0\.0 now"),
    ],
)
def test_settings_that_make_another_run_are_refused(
    stopped: Any, tmp_path: Path, first: nn.Module, tokenizer: Any, changes: dict[str, Any], message: str
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(ConfigError, match=f"^resume: {message}") as caught:
        train("dpo", stopped.model_copy(update=changes), twin(first), tokenizer)
    allowed = "device, merge_adapter, micro_batch_tokens, output_dir, overwrite, precision, project"
    assert f"These may change: {allowed}" in str(caught.value)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pairs": PAIRS[:8]}, "the training examples are not those that .*checkpoint-3 started from"),
        ({"eval_pairs": PAIRS[8:]}, "the held-out examples are not those"),
    ],
)
def test_other_pairs_are_refused(
    stopped: Any, first: nn.Module, tokenizer: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train("dpo", stopped, twin(first), tokenizer, **given)


def test_another_base_format_or_method_is_refused(
    stopped: Any, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    other = twin(first)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    with pytest.raises(ConfigError, match="the frozen weights are not those that"):
        train("dpo", stopped, other, tokenizer)
    with pytest.raises(ConfigError, match=r"number format \(precision\) are not .*: torch.float32, now torch.bfloat16"):
        train("dpo", stopped.model_copy(update={"precision": "bf16"}), twin(first), tokenizer)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"checkpoint-3 is of a run of dpo, and this is one of reward_model"):
        train("reward_model", settings("reward_model", folder, resume=True), twin(first), tokenizer)
    with pytest.raises(ConfigError, match=r"checkpoint-3 is of a run of dpo, and this is one of train or ppo"):
        ppo(PpoConfig(output_dir=str(folder), resume=True), silent)


def test_place_memory_and_the_adapters_form_may_change(
    stopped: Any, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    changes = {"output_dir": str(tmp_path / "moved"), "save_steps": 0, "micro_batch_tokens": 40, "merge_adapter": False}
    said: list[str] = []
    train("dpo", stopped.model_copy(update=changes), twin(first), tokenizer, said.append)
    assert any(line.endswith("-> 40: the same run up to rounding, not bit for bit") for line in said)
    assert [row["step"] for row in untimed(tmp_path / "moved")] == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "moved" / "model" / "adapter_config.json").exists()


def test_without_a_checkpoint_a_killed_run_begins_again(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    config = settings("sft", tmp_path / "run")
    with pytest.raises(Stopped):
        train("sft", config, twin(first), tokenizer, stop_after(1))
    said: list[str] = []
    train("sft", config.model_copy(update={"resume": True}), twin(first), tokenizer, said.append)
    assert said[0].endswith("run holds no whole checkpoint: beginning at the beginning")
    assert [row["step"] for row in untimed(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    finished = settings("sft", tmp_path / "other", save_steps=0)
    train("sft", finished, twin(first), tokenizer)
    with pytest.raises(ConfigError, match=r"other holds model, results\.json and no whole checkpoint to go on from"):
        train("sft", finished.model_copy(update={"resume": True}), twin(first), tokenizer)


def test_resume_on_the_command_line_after_ctrl_c(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interrupted run saved its model; `--resume` alone goes on from its checkpoint to the same end."""
    file = tmp_path / "problems.jsonl"
    lines = [{"question": p.prompt, "solution": p.columns["solution"]} for p in PROBLEMS]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    args = ["--model", str(start), "--train-file", str(file), "--steps", "5", "--batch-size", "4", "--save-steps", "2"]
    assert main(["sft", *args, "--output-dir", str(tmp_path / "whole")]) == 0
    run = tmp_path / "run"
    every = loop.batches

    def three(*given: Any) -> Any:
        for number, batch in enumerate(every(*given)):
            if number == 3:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches", three)
        assert main(["sft", *args, "--output-dir", str(run)]) == 130
    assert results(run)["interrupted"]
    assert main(["sft", *args, "--output-dir", str(run), "--resume"]) == 0
    assert f"resuming from {run}/checkpoint-2, after step 2 of 5" in capsys.readouterr().out
    assert not results(run)["interrupted"]
    assert same(saved(run), saved(tmp_path / "whole"))
    assert untimed(run) == untimed(tmp_path / "whole")


def test_a_loss_that_is_not_finite_names_the_checkpoint(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    model = twin(first)

    def spoil(line: str) -> None:
        if line.startswith("step 3/"):
            with torch.no_grad():
                model.get_input_embeddings().weight.fill_(float("nan"))  # type: ignore[operator]

    with pytest.raises(NonFinite, match=r"the newest checkpoint is .*run/checkpoint-2 \(--resume\)"):
        train("sft", settings("sft", tmp_path / "run"), model, tokenizer, spoil)
