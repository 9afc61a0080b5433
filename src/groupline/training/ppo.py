"""PPO: the loop of GRPO with a value model in place of the group's mean, and a reward model where one is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from groupline.batch import Batch
from groupline.config import Config
from groupline.models.checkpointing import checkpoint_layers
from groupline.models.load import load_tokenizer, resolve_model
from groupline.models.memory import Weights, weights_of
from groupline.models.packing import Ids
from groupline.models.reward_head import load_reward_model, score_answers, why_scores_not_shared
from groupline.models.value import load_value_model, save_value_model, value_of_policy
from groupline.objective import PPO, Objective
from groupline.parallel.mesh import SOLO, refuse_ranks
from groupline.records import Group, Rollout
from groupline.settings import ConfigError, NonNegative, Positive
from groupline.training.checkpoint import Checkpoint
from groupline.training.critic import Critic, estimate
from groupline.training.grpo import run
from groupline.training.method import Method, build, set_old
from groupline.training.optim import Optimiser
from groupline.training.resume import find_checkpoint
from groupline.training.run import check_unused
from groupline.training.setup import Setup, objective_of, prepare
from groupline.training.sharing import share_model
from groupline.training.sinks import Sink, open_sinks
from groupline.training.step import fill_reference

REWARD_MODEL = "reward_model"  # its name among an answer's rewards
VALUE_MODEL = "value_model"  # its folder in the run's
Share = Annotated[float, Field(ge=0, le=1)]


class PpoConfig(Config):
    """Every setting of a PPO run: those of `train`, and PPO's own."""

    objective: Literal["ppo"] = "ppo"
    """Always PPO's."""
    num_generations: Positive = 8
    """Answers to each prompt; 1 will do, as none is compared with the others."""
    num_iterations: Positive = 4
    """Passes over each rollout: PPO's epochs."""
    beta: NonNegative | None = 0.05
    """Weight of the KL to the starting policy, taken from the reward at every token; 0: none, and no reference."""
    gamma: Share = 1.0
    """What a reward one token later is worth."""
    gae_lambda: Share = 0.95
    """Generalised advantage estimation: 1 trusts what was rewarded, 0 the value model."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step's tokens to mean 0 and standard deviation 1."""
    whiten_rewards: bool = False
    """Scale the rewards of a step's tokens to standard deviation 1, their mean kept."""
    value_model: str | None = None
    """Where the value model starts: an earlier run's `value_model`, or a language model or reward model, folder or hub
    id; by default the policy's start."""
    value_learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the value model; the policy's by default."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was before the update within the loss; null: no clip."""
    value_coef: float = Field(default=1.0, gt=0)
    """Factor on the value model's loss; its optimiser is its own, so this counts against max_grad_norm alone."""
    reward_model: str | None = None
    """A reward model's folder or hub id, whose score takes the place of the code's rewards; by default none."""
    missing_eos_penalty: NonNegative | None = None
    """Taken from the score of an answer that was cut at the token limit."""
    output_dir: str = "runs/ppo"

    @model_validator(mode="after")
    def _no_groups(self) -> Self:
        given = [name for name in ("scale_rewards", "ddof") if getattr(self, name) is not None]
        if given:
            raise ValueError(
                f"{' and '.join(given)} concern a group's advantages, and PPO's come from the value model; leave them "
                "out (whiten_advantages is what scales these)"
            )
        if self.kl not in (None, PPO.kl) or self.kl_place not in (None, PPO.kl_place):
            raise ValueError(
                f"kl is {self.kl or PPO.kl} and kl_place {self.kl_place or PPO.kl_place}, and PPO takes {PPO.kl} from the "
                f"{PPO.kl_place}, token by token; leave them out"
            )
        return self


def ppo(
    config: PpoConfig, say: Callable[[str], None] = print, sinks: Sequence[Sink] = (), **given: Any
) -> dict[str, Any]:
    """Run PPO as `config` says, write the run folder, and return what results.json holds.

    sinks, given: as for `train`: `model`, `tokenizer`, `rewards`, `problems`, `held_out`. Files, held-out measures,
    Ctrl-C and `resume` are those of `train`; the value model is saved beside the policy, in `value_model`.
    Formulas and sources: docs/ppo.md.
    """
    refuse_ranks("ppo")
    told = open_sinks(config.report_to, sinks, say)
    found = find_checkpoint(config, say)
    if config.resume is False:
        check_unused(config)
    setup = prepare(config, say, objective=ppo_objective(config), **given)
    method = Ppo.of(config, setup)
    share_model(setup, SOLO)
    if config.activation_checkpointing:
        checkpoint_layers(method.critic.model.body)
    return run(config, setup, say, found=found, sinks=told, method=method)


def ppo_objective(config: PpoConfig) -> Objective:
    """PPO's row with the configuration's changes."""
    return objective_of(config, PPO)


@dataclass(frozen=True)
class Judge:
    """A reward model: token ids in, scores out, read at the answer's last token."""

    model: nn.Module
    shared: bool
    compute: torch.dtype

    def __call__(self, answers: Sequence[tuple[Ids, Ids]], token_limit: int) -> list[float]:
        """The score of every (prompt ids, answer ids). token_limit: most row tokens of a pass, a memory setting."""
        return score_answers(self.model, answers, token_limit, shared=self.shared, compute=self.compute)


