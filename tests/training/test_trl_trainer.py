"""A TRL script with its import changed: whole runs on a tiny model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel
from small import gap, rows, same, twin, weights
from torch import nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback

import groupline
from groupline.config import ConfigError
from groupline.models.lora import add_lora
from groupline.trl import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TALKS = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": 2 * i} for i in range(9)]
TEXTS = [{"prompt": f"{i * i}+{i}=", "answer": str(i * i + i)} for i in range(9)]


def reward_correct(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [float(str(a) in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


def reward_format(completions: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("answers_scored", len(completions))
    return [len(c[0]["content"]) % 7 / 7 for c in completions]


def reward_even(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def options(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return GRPOConfig(str(folder), **values | changes)


def trainer(
    folder: Path, model: Any, tokenizer: Any, *, callbacks: Any = None, data: Any = TEXTS, **changes: Any
) -> Any:
    return GRPOTrainer(
        model, reward_even, options(folder, **changes), data, data[:3], processing_class=tokenizer, callbacks=callbacks
    )


class Seen(TrainerCallback):
    """Keeps the events, each with the step it came at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.given: dict[str, dict[str, Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.events.append((name, state.global_step))
            self.given[name] = kwargs

        return event


@pytest.mark.parametrize("name", ["GRPOConfig", "GRPOTrainer"])
def test_also_at_top_level(name: str) -> None:
    assert getattr(groupline, name) is getattr(groupline.trl, name)


def test_the_script_of_the_running_case(tmp_path: Path, start: Path, tokenizer: Any) -> None:
    """An SFT adapter on its base, trained on, with a KL to where it began; saved, loaded again, equal."""
    sft = add_lora(AutoModelForCausalLM.from_pretrained(start), 4, dropout=0.1)
    with torch.no_grad():
        for name, parameter in sft.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    sft.save_pretrained(tmp_path / "sft")
    began = {n: p for n, p in weights(sft).items() if "lora_" in n}

    base = AutoModelForCausalLM.from_pretrained(start)
    policy = PeftModel.from_pretrained(base, tmp_path / "sft", is_trainable=True)
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        num_generations=4,
        max_completion_length=6,
        max_prompt_length=64,
        temperature=0.9,
        beta=0.04,
        epsilon=0.2,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        fp16=True,
        logging_steps=2,
    )
    run = GRPOTrainer(
        model=policy,
        reward_funcs=[reward_correct, reward_format],
        args=args,
        train_dataset=datasets.Dataset.from_list(TALKS),
        eval_dataset=datasets.Dataset.from_list(TALKS[:2]),
        processing_class=tokenizer,
    )
    output = run.train()
    assert output.global_step == run.state.global_step == 4  # 9 prompts, 2 a step, the ninth left out
    logged = [row for row in run.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    for key in ("reward", "rewards/reward_correct/mean", "rewards/reward_format/std", "kl", "entropy", "grad_norm",
                "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "learning_rate",
                "clip_ratio/high_mean", "num_tokens", "step_time", "epoch"):  # fmt: skip
        assert all(key in row for row in logged), key
    assert [row["answers_scored"] for row in logged] == [8.0, 8.0]  # by log_metric
    assert [row["learning_rate"] for row in logged] == pytest.approx([7.5e-3, 2.5e-3])  # linear, as TRL's default
    measured = run.evaluate()
    assert measured["eval_answers_scored"] == 8.0
    assert {"eval_reward", "eval_rewards/reward_format/mean", "eval_pass@1", "eval_pass@4"} <= set(measured)
    assert {k: v for k, v in run.state.log_history[-1].items() if k in measured} == measured
    run.save_model()
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "out")
    trained, loaded = ({n: p for n, p in weights(m).items() if "lora_" in n} for m in (run.model, again))
    assert same(trained, loaded)
    assert gap(trained, began) > 1e-3
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").exists()
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    answers = rows(folder / "rollouts.jsonl")
    assert len(answers) == 4 * 2 * 4
    assert answers[0]["gold"] in range(0, 18, 2)


@pytest.mark.parametrize("source", ["object", "folder"])
def test_peft_config_makes_an_adapter(source: str, tmp_path: Path, start: Path, model: nn.Module) -> None:
    given = str(start) if source == "folder" else AutoModelForCausalLM.from_pretrained(start)
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    run = GRPOTrainer(given, reward_even, options(tmp_path, beta=0.1), TEXTS, peft_config=adapter)
    run.train()
    changed = {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert changed
    assert all("lora_" in n for n in changed)
    assert next(row["kl"] for row in run.state.log_history if "kl" in row) == pytest.approx(0, abs=1e-6)
    with run.model.disable_adapter():
        ids = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(run.model(ids).logits, model(ids).logits)
        base = run.model(ids).logits
    assert not torch.equal(run.model(ids).logits, base)


def test_events_in_hugging_faces_order(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Two updates on each of two rollouts, with a log, an evaluation and a save every second update."""
    seen = Seen()
    run = trainer(
        tmp_path, model, tokenizer, callbacks=[seen], num_iterations=2, max_steps=4, logging_steps=2, eval_steps=2,
        eval_strategy="steps", save_strategy="steps", save_steps=2, save_total_limit=1,
    )  # fmt: skip
    run.train()

    def update(step: int, drawn: bool) -> list[tuple[str, int]]:
        own = [("on_step_begin", step), ("on_rollout_end", step)] if drawn else [("on_step_begin", step)]
        return [*own, ("on_pre_optimizer_step", step), ("on_optimizer_step", step), ("on_step_end", step + 1)]

    def asked(step: int) -> list[tuple[str, int]]:
        return [("on_log", step), ("on_log", step), ("on_evaluate", step), ("on_save", step)]

    assert seen.events == [
        ("on_init_end", 0), ("on_train_begin", 0), ("on_epoch_begin", 0),
        *update(0, True), *update(1, False), *asked(2),
        *update(2, True), *update(3, False), *asked(4),
        ("on_epoch_end", 4), ("on_log", 4), ("on_train_end", 4),
    ]  # fmt: skip
    drawn = seen.given["on_rollout_end"]
    assert [len(g.rollouts) for g in drawn["groups"]] == [4, 4]
    for group, own in zip(drawn["groups"], torch.tensor(drawn["advantages"]).view(2, 4), strict=True):
        r = torch.tensor([x.reward for x in group.rollouts])
        torch.testing.assert_close(own, (r - r.mean()) / (r.std() + 1e-4), rtol=1e-4, atol=1e-5)
    assert seen.given["on_step_end"]["model"] is run.model
    assert isinstance(seen.given["on_step_end"]["optimizer"], torch.optim.AdamW)
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_callback_ends_the_run_and_early_stopping_works(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == 2
            return control

    run = trainer(tmp_path / "one", twin(model), tokenizer, callbacks=[Stop()])
    assert run.train().global_step == 2
    run = trainer(
        tmp_path / "two", model, tokenizer, callbacks=[EarlyStoppingCallback(1, 1e9)], eval_strategy="steps",
        eval_steps=1, num_train_epochs=5, metric_for_best_model="reward",
    )  # fmt: skip
    assert run.train().global_step == 2  # the second evaluation is no gain of 1e9
    assert run.state.best_metric == max(r["eval_reward"] for r in run.state.log_history if "eval_reward" in r)


def test_training_raises_the_reward_and_again_from_there(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run = trainer(
        tmp_path, model, tokenizer, num_train_epochs=5, per_device_train_batch_size=16, gradient_accumulation_steps=1,
        learning_rate=2e-2, lr_scheduler_type="constant", steps_per_generation=2, num_iterations=2, max_steps=60,
    )  # fmt: skip
    before = run.evaluate()["eval_reward"]
    run.train()
    middle = weights(run.model)
    assert run.evaluate()["eval_reward"] > before + 0.2
    run.train()
    assert gap(middle, weights(run.model)) > 1e-3
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_sync_ref_model(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """With mixup 1 the reference is the policy after every update, so a rollout's first KL is 0; without, it is not."""
    kl = {}
    for sync in (True, False):
        run = trainer(
            tmp_path / str(sync), twin(first), tokenizer, beta=0.1, sync_ref_model=sync, ref_model_mixup_alpha=1.0,
            ref_model_sync_steps=1,
        )  # fmt: skip
        run.train()
        kl[sync] = [row["kl"] for row in run.state.log_history if "kl" in row]
    assert max(kl[True]) < 1e-5
    assert min(kl[False][1:]) > 1e-4


def test_reward_functions_receive_the_trainers_state(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    steps: list[int] = []

    def judge(completions: list[str], trainer_state: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return [float(len(c)) for c in completions]

    run = GRPOTrainer(
        model, [judge, judge, "correct_number"], options(tmp_path, reward_weights=[1, 0, 2], max_steps=2), TEXTS,
        processing_class=tokenizer,
    )  # fmt: skip
    run.train()
    assert steps == [0, 0, 1, 1]
    row = run.state.log_history[0]
    assert row["rewards/judge_2/mean"] == row["rewards/judge/mean"]
    assert row["reward"] == pytest.approx(row["rewards/judge/mean"] + 2 * row["rewards/correct_number/mean"])


def test_long_prompts_are_left_out(tmp_path: Path, model: nn.Module, tokenizer: Any, capsys: Any) -> None:
    data = [*TEXTS, {"prompt": "1+" * 40, "answer": "40"}]
    run = trainer(tmp_path, model, tokenizer, data=data, max_prompt_length=20)
    assert run.train().global_step == 4
    assert "1 of 10 prompts are over 20 tokens and left out" in capsys.readouterr().out


def test_log_completions(tmp_path: Path, model: nn.Module, tokenizer: Any, capsys: Any, monkeypatch: Any) -> None:
    """3 of the 8 answers of the second rollout and of the fourth, at the two logs."""
    monkeypatch.setenv("COLUMNS", "200")
    run = trainer(tmp_path, model, tokenizer, logging_steps=2, log_completions=True, num_completions_to_print=3)
    run.train()
    said = capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    for step in (2, 4):
        table = said.split(f" Step {step} ")[1].split("╰")[0]
        shown = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in table.split("\n") if "+" in line]
        assert len(shown) == 3
        answers = rows(folder / "rollouts.jsonl")
        known = {(r["prompt"], f"{r['reward']:.2f}", f"{r['advantage']:.2f}") for r in answers if r["step"] == step}
        assert {(row[0], row[2], row[3]) for row in shown} <= known
    assert " Step 1 " not in said
    assert " Step 3 " not in said


def refused(**changes: Any) -> tuple[dict[str, Any], str]:
    return {k: v for k, v in changes.items() if k != "told"}, changes["told"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        refused(reward_funcs=[], told="reward_funcs is empty"),
        refused(reward_funcs="some/reward-model", told="'some/reward-model'; reward models are not taken"),
        refused(train_dataset=None, told="train_dataset is missing"),
        refused(tools=[print], told="tools is not taken here: an answer is one turn"),
        refused(optimizers=(1, None), told="AdamW is set by the options"),
        refused(processing_class=None, told="give its tokenizer as processing_class"),
        refused(args={"output_dir": "x"}, told="args is a builtins.dict"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_taken_is_refused(
    changes: Any, told: str, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    given = {
        "reward_funcs": reward_even,
        "train_dataset": TEXTS,
        "args": options(tmp_path),
        "processing_class": tokenizer,
    }
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(copy.copy(model), **given | changes)
    assert told in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward_weights": [1, 2]}, "reward_weights has 2 numbers for 1 reward_funcs"),
        ({"delta": 0.5}, "Objective.delta is 0.5; it must be above 1"),
        ({"per_device_train_batch_size": 32}, "a generation batch takes 16 prompts"),
    ],
)
def test_options_that_cannot_run(changes: Any, told: str, tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, model, tokenizer, **changes)
    assert told in str(caught.value)


def test_an_evaluation_without_data(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run = GRPOTrainer(model, reward_even, options(tmp_path), TEXTS, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="there is no eval_dataset"):
        run.evaluate()
    found = run.evaluate({"one": TEXTS[:1], "two": TEXTS[1:3]})
    assert {"eval_one_reward", "eval_two_reward"} <= set(found)
