"""A run that goes on from a checkpoint is the run that never stopped; what would make it another one is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import EVEN, config, rows, run, same, sums, twin, untimed, weights
from torch import Tensor, nn

from groupline.config import Config, ConfigError
from groupline.models.lora import add_lora
from groupline.rewards import Reward
from groupline.training.checkpoint import read_checkpoint
from groupline.training.generators import random_state, set_random_state
from groupline.training.resume import fingerprint


class Stopped(Exception):
    """In place of a kill: nothing of the library runs after it."""


def stop_after(step: int) -> Any:
    def say(line: str) -> None:
        if line.replace(" ", "").startswith(f"step{step}/"):
            raise Stopped

    return say


def halves(
    folder: Path, start: nn.Module, tokenizer: Any, stop: int, changes: dict[str, Any], **given: Any
) -> nn.Module:
    """The policy of a run that stopped while step `stop` + 1 was being saved and was resumed from twins of everything."""
    settings = config(folder, **changes)
    with pytest.raises(Stopped):
        run(settings, twin(start), tokenizer, say=stop_after(stop + 1), **given)
    torch.manual_seed(99)  # another process has other generators
    policy = twin(start)
    run(settings.model_copy(update={"resume": True}), policy, tokenizer, **given)
    return policy


def starting_adapter(start: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    policy: nn.Module = add_lora(twin(start), 2)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02)
    return policy


LAWS: dict[str, dict[str, Any]] = {
    "full": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "full with a reference": {"beta": 0.1},
    "KL in the reward": {"objective": "rloo", "beta": 0.1},
    "two updates a step": {"num_iterations": 2, "beta": 0.05, "lr_scheduler_type": "linear"},
    "fresh LoRA": {"lora_r": 2, "lora_dropout": 0.3, "beta": 0.1, "num_iterations": 2},
    "starting adapter": {"beta": 0.1, "old_logprobs": "sampler", "num_iterations": 2},
    "drawn ahead": {"staleness": 2},
    "drawn ahead, groups replaced": {"staleness": 1, "dynamic_sampling": 2, "lora_r": 2, "num_iterations": 2},
}


@pytest.mark.parametrize("law", LAWS)
def test_a_resumed_run_is_the_run_that_never_stopped(
    law: str, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    """Steps, epochs, held-out measures, weights, moments, generators: bit for bit."""
    start = starting_adapter(first) if law == "starting adapter" else first
    held = sums(16)[12:]
    changes = {"steps": 5, "save_steps": 2, "eval_every": 2, "eval_samples": 2, "learning_rate": 5e-3} | LAWS[law]
    whole = twin(start)
    torch.manual_seed(1)
    results = run(config(tmp_path / "whole", **changes), whole, tokenizer, held_out=held)
    policy = halves(tmp_path / "two", start, tokenizer, 2, changes, held_out=held)
    assert same(weights(policy), weights(whole))
    for name in ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl"):
        assert untimed(tmp_path / "two" / name) == untimed(tmp_path / "whole" / name)
    again = json.loads((tmp_path / "two" / "results.json").read_text("utf-8"))
    for part in (again, results):
        for when in ("before", "after"):
            del part["held_out"][when]["seconds"]
    assert again == json.loads(json.dumps(results))
    ends = [read_checkpoint(tmp_path / name / "checkpoint-4") for name in ("two", "whole")]
    states = [e.torch_state()["optimiser"] for e in ends]
    assert equal(*states)
    assert equal(*(e.tensors("weights") for e in ends))
    assert ends[0].state["files"].keys() == {"metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl"}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return bool(one == other)


def test_the_law_can_fail(tmp_path: Path, first: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its generators a run with dropout does not come back: what the law above compares does depend on them."""
    changes = {"steps": 4, "save_steps": 2, **LAWS["fresh LoRA"]}
    whole = twin(first)
    run(config(tmp_path / "whole", **changes), whole, tokenizer)
    monkeypatch.setattr("groupline.training.resume.set_random_state", lambda state: None)
    policy = halves(tmp_path / "two", first, tokenizer, 2, changes)
    assert untimed(tmp_path / "two" / "metrics.jsonl") != untimed(tmp_path / "whole" / "metrics.jsonl")
    assert not same(weights(policy), weights(whole))