@dataclass
class Ppo(Method):
    """The policy's part is the step of `train`; advantages come token by token from the critic."""

    config: PpoConfig
    critic: Critic
    judge: Judge | None = None

    @classmethod
    def of(cls, config: PpoConfig, setup: Setup) -> Self:
        """Load or copy what PPO needs beside `setup`. Raises before any training, naming what to change."""
        device, compute = setup.precision.device, setup.precision.compute
        if config.value_model is None:
            model = value_of_policy(setup.policy, setup.scorer.shared, compute)
        else:
            _same_tokens("value_model", config.value_model, setup)
            model = load_value_model(
                config.value_model, device, compute, trust_remote_code=config.trust_remote_code,
                lora_r=config.lora_r, lora_alpha=config.lora_alpha, lora_targets=config.lora_targets,
            )  # fmt: skip
        rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
        updates = config.steps * config.num_iterations * config.updates_per_pass
        settings = config.model_copy(update={"learning_rate": rate})
        optimiser = Optimiser(model, settings, updates, setup.precision.scale_gradients)
        judge = None
        if config.reward_model is not None:
            _same_tokens("reward_model", config.reward_model, setup)
            model_of_rewards = load_reward_model(config.reward_model, device, config.trust_remote_code)
            judge = Judge(
                model_of_rewards.requires_grad_(False), why_scores_not_shared(model_of_rewards) is None, compute
            )
        return cls(config, Critic(model, optimiser, config.value_clip, config.value_coef), judge)

    def plan(self) -> str:
        c, model = self.config, self.critic.model
        every, trained = (
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for p in self.critic.optimiser.parameters),
        )
        rate = self.critic.optimiser.adam.param_groups[0]["initial_lr"]
        start = "the policy's start, head 0" if c.value_model is None else c.value_model
        score = "the rewards above" if self.judge is None else f"{c.reward_model}; the rewards above are only measured"
        cut = "" if c.missing_eos_penalty is None else f", {c.missing_eos_penalty:g} off for an answer without an end"
        return (
            f"\n{'value':>10}  {every:,} weights, {trained:,} trained at {rate:g}, from {start}; clip "
            f"{'-' if c.value_clip is None else f'{c.value_clip:g}'}, gamma {c.gamma:g}, lambda {c.gae_lambda:g}"
            f"\n{'score':>10}  {score}{cut}"
        )

    def words(self, metrics: Mapping[str, Any]) -> str:
        return f"  value explains {metrics.get('value/explained_variance', float('nan')):.2f}"

    def scored(self, setup: Setup, groups: list[Group]) -> list[Group]:
        if self.judge is None:
            return groups
        pairs = [(r.completion.prompt_ids, r.completion.ids) for g in groups for r in g.rollouts]
        scores = iter(self.judge(pairs, setup.config.micro_batch_tokens))

        def judged(rollout: Rollout) -> Rollout:
            score = next(scores)
            return replace(rollout, rewards={**rollout.rewards, REWARD_MODEL: score}, reward=score)

        return [Group(g.problem, tuple(map(judged, g.rollouts))) for g in groups]

    def batch(self, setup: Setup, groups: Sequence[Group], step: int) -> tuple[Batch, dict[str, float]]:
        batch = build(setup, groups, step, setup.objective, skip_idle=False)
        if setup.reference is not None:
            fill_reference(batch.micro_batches, setup.reference, setup.scorer)
        set_old(setup, batch)
        self.critic.fill(batch.micro_batches)
        c = self.config
        facts = estimate(
            batch, scores_of(groups, c.missing_eos_penalty), beta=setup.objective.beta, gamma=c.gamma,
            lam=c.gae_lambda, whiten_rewards=c.whiten_rewards, whiten_advantages=c.whiten_advantages,
        )  # fmt: skip
        return batch, facts

    def update(self, setup: Setup, part: Batch) -> dict[str, float]:
        return super().update(setup, part) | self.critic.step(part)

    def models(self, setup: Setup) -> dict[str, Weights]:
        named: dict[str, nn.Module | Mapping[str, Tensor]] = {"policy": setup.policy, "value": self.critic.model}
        if self.judge is not None:
            named["reward"] = self.judge.model
        if setup.reference is not None:
            named["reference"] = setup.reference.state()
        return weights_of(named)

    def save(self, setup: Setup, folder: Path) -> None:
        save_value_model(self.critic.model, setup.tokenizer, folder / VALUE_MODEL)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"value": {n: p for n, p in self.critic.model.named_parameters() if p.requires_grad}}

    def torch_state(self) -> dict[str, Any]:
        return {"value_optimiser": self.critic.optimiser.state_dict()}

    @torch.no_grad()
    def load(self, found: Checkpoint) -> None:
        weights = found.tensors("value") or {}
        for name, own in self.tensors()["value"].items():
            own.copy_(weights[name])
        self.critic.optimiser.load_state_dict(found.torch_state()["value_optimiser"])


def scores_of(groups: Sequence[Group], missing_eos_penalty: float | None = None) -> Tensor:
    """[S] in fp64, group by group: the rewards, less the penalty where an answer was cut; NaN where none applies."""
    rollouts = [r for g in groups for r in g.rollouts]
    penalty = missing_eos_penalty or 0.0
    return torch.tensor(
        [
            float("nan") if r.reward is None else r.reward - penalty * (r.completion.finish_reason == "length")
            for r in rollouts
        ],
        dtype=torch.float64,
    )


def _same_tokens(setting: str, name: str, setup: Setup) -> None:
    """Token ids go from model to model, so a tokenizer that lies beside this one must be the policy's."""
    folder = Path(resolve_model(name))
    if not (folder / "tokenizer.json").exists():
        return
    theirs, ours = load_tokenizer(str(folder)).get_vocab(), setup.tokenizer.get_vocab()
    if theirs != ours:
        raise ConfigError(
            f"{setting}: the tokenizer in {name} has {len(theirs)} tokens and is not the policy's ({len(ours)} tokens); "
            "use one that was trained from a model with the same tokenizer"
        )
