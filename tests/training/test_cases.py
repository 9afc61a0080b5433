"""Cases of docs/cases.md that only a whole run can show."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from small import EVEN, config, even_share, rows, run, same, sums, twin, weights
from test_resume import Stopped, halves, stop_after, untimed
from tiny import chain_model
from torch import nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from groupline.records import Problem
from groupline.rewards import Reward, RewardError
from groupline.training.step import Scorer


def test_m5_a_model_that_ends_at_once(tmp_path: Path, tokenizer: Any) -> None:
    """The answer is "" with one trained token; reward functions are called with it, and nothing is NaN."""
    policy = chain_model(dict.fromkeys(range(320), tokenizer.eos_token_id), 320)
    with torch.no_grad():  # so sure of the end that nothing else is drawn
        policy.lm_head.weight.mul_(10)
    seen: list[str] = []

    def judge(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(i % 4) for i in range(len(completions))]

    run(config(tmp_path / "run", steps=1), policy, tokenizer, rewards=[Reward("judge", judge)])
    assert seen == [""] * 12
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert None not in metrics.values()
    assert metrics["num_trained_tokens"] == 12
    assert (metrics["completions/mean_length"], metrics["completions/clipped_ratio"]) == (1, 0)
    found = rows(tmp_path / "run" / "rollouts.jsonl")
    assert all(r["ids"] == [tokenizer.eos_token_id] and r["finish_reason"] == "stop" for r in found)


def test_m12_a_differing_generation_config_is_said_and_not_followed(
    tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    said: dict[str, list[str]] = {"plain": [], "own": []}
    for name, lines in said.items():
        policy = twin(first)
        if name == "own":
            own: Any = policy.generation_config
            own.top_p, own.temperature, own.top_k, own.repetition_penalty = 0.8, 0.6, 1, 1.05
        run(config(tmp_path / name, steps=1), policy, tokenizer, say=lines.append)
    assert "generation config says" not in said["plain"][0]
    for part in (
        "temperature 0.6 (here 1)",
        "top_p 0.8 (here 1)",
        "top_k 1 (here 0)",
        "repetition_penalty 1.05 (here 1)",
    ):
        assert part in said["own"][0]
    ids = [[r["ids"] for r in rows(tmp_path / name / "rollouts.jsonl")] for name in said]
    assert ids[0] == ids[1]
    saved = GenerationConfig.from_pretrained(tmp_path / "own" / "model")  # which transformers would not save as it was
    assert (saved.temperature, saved.repetition_penalty, saved.do_sample) == (0.6, 1.05, True)


def test_c13_a_model_with_dropout_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    """GPT-2 with dropout 0.1, handed over in training mode: ratio 1 and no KL at the first update, then no longer."""
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=320, eos_token_id=tokenizer.eos_token_id, **shape, **drops)).train()
    run(config(tmp_path / "run", beta=0.1), policy, tokenizer)
    one, two = rows(tmp_path / "run" / "metrics.jsonl")
    assert one["ratio/min"] == one["ratio/max"] == 1
    assert abs(one["kl"]) < 1e-8
    assert one["sampling/sampling_logp_difference/max"] < 1e-4
    assert two["kl"] > 1e-8


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 14])
def test_e2_c54_stopped_anywhere_in_three_epochs(stop: int, straight: Any, first: nn.Module, tokenizer: Any) -> None:
    """10 prompts, 2 a step, 3 epochs: after 5 steps exactly at an epoch's end. The same prompts, answers and weights."""
    folder, policy = straight
    given = {"problems": sums(10)}
    resumed = halves(folder / f"stop-{stop}", first, tokenizer, stop, SHORT, **given)
    assert same(weights(resumed), weights(policy))
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert untimed(folder / f"stop-{stop}" / name) == untimed(folder / "straight" / name)