def test_generators_come_back() -> None:
    def draws() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
        ]

    random.gauss(0, 1)
    np.random.randn()  # each keeps a second number back
    state = random_state()
    expected = draws()
    draws()
    set_random_state(state)
    assert draws() == expected


def test_a_fingerprint_tells_models_apart() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.bfloat16)}
    assert fingerprint(one.items()) == fingerprint({k: v.clone() for k, v in one.items()}.items())
    smallest = one | {"a": torch.tensor([1.0, float(np.nextafter(np.float32(2), np.float32(3)))])}
    for other in (
        smallest,
        {"c": one["a"], "b": one["b"]},
        one | {"a": one["a"].reshape(2, 1)},
        one | {"a": one["a"].half()},
    ):
        assert fingerprint(other.items()) != fingerprint(one.items())


# Which checkpoint


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory, first: nn.Module, tokenizer: Any) -> Config:
    settings = config(tmp_path_factory.mktemp("stopped") / "run", steps=6, save_steps=1, save_total_limit=None)
    with pytest.raises(Stopped):
        run(settings, twin(first), tokenizer, say=stop_after(4))
    return settings


@pytest.fixture
def stopped(stopped_once: Config, tmp_path: Path) -> Config:
    """Settings to go on with a run of 6 steps that was stopped after step 4, with checkpoints of steps 1, 2 and 3."""
    shutil.copytree(stopped_once.output_dir, tmp_path / "run")
    return stopped_once.model_copy(update={"resume": True, "output_dir": str(tmp_path / "run")})


