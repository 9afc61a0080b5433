"""PPO runs: the numbers of a step against one answer at a time, what is written, reward models, going on, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small import EVEN, LETTERS, plain_logprobs, rows, same, sums, twin, untimed, weights
from torch import Tensor, nn

from groupline.batch import Batch
from groupline.config import Config, ConfigError
from groupline.models.new import new_tokenizer
from groupline.models.reward_head import add_reward_head, own_score
from groupline.models.value import answer_values, load_value_model
from groupline.objective import OBJECTIVES, PPO
from groupline.records import Group
from groupline.rewards import Reward
from groupline.training.collect import collect
from groupline.training.grpo import run as loop_of_grpo
from groupline.training.optim import NonFinite
from groupline.training.ppo import Ppo, PpoConfig, ppo, ppo_objective, scores_of
from groupline.training.setup import Setup, prepare


def settings(folder: Path, **changes: Any) -> PpoConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder), "steps": 2, "prompts_per_step": 3, "num_generations": 4, "max_completion_length": 10,
        "learning_rate": 1e-3, "eval_problems": 0, "stop": LETTERS, "num_iterations": 2, "save_steps": 0,
    }  # fmt: skip
    return PpoConfig(**values | changes)


def run(config: PpoConfig, model: nn.Module, tokenizer: Any, **given: Any) -> dict[str, Any]:
    given = {"problems": sums(12), "held_out": [], "rewards": [EVEN], **given}
    return ppo(config, given.pop("say", lambda line: None), model=model, tokenizer=tokenizer, **given)


def begin(config: PpoConfig, model: nn.Module, tokenizer: Any) -> tuple[Setup, Ppo, list[Group]]:
    """A run's parts, policy and value model away from their start, and the groups of its first step."""
    setup = prepare(
        config, lambda line: None, model=model, tokenizer=tokenizer, rewards=[EVEN], problems=sums(12), held_out=[],
        objective=ppo_objective(config),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    method = Ppo.of(config, setup)
    with torch.no_grad():
        for p in [*setup.policy.parameters(), *method.critic.model.parameters()]:
            p += 0.02 * torch.randn(p.shape, generator=draw)
        method.critic.model.head.weight += 0.3 * torch.randn(method.critic.model.head.weight.shape, generator=draw)
    setup.engine.load_weights(setup.policy, version=1)
    groups, _ = collect(
        setup.stream.take(0, 3), setup.engine, tokenizer, setup.rewards, config.num_generations, setup.sampling, seed=0,
        label="step 0",
    )  # fmt: skip
    return setup, method, groups


def values_alone(method: Ppo, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
    model = method.critic.model
    with torch.no_grad():
        hidden = model.body(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).last_hidden_state[0, len(prompt) - 1 :]
        return hidden @ model.head.weight[0] + model.head.bias


def test_a_step_by_hand(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Per-token rewards, values, advantages and returns of one answer at a time, the loops written out."""
    config = settings(tmp_path / "run", beta=0.1, gamma=0.9, gae_lambda=0.8, missing_eos_penalty=0.5,
                      micro_batch_tokens=40, updates_per_pass=2)  # fmt: skip
    setup, method, groups = begin(config, twin(first), tokenizer)
    answers = [r for g in groups for r in g.rollouts]
    assert {r.completion.finish_reason for r in answers} == {"stop", "length"}
    advantages, returns, kls, scores = [], [], [], []
    for r in answers:
        c = r.completion
        with torch.no_grad():
            now, start = (plain_logprobs(m, c.prompt_ids, c.ids) for m in (setup.policy, first))
        kl = (now - start).double().numpy()
        reward = -0.1 * kl
        scores.append((r.reward or 0.0) - 0.5 * (c.finish_reason == "length"))
        reward[-1] += scores[-1]
        v = np.append(values_alone(method, c.prompt_ids, c.ids).double().numpy(), 0.0)
        own, later = np.zeros(len(reward)), 0.0
        for t in reversed(range(len(reward))):
            later = reward[t] + 0.9 * v[t + 1] - v[t] + 0.9 * 0.8 * later
            own[t] = later
        advantages.append(own)
        returns.append(own + v[:-1])
        kls.append(kl)
    flat = np.concatenate(advantages)
    white = [(a - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for a in advantages]

    batch, facts = method.batch(setup, groups, 0)
    assert len(batch.micro_batches) > 2
    seen = 0
    for micro in batch.micro_batches:
        assert micro.returns is not None
        for k, i in enumerate(micro.answers):
            mine = micro.row.sequence == k
            assert micro.advantages[mine].tolist() == pytest.approx(white[i].tolist(), abs=2e-4)
            assert micro.returns[mine].tolist() == pytest.approx(returns[i].tolist(), abs=2e-5)
            assert micro.weights[mine].tolist() == pytest.approx([2 / len(flat)] * len(white[i]))
            seen += 1
    assert seen == len(answers)
    assert batch.advantages.tolist() == pytest.approx([float(w.mean()) for w in white], abs=2e-4)
    assert facts["objective/scores"] == pytest.approx(np.mean(scores))
    assert facts["kl"] == pytest.approx(np.concatenate(kls).mean(), abs=1e-5)
    assert facts["objective/kl"] == pytest.approx(np.mean([k.sum() for k in kls]), abs=1e-5)
    assert facts["objective/rlhf_reward"] == pytest.approx(
        np.mean(scores) - 0.1 * np.mean([k.sum() for k in kls]), abs=1e-5
    )
    every = np.concatenate(returns)
    assert facts["value/explained_variance"] == pytest.approx(1 - (flat.var() / every.var()), abs=1e-4)


def gradients(setup: Setup, method: Ppo, batch: Batch) -> dict[str, Tensor]:
    """Of policy and value model in one update, caught where the optimisers would take them."""
    found: dict[str, Tensor] = {}
    for name, model, optimiser in (
        ("policy", setup.policy, setup.optimiser), ("value", method.critic.model, method.critic.optimiser)
    ):  # fmt: skip

        def caught(name: str = name, model: nn.Module = model) -> dict[str, float]:
            found.update({f"{name}.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
            return {"grad_norm": 0.0, "learning_rate": 0.0, "skipped_steps": 0.0}

        optimiser.step = caught  # type: ignore[method-assign]
    method.update(setup, batch)
    return found


def test_micro_batches_change_no_gradient(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Policy's and value model's, on a rollout whose ratios and value clips are at work."""
    found = []
    for tokens in (10**6, 60, 1):
        config = settings(tmp_path / "run", micro_batch_tokens=tokens, value_clip=0.05)
        setup, method, groups = begin(config, twin(first), tokenizer)
        batch, _ = method.batch(setup, groups, 0)
        draw = torch.Generator().manual_seed(9)
        for micro in batch.micro_batches:
            micro.old_logp = micro.sampler_logp
        with torch.no_grad():
            for p in [*setup.policy.parameters(), *method.critic.model.parameters()]:
                p += 0.02 * torch.randn(p.shape, generator=draw)
        found.append((len(batch.micro_batches), gradients(setup, method, batch)))
    assert [n for n, _ in found] == sorted({n for n, _ in found})
    assert found[2][0] == 12  # an answer each
    largest = {
        part: max(float(g.abs().max()) for n, g in found[0][1].items() if n.startswith(part))
        for part in ("policy", "value")
    }
    for _, other in found[1:]:
        assert other.keys() == found[0][1].keys()
        for name, g in other.items():
            part = name.partition(".")[0]
            assert float((g - found[0][1][name]).abs().max()) < 1e-5 * largest[part], name


def test_the_value_gradient_by_hand(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """The head's bias takes the sum of the tokens' errors, each 1 / all tokens: no clip binds on the first pass."""
    setup, method, groups = begin(settings(tmp_path / "run", value_coef=3.0), twin(first), tokenizer)
    batch, _ = method.batch(setup, groups, 0)
    errors = [(m.old_values - m.returns) for m in batch.micro_batches if m.old_values is not None]
    expected = 3.0 * float(torch.cat(errors).mean())
    assert float(gradients(setup, method, batch)["value.head.bias"]) == pytest.approx(expected, rel=1e-4)


def test_an_answer_that_no_reward_applies_to_is_not_trained_on(
    tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    setup, method, groups = begin(settings(tmp_path / "run"), twin(first), tokenizer)
    whole, _ = method.batch(setup, groups, 0)
    one = groups[0].rollouts
    changed = [Group(groups[0].problem, (replace(one[0], reward=None), *one[1:])), *groups[1:]]
    batch, facts = method.batch(setup, changed, 0)
    assert math.isnan(float(scores_of(changed)[0]))
    (micro,) = batch.micro_batches
    place = torch.tensor(micro.answers)[micro.row.sequence]
    assert not micro.weights[place == 0].any()
    assert torch.equal(micro.weights[place != 0], whole.micro_batches[0].weights[place != 0])
    assert not micro.advantages[place == 0].any()
    assert float(micro.advantages[place != 0].mean()) == pytest.approx(0, abs=1e-6)
    assert facts["objective/scores"] == pytest.approx(float(scores_of(changed)[1:].mean()))


@pytest.mark.parametrize("lora", [0, 2])
def test_a_run(lora: int, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    folder, policy, said = tmp_path / "run", twin(first), []
    config = settings(
        folder,
        num_generations=1,
        updates_per_pass=3,
        eval_problems=3,
        eval_samples=2,
        lora_r=lora,
        value_learning_rate=1e-2,
    )
    results = run(config, policy, tokenizer, held_out=sums(3), say=said.append)
    assert results["objective"] == "ppo"
    assert [s["step"] for s in results["steps"]] == [1, 2]
    assert results["held_out"]["before"]["pass@2"]
    assert results["held_out"]["after"]["pass@2"]
    assert results == json.loads((folder / "results.json").read_text(encoding="utf-8"))
    saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved.keys() == PpoConfig.model_fields.keys()
    for m in rows(folder / "metrics.jsonl"):
        assert m.keys() >= {
            "reward", "kl", "objective/kl", "objective/scores", "objective/rlhf_reward", "value/loss", "value/mean",
            "value/return_mean", "value/clip_ratio", "value/grad_norm", "value/explained_variance", "entropy",
            "clip_ratio/low_mean", "clip_ratio/high_mean", "completions/mean_length", "ratio/mean",
        }  # fmt: skip
        assert None not in m.values()
        assert m["value/learning_rate"] == 1e-2
    assert not same(weights(policy), weights(first))
    assert any("value explains" in line for line in said)
    plan = (folder / "plan.txt").read_text(encoding="utf-8")
    assert "trained at 0.01, from the policy's start, head 0; clip 0.2, gamma 1, lambda 0.95" in plan
    models = results["models"]
    assert models.keys() == {"policy", "value", "reference"}
    assert (models["reference"]["bytes"] == 0) == (lora > 0)
    assert models["value"]["bytes"] == 4 * models["value"]["parameters"] > 0


def test_the_value_model_learns_what_answers_earn(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """A policy that stands nearly still, a reward that never varies: the value model comes to tell it."""
    fixed = Reward("fixed", lambda completion_ids, **_: [0.7] * len(completion_ids))
    config = settings(
        tmp_path / "run",
        steps=12,
        learning_rate=1e-9,
        value_learning_rate=1e-2,
        num_iterations=4,
        beta=0.0,
        value_clip=None,
    )
    run(config, twin(first), tokenizer, rewards=[fixed])
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["value/mean"] == 0
    assert metrics[0]["value/return_mean"] == pytest.approx(0.7 * 0.95, abs=0.25)  # lambda discounts what comes later
    assert metrics[-1]["value/mean"] == pytest.approx(0.7, abs=0.05)
    assert "kl" not in metrics[-1]


def test_a_reward_model_takes_the_place_of_the_rewards(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Its scores are transformers' own of each answer alone; the code's rewards are still measured."""
    reward = add_reward_head(first, tokenizer, seed=1)
    reward.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    config = settings(tmp_path / "run", reward_model=str(tmp_path / "rm"), value_model=str(tmp_path / "rm"))
    results = run(config, twin(first), tokenizer)
    prompts = {p.id: tokenizer(str(p.prompt)).input_ids for p in sums(12)}
    written = rows(tmp_path / "run" / "rollouts.jsonl")
    assert len(written) == 24
    with torch.no_grad():
        for r in written:
            expected = float(own_score(reward, [*prompts[r["problem"]], *r["ids"]]))
            assert r["reward"] == r["rewards"]["reward_model"] == pytest.approx(expected, abs=1e-5)
            assert r["rewards"]["even_share"] == sum(i % 2 == 0 for i in r["ids"]) / len(r["ids"])
    for m in rows(tmp_path / "run" / "metrics.jsonl"):
        assert m["objective/scores"] == pytest.approx(m["reward"]) == pytest.approx(m["rewards/reward_model/mean"])
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "proximal policy optimisation (PPO) with a value model" in card
    assert f"the score of the reward model `{tmp_path / 'rm'}`" in card
    models = results["models"]
    assert models.keys() == {"policy", "value", "reward", "reference"}
    assert models["reward"]["parameters"] == sum(p.numel() for p in reward.parameters())
    assert all(m["bytes"] == 4 * m["parameters"] > 0 for m in models.values())


@pytest.mark.parametrize("lora", [0, 2])
def test_the_value_model_is_saved_and_is_a_start(lora: int, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """What the folder holds is what was trained, and a run that starts from it begins with its values."""
    config = settings(tmp_path / "run", lora_r=lora, value_learning_rate=1e-2)
    policy = twin(first)
    setup = prepare(
        config, lambda line: None, model=policy, tokenizer=tokenizer, rewards=[EVEN], problems=sums(12), held_out=[],
        objective=ppo_objective(config),
    )  # fmt: skip
    method = Ppo.of(config, setup)
    loop_of_grpo(config, setup, lambda line: None, method=method)
    asked = [(tokenizer(p.prompt).input_ids, [5, 6, 7, 8]) for p in sums(4)]
    trained = answer_values(method.critic.model, asked)
    assert max(abs(v) for values in trained for v in values) > 1e-2
    saved = answer_values(load_value_model(tmp_path / "run" / "value_model"), asked)
    if not lora:
        assert saved == trained
    assert [v for values in saved for v in values] == pytest.approx([v for values in trained for v in values], abs=1e-5)

    again = settings(tmp_path / "again", lora_r=lora, value_model=str(tmp_path / "run" / "value_model"), steps=1)
    setup = prepare(
        again, lambda line: None, model=twin(first), tokenizer=tokenizer, rewards=[EVEN], problems=sums(12), held_out=[],
        objective=ppo_objective(again),
    )  # fmt: skip
    start = Ppo.of(again, setup)
    assert answer_values(start.critic.model, asked) == saved
    loop_of_grpo(again, setup, lambda line: None, method=start)
    (step,) = rows(tmp_path / "again" / "metrics.jsonl")
    assert step["value/mean"] != 0  # a new head would be 0


def test_ctrl_c_saves_the_value_model_too(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Both models as the last whole step left them, before results.json says that the run's folder is whole."""
    calls = iter(range(100))

    def stop(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return [float(ids[0] % 2) for ids in completion_ids]

    results = run(settings(tmp_path / "run"), twin(first), tokenizer, rewards=[Reward("stop", stop)])
    assert results["interrupted"]
    values = answer_values(load_value_model(tmp_path / "run" / "value_model"), [([5, 6], [7, 8])])
    assert any(values[0])  # a step was made: the head is no longer 0
    written = [
        (tmp_path / "run" / name).stat().st_mtime_ns for name in ("value_model/value_head.safetensors", "results.json")
    ]
    assert written == sorted(written)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("lora", [0, 2])
def test_a_resumed_run_is_the_run_that_never_stopped(
    lora: int, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    changes = {"steps": 4, "save_steps": 2, "lora_r": lora}

    def stop(line: str) -> None:
        if line.startswith("step 3/"):
            raise Stopped

    whole = twin(first)
    run(settings(tmp_path / "whole", **changes), whole, tokenizer)
    config = settings(tmp_path / "half", **changes)
    with pytest.raises(Stopped):
        run(config, twin(first), tokenizer, say=stop)
    torch.manual_seed(99)
    resumed = twin(first)
    run(config.model_copy(update={"resume": True}), resumed, tokenizer)
    assert same(weights(whole), weights(resumed))
    assert untimed(tmp_path / "whole" / "metrics.jsonl") == untimed(tmp_path / "half" / "metrics.jsonl")


def test_a_value_loss_that_is_not_a_number_is_named(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    setup, method, groups = begin(settings(tmp_path / "run"), twin(first), tokenizer)
    batch, _ = method.batch(setup, groups, 0)
    before = weights(method.critic.model)
    assert batch.micro_batches[0].returns is not None
    batch.micro_batches[0].returns[0] = math.inf
    with pytest.raises(NonFinite, match="the value model's loss is not finite in answers"):
        method.critic.step(batch)
    assert same(before, weights(method.critic.model))


def test_settings_that_cannot_be(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    assert PpoConfig(num_generations=1).num_generations == 1
    for values, message in (
        ({"num_generations": 0}, "num_generations"),
        ({"scale_rewards": "group", "ddof": 0}, "scale_rewards and ddof concern a group's advantages"),
        ({"objective": "grpo"}, "objective"),
        ({"gae_lambda": 1.5}, "gae_lambda"),
        ({"value_clip": 0}, "value_clip"),
    ):
        with pytest.raises(ConfigError, match=message):
            PpoConfig(**values)
    with pytest.raises(ConfigError, match="a group of one has nothing to be compared with"):
        Config(num_generations=1)
    with pytest.raises(ConfigError, match="PPO needs a value model beside the policy: `groupline ppo`"):
        prepare(Config(objective="ppo"), lambda line: None)
    assert "ppo" not in OBJECTIVES
    changed = ppo_objective(PpoConfig(epsilon=0.1, beta=0.2))
    assert changed == PPO.replace(clip_low=0.1, clip_high=0.1, beta=0.2)
    with pytest.raises(ConfigError, match="use no filter, or beta: 0"):
        run(settings(tmp_path / "run", top_k=3), twin(first), tokenizer)
    assert not (tmp_path / "run").exists()


def test_a_reward_model_of_another_tokenizer_is_refused(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    add_reward_head(first, tokenizer).save_pretrained(tmp_path)
    new_tokenizer(["another text " * 9], 300).save_pretrained(tmp_path)
    for setting in ("reward_model", "value_model"):
        with pytest.raises(ConfigError, match=f"{setting}: the tokenizer in .* is not the policy's"):
            run(settings(tmp_path / "run", **{setting: str(tmp_path)}), twin(first), tokenizer)


def test_a_language_model_is_no_reward_model(tmp_path: Path, first: nn.Module, tokenizer: Any, start: Path) -> None:
    with pytest.raises(ValueError, match="reward model"):
        run(settings(tmp_path / "run", reward_model=str(start)), twin(first), tokenizer)