SHORT: dict[str, Any] = {
    "steps": 15, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "save_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, first: nn.Module, tokenizer: Any) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("epochs")
    policy = twin(first)
    run(config(folder / "straight", **SHORT), policy, tokenizer, problems=sums(10))
    found = rows(folder / "straight" / "rollouts.jsonl")
    for start in (1, 6, 11):  # every prompt once an epoch
        epoch = {r["problem"] for r in found if start <= r["step"] < start + 5}
        assert epoch == {p.id for p in sums(10)}
    return folder, policy


@pytest.mark.parametrize(("beta", "iterations"), [(0.0, 1), (0.0, 2), (0.1, 1), (0.1, 2)])
def test_c64_no_forward_that_cannot_matter(
    beta: float, iterations: int, tmp_path: Path, model: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over a micro-batch each; the reference once a rollout with beta and never without; old ones once, if needed."""
    scored: list[int] = []
    trained: list[int] = []
    score, loss = Scorer.__call__, Scorer.loss

    def count_score(self: Scorer, policy: nn.Module, row: Any) -> Any:
        scored.append(1)
        return score(self, policy, row)

    def count_loss(self: Scorer, policy: nn.Module, row: Any, *rest: Any) -> Any:
        trained.append(1)
        return loss(self, policy, row, *rest)

    monkeypatch.setattr(Scorer, "__call__", count_score)
    monkeypatch.setattr(Scorer, "loss", count_loss)
    settings = config(tmp_path / "run", steps=1, beta=beta, num_iterations=iterations, micro_batch_tokens=60)
    run(settings, model, tokenizer)
    (metrics,) = rows(tmp_path / "run" / "metrics.jsonl")
    micros = int(metrics["micro_batches"])
    assert micros > 1
    assert len(scored) + len(trained) == micros * (iterations + (beta > 0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{"completions": 1}, {}], "columns may not be called completions"),
        ([{"self": 1, "prefill": 2}, {}], "columns may not be called self, prefill"),
        ([{"level": 1}, {}], r"column 'level' is missing in row 1 \(problem 'b'\), which has no columns"),
    ],
)
def test_d4_d5_columns_are_checked_before_the_run(
    columns: list[dict[str, Any]], message: str, tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    """Whichever step would have met that row."""
    problems = [Problem(name, "1+1=", "2", own) for name, own in zip("ab", columns, strict=True)]
    for given in ({"problems": problems}, {"held_out": problems}):
        with pytest.raises(RewardError, match=message):
            run(config(tmp_path / "run", prompts_per_step=1), model, tokenizer, **given)
    assert not (tmp_path / "run").exists()


def test_r4_a_judge_that_hangs(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """Counted at its deadline and not applicable; what the other function says is kept, and the run goes on."""

    async def hangs(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(1e6)
        return [1.0] * len(completions)

    slow = Reward("hangs", hangs, timeout=0.05, on_timeout="none")
    run(config(tmp_path / "run"), model, tokenizer, rewards=[EVEN, slow])
    for r in rows(tmp_path / "run" / "rollouts.jsonl"):
        assert r["rewards"] == {"even_share": even_share([r["ids"]])[0], "hangs": None}
        assert r["reward"] == r["rewards"]["even_share"]
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 2
    stuck = Reward("hangs", hangs, timeout=0.05)
    with pytest.raises(RewardError, match=r"'hangs' took longer than 0\.05 s on rows 0 to 11"):
        run(config(tmp_path / "again"), model, tokenizer, rewards=[EVEN, stuck])


def test_s1_the_step_counter_goes_on(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """In the files, in the lines, and in the state that reward functions receive."""
    seen: list[int] = []

    def judge(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        seen.append(trainer_state.global_step)
        return even_share(completion_ids)

    settings = config(tmp_path / "run", steps=4, save_steps=1)
    rewards = [Reward("judge", judge)]
    with pytest.raises(Stopped):
        run(settings, twin(first), tokenizer, say=stop_after(3), rewards=rewards)
    del seen[2:]
    run(settings.model_copy(update={"resume": True}), twin(first), tokenizer, rewards=rewards)
    assert seen == [seen[0] + i for i in range(4)]
    assert [m["step"] for m in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
