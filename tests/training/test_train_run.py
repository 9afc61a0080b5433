"""One run from configuration to folder: what it writes, and that the files agree with each other."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small import EVEN, LETTERS, config, rows, run, sums, twin, untimed, weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.config import Config
from groupline.models.load import load_model
from groupline.training.grpo import train

STEPS, PROMPTS, SIZE = 3, 4, 4
TRL_NAMES = {
    "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time", "reward", "reward_std",
    "frac_reward_zero_std", "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "completions/clipped_ratio", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    *(f"rewards/{r}/{m}" for r in ("correct_number", "think_format", "language_share") for m in ("mean", "std")),
}  # fmt: skip
OUR_NAMES = {
    "step", "accuracy", "tokens_per_second", "generated_tokens_per_second", "frac_groups_with_signal",
    "groups/all_right", "groups/all_wrong", "groups/mixed", "answers_skipped", "rewards_not_applicable",
    "time/generate", "time/reward", "time/reference", "time/train", "memory/process_peak_gib",
}  # fmt: skip


class Run:
    """A finished run on the built-in Thai task, from a model folder."""

    def __init__(self, folder: Path, start: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.config = Config(
            model=str(start), task="arithmetic_th", steps=STEPS, prompts_per_step=PROMPTS, num_generations=SIZE,
            max_completion_length=10, learning_rate=1e-3, beta=0.04, eval_problems=4, eval_samples=8, eval_every=2,
            stop=LETTERS, output_dir=str(folder),
        )  # fmt: skip
        self.results = train(self.config, self.said.append)
        self.metrics = rows(folder / "metrics.jsonl")
        self.rollouts = rows(folder / "rollouts.jsonl")
        self.held_out = rows(folder / "held_out.jsonl")


@pytest.fixture(scope="module")
def finished(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run") / "run", start)


def test_the_folder(finished: Run) -> None:
    names = {p.name for p in finished.folder.iterdir()}
    rows = {"metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl"}
    assert names == rows | {"config.yaml", "plan.txt", "results.json", "model"}
    saved = yaml.safe_load((finished.folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved.keys() == Config.model_fields.keys()  # resolved: every setting is there
    assert Config.load(finished.folder / "config.yaml") == finished.config


def test_results_schema(finished: Run) -> None:
    results = json.loads((finished.folder / "results.json").read_text(encoding="utf-8"))
    assert results == json.loads(json.dumps(finished.results))
    assert [s["step"] for s in results["steps"]] == [1, 2, 3]
    for step, metrics in zip(results["steps"], finished.metrics, strict=True):
        assert step == {
            "step": metrics["step"],
            "reward": metrics["reward"],
            "frac_groups_with_signal": metrics["frac_groups_with_signal"],
            "completion_length": metrics["completions/mean_length"],
            "accuracy": metrics["accuracy"],
        }
    every = sum(w.numel() for w in load_file(finished.folder / "model" / "model.safetensors").values())
    assert results["models"] == {name: {"parameters": every, "bytes": 4 * every} for name in ("policy", "reference")}
    held = results["held_out"]
    assert (held["problems"], held["samples_per_problem"], results["interrupted"]) == (4, 8, False)
    for when in ("before", "after"):
        for k in (1, 8):
            found = held[when][f"pass@{k}"]
            for interval in ("wilson", "bootstrap"):
                low, high = found[interval]
                assert 0 <= low <= found["value"] <= high <= 1
    assert [h["step"] for h in held["history"]] == [0, 2, 3]


def test_metric_names(finished: Run) -> None:
    for metrics in finished.metrics:
        assert metrics.keys() >= TRL_NAMES | OUR_NAMES
        assert None not in metrics.values()  # nothing was NaN


def test_shares_add_up(finished: Run) -> None:
    for m in finished.metrics:
        assert m["frac_groups_with_signal"] + m["frac_reward_zero_std"] == 1
        assert m["groups/all_right"] + m["groups/all_wrong"] + m["groups/mixed"] == pytest.approx(1)
        assert sum(v for k, v in m.items() if k.startswith("time/")) <= m["step_time"]


def test_rollouts_agree_with_metrics(finished: Run) -> None:
    """Every figure of a step from its answers' rows, computed again with `statistics`."""
    weight = {"correct_number": 1.0, "think_format": 0.3, "language_share": 0.2}
    tokens = 0
    for m in finished.metrics:
        mine = [r for r in finished.rollouts if r["step"] == m["step"]]
        rewards = [r["reward"] for r in mine]
        lengths = [len(r["ids"]) for r in mine]
        ended = [len(r["ids"]) for r in mine if r["finish_reason"] == "stop"]
        groups = [[r["reward"] for r in mine if r["group"] == g] for g in range(PROMPTS)]
        assert len(mine) == PROMPTS * SIZE
        for r in mine:
            assert r["reward"] == pytest.approx(sum(weight[k] * v for k, v in r["rewards"].items()))
            assert r["policy_version"] == m["step"] - 1  # drawn by the weights of the step before
            assert len(r["ids"]) == len(r["logprobs"])
        assert m["reward"] == pytest.approx(statistics.fmean(rewards))
        assert m["reward_std"] == pytest.approx(statistics.stdev(rewards))
        assert m["frac_groups_with_signal"] == sum(len(set(g)) > 1 for g in groups) / PROMPTS
        assert m["accuracy"] == statistics.fmean(r["rewards"]["correct_number"] >= 1 for r in mine)
        assert m["rewards/language_share/mean"] == pytest.approx(
            statistics.fmean(r["rewards"]["language_share"] for r in mine)
        )
        assert m["completions/mean_length"] == pytest.approx(statistics.fmean(lengths))
        assert m["completions/max_length"] == max(lengths)
        assert m["completions/mean_terminated_length"] == pytest.approx(statistics.fmean(ended))
        assert m["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / len(mine))
        assert m["num_completion_tokens"] == sum(lengths)
        tokens += sum(lengths) + int(m["num_prompt_tokens"])
        assert m["num_tokens"] == tokens
        assert m["epoch"] == pytest.approx(m["step"] * PROMPTS / (STEPS * PROMPTS))
        for g in range(PROMPTS):
            own = [r for r in mine if r["group"] == g]
            mean, std = statistics.fmean(groups[g]), statistics.stdev(groups[g])
            for r in own:
                expected = (r["reward"] - mean) / (std + 1e-4) if len(set(groups[g])) > 1 else 0.0
                assert r["advantage"] == pytest.approx(expected, abs=1e-9)


def test_members_of_a_group_share_one_problem(finished: Run) -> None:
    """Case D1, and groups of a step have different problems."""
    for step in range(1, STEPS + 1):
        mine = [r for r in finished.rollouts if r["step"] == step]
        by_group = [
            {(r["problem"], r["gold"], json.dumps(r["prompt"])) for r in mine if r["group"] == g}
            for g in range(PROMPTS)
        ]
        assert all(len(problems) == 1 for problems in by_group)
        assert len(set.union(*by_group)) == PROMPTS
        assert [r["answer_number"] for r in mine] == [*range(SIZE)] * PROMPTS


def test_held_out_rows_give_pass_at_1(finished: Run) -> None:
    for step, when in ((0, "before"), (STEPS, "after")):
        mine = [r for r in finished.held_out if r["step"] == step]
        assert len(mine) == 4 * 8
        found = finished.results["held_out"][when]
        assert found["pass@1"]["value"] == pytest.approx(
            statistics.fmean(r["rewards"]["correct_number"] >= 1 for r in mine)
        )
        assert found["reward"] == pytest.approx(statistics.fmean(r["reward"] for r in mine))
    trained_on = {r["problem"] for r in finished.rollouts}
    assert trained_on.isdisjoint(r["problem"] for r in finished.held_out)


def test_the_plan_and_a_line_a_step(finished: Run) -> None:
    plan, *lines = finished.said
    for part in ("4 prompts x 4 answers = 16 answers", "micro-batches", "3 steps x 1 = 3", "at most 480 new tokens",
                 "cpu, float32", "emulated", "frozen copy", "beta 0.04", "1 x correct_number"):  # fmt: skip
        assert part in plan
    assert [line.split()[:2] for line in lines] == [["step", "1/3"], ["step", "2/3"], ["step", "3/3"]]
    for line in lines:  # case N8: the loss is no measure of progress, so it is not on the first screen
        assert "reward" in line
        assert "groups with signal" in line
        assert "loss" not in line


def test_first_step_has_loss_near_zero_and_a_gradient(finished: Run) -> None:
    """Case N8: centred advantages at ratio 1 add up to nothing, and still move the weights."""
    one = finished.metrics[0]
    assert abs(one["loss"]) < 1e-6
    assert one["grad_norm"] > 1e-2
    assert one["ratio/min"] == one["ratio/max"] == 1


def test_the_saved_model_is_the_trained_policy(
    tmp_path: Path, first: nn.Module, model: nn.Module, tokenizer: Any
) -> None:
    run(config(tmp_path / "run"), model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ids = torch.tensor([[5, 80, 300, 17, 9, 261]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert not torch.allclose(loaded(ids).logits, first(ids).logits, atol=1e-3)
    again = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert again("12+3=")["input_ids"] == tokenizer("12+3=")["input_ids"]
    assert again.chat_template == tokenizer.chat_template


def test_a_lora_run_saves_its_adapter_and_leaves_the_base(tmp_path: Path, start: Path) -> None:
    before = {p.name: p.read_bytes() for p in start.iterdir()}
    settings = config(tmp_path / "run", model=str(start), lora_r=4, learning_rate=1e-2)
    train(settings, lambda line: None, problems=sums(12), held_out=[], rewards=[EVEN])
    assert {p.name: p.read_bytes() for p in start.iterdir()} == before
    ids = torch.tensor([[5, 80, 300, 17, 9, 261]])
    adapted = load_model(str(tmp_path / "run" / "model")).eval()
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(start)(ids).logits
        assert not torch.allclose(adapted(ids).logits, plain, atol=1e-3)
        with adapted.disable_adapter():
            assert torch.equal(adapted(ids).logits, plain)
    by_hand = AutoModelForCausalLM.from_pretrained(start).state_dict()  # W + alpha / r * B A, alpha being 2 r
    state = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    for name, a in state.items():
        if "lora_A" in name:
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            by_hand[target] += 2 * state[name.replace("lora_A", "lora_B")] @ a
    whole = AutoModelForCausalLM.from_pretrained(start)
    whole.load_state_dict(by_hand)
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, whole(ids).logits, atol=1e-5)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    def one(name: str, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, torch.Tensor]]:
        policy = twin(first)
        run(config(tmp_path / name, seed=seed, num_iterations=2), policy, tokenizer)
        return untimed(tmp_path / name / "metrics.jsonl"), rows(tmp_path / name / "rollouts.jsonl"), weights(policy)

    a, b, c = one("a", 0), one("b", 0), one("c", 1)
    assert a[:2] == b[:2]
    assert all(torch.equal(a[2][k], b[2][k]) for k in a[2])
    assert a[0] != c[0]
    assert [r["ids"] for r in a[1]] != [r["ids"] for r in c[1]]


def test_evaluation_does_not_touch_training(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case E1: bit-equal weights, whether measured at every step or never."""
    ends = []
    for name, changes, held in (("never", {}, []), ("always", {"eval_every": 1, "eval_samples": 3}, sums(20)[12:])):
        policy = twin(first)
        run(config(tmp_path / name, steps=3, **changes), policy, tokenizer, held_out=held)
        ends.append((weights(policy), [r["ids"] for r in rows(tmp_path / name / "rollouts.jsonl")]))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][k], ends[1][0][k]) for k in ends[0][0])
    assert len({r["step"] for r in rows(tmp_path / "always" / "held_out.jsonl")}) == 4


def test_rollouts_can_be_left_out(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    run(config(tmp_path / "run", log_rollouts=False), model, tokenizer)
    assert rows(tmp_path / "run" / "rollouts.jsonl") == []
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 2