def test_the_newest_whole_one_is_taken_and_torn_ones_are_named(
    stopped: Config, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoint-3" / "weights.safetensors").write_bytes(b"torn")
    said: list[str] = []
    run(stopped, model, tokenizer, say=said.append)
    assert said[0] == f"passing over {folder}/checkpoint-3: weights.safetensors has 4 bytes of " + said[0].split()[-1]
    assert said[1] == f"resuming from {folder}/checkpoint-2, after step 2 of 6"
    assert said[2] == f"a later checkpoint is set aside as {folder}/set-aside-checkpoint-3; the run writes it anew"
    assert [m["step"] for m in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert len(rows(folder / "rollouts.jsonl")) == 6 * 12
    assert Config.load(folder / "config.yaml") == stopped.model_copy(update={"resume": False})


def test_one_that_is_named_is_taken(stopped: Config, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    folder = tmp_path / "run"
    said: list[str] = []
    run(stopped.model_copy(update={"resume": str(folder / "checkpoint-1")}), model, tokenizer, say=said.append)
    assert said[0] == f"resuming from {folder}/checkpoint-1, after step 1 of 6"
    assert [m["step"] for m in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    elsewhere = stopped.model_copy(update={"resume": str(folder / "checkpoint-1"), "output_dir": str(tmp_path / "new")})
    with pytest.raises(ConfigError, match=r"checkpoint-1 is not in output_dir .*new, .*; set output_dir to .*run"):
        run(elsewhere, model, tokenizer)


def test_without_a_checkpoint_a_killed_run_begins_again(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    settings = config(tmp_path / "run", save_steps=2)
    with pytest.raises(Stopped):
        run(settings, twin(model), tokenizer, say=stop_after(1))
    (tmp_path / "run" / ".checkpoint-2-new").mkdir()
    said: list[str] = []
    run(settings.model_copy(update={"resume": True}), model, tokenizer, say=said.append)
    assert said[0].endswith(".checkpoint-2-new: its writing was cut short")
    assert said[1].endswith("run holds no whole checkpoint: beginning at the beginning")
    assert [m["step"] for m in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_resuming_never_deletes_what_it_cannot_make_again(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    settings = config(tmp_path / "run", save_steps=0)
    run(settings, twin(model), tokenizer)
    held = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        ConfigError, match=r"run holds model, results\.json and no whole checkpoint.*another output_dir"
    ):
        run(settings.model_copy(update={"resume": True}), model, tokenizer)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == held


def test_rows_that_are_gone_are_missed(stopped: Config, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has 50 bytes and had \d+ when the checkpoint was taken"):
        run(stopped, model, tokenizer)


# What must stay


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, r"learning_rate was 0\.001 and is 0\.5 now"),
        ({"num_generations": 2, "seed": 1}, r"seed was 0 and is 1 now; num_generations was 4 and is 2 now"),
        ({"steps": 2}, r"steps is 2, and .*checkpoint-3 is after step 3 already"),
        ({"objective": "dapo"}, r'objective was "grpo" and is "dapo" now'),
        ({"lr_scheduler_type": "linear", "steps": 9}, r"steps was 6 and is 9 now; lr_scheduler_type was "),
    ],
)
def test_settings_that_make_another_run_are_refused(
    stopped: Config, tmp_path: Path, model: nn.Module, tokenizer: Any, changes: dict[str, Any], message: str
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(ConfigError, match=f"^resume: {message}") as caught:
        run(stopped.model_copy(update=changes), model, tokenizer)
    allowed = "These may change: activation_checkpointing, cache_gib, device, eval_every, log_rollouts, log_tokens, "
    assert (allowed in str(caught.value)) == ("now" in message or "was " in message)  # case G5
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_settings_of_place_and_memory_may_change(
    stopped: Config, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    """Also the number of steps, under a constant rate; the note says that sums may round otherwise."""
    (tmp_path / "run").rename(tmp_path / "moved")
    changes = {
        "output_dir": str(tmp_path / "moved"),
        "steps": 7,
        "save_steps": 0,
        "micro_batch_tokens": 40,
        "max_rows": 5,
    }
    said: list[str] = []
    run(stopped.model_copy(update=changes), model, tokenizer, say=said.append)
    assert said[1] == "note: micro_batch_tokens 4096 -> 40: the same run up to rounding, not bit for bit"
    assert [m["step"] for m in rows(tmp_path / "moved" / "metrics.jsonl")] == [*range(1, 8)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"problems": sums(11)}, "the training problems are not those that .*checkpoint-3 started from"),
        ({"held_out": sums(13)[12:]}, "the held-out problems are not those"),
        ({"rewards": [Reward("even_share", EVEN.function, weight=2.0)]}, r"the rewards are not those .*'even_share', 1\.0"),
    ],
)  # fmt: skip
def test_other_data_and_rewards_are_refused(
    stopped: Config, model: nn.Module, tokenizer: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(stopped, model, tokenizer, **given)


def test_another_number_format_is_refused(stopped: Config, model: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"number format \(precision\) are not .*: torch.float32, now torch.bfloat16"):
        run(stopped.model_copy(update={"precision": "bf16"}), model, tokenizer)


def test_another_base_under_the_adapter_is_refused(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    settings = config(tmp_path / "run", steps=3, save_steps=1, lora_r=2)
    with pytest.raises(Stopped):
        run(settings, twin(first), tokenizer, say=stop_after(2))
    other = twin(first)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    with pytest.raises(ConfigError, match="the frozen weights are not those that"):
        run(settings.model_copy(update={"resume": True}), other, tokenizer)


def test_the_reference_of_a_model_passed_in_is_kept(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """No name leads back to such weights, so a resumed run takes its reference from the checkpoint."""
    changes = {"steps": 4, "save_steps": 1, "beta": 0.2}
    whole = twin(first)
    run(config(tmp_path / "whole", **changes), whole, tokenizer)
    with pytest.raises(Stopped):
        run(config(tmp_path / "two", **changes), twin(first), tokenizer, say=stop_after(3))
    other = twin(first)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    run(config(tmp_path / "two", **changes, resume=True), other, tokenizer)
    assert same(weights(other), weights(whole))


def test_the_reference_of_a_named_model_must_be_the_same(tmp_path: Path, start: Path, tokenizer: Any) -> None:
    from small import make_model

    from groupline.models.load import save_model
    from groupline.training.grpo import train

    save_model(make_model(tokenizer), tokenizer, tmp_path / "base")
    settings = config(tmp_path / "run", steps=3, save_steps=1, beta=0.2, model=str(tmp_path / "base"))
    given: dict[str, Any] = {"problems": sums(12), "held_out": [], "rewards": [EVEN]}
    with pytest.raises(Stopped):
        train(settings, stop_after(3), **given)
    assert not (tmp_path / "run" / "checkpoint-2" / "reference.safetensors").exists()
    save_model(make_model(tokenizer, seed=1), tokenizer, tmp_path / "base")
    with pytest.raises(ConfigError, match="the starting weights are not those that"):
        train(settings.model_copy(update={"resume": True}), lambda line: None, **given)
