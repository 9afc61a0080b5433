"""Settings of a comparison, and what they make of each method's own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from pydantic import Field, model_validator

from groupline.config import Config, ConfigError, Positive, RunSettings
from groupline.objective import OBJECTIVES
from groupline.tasks.task import get_task
from groupline.training.dpo import DpoConfig
from groupline.training.ppo import PpoConfig
from groupline.training.reward_model import RewardModelConfig
from groupline.training.sft import SftConfig

PAIRS, REWARD_MODEL, SFT, DPO, PPO, RLHF = "pairs", "reward_model", "sft", "dpo", "ppo", "ppo_reward_model"
METHODS = (SFT, RLHF, PPO, DPO, "rloo", "reinforce", "grpo", "dr_grpo", "dapo", "gspo")
KNOWN = tuple(dict.fromkeys((*METHODS, *(name for name in OBJECTIVES if name != PPO))))
STAGES: Mapping[str, tuple[str, ...]] = {RLHF: (PAIRS, REWARD_MODEL), DPO: (PAIRS,)}  # what is made first
MOST_HELD_OUT_PAIRS = 100  # held-out problems that pairs are made of, to measure the reward model on


class CompareConfig(RunSettings):
    """Settings of a comparison. Every method starts from `model` and is given the same problems, samples and updates."""

    methods: tuple[str, ...] = METHODS
    """What is compared: sft, dpo, ppo, ppo_reward_model, and rows of `groupline.objective.OBJECTIVES`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every method is trained once with each."""
    steps: Positive = 32
    """Updates of the policy, for every method."""
    prompts_per_step: Positive = 16
    """Problems a step; steps times this many are what every method learns from."""
    num_generations: int = Field(default=8, ge=2)
    """Answers to each problem."""
    max_completion_length: Positive = 256
    """Most tokens of an answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it, in sampling and in training alike."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    rewards: tuple[str, ...] | None = None
    """As for `train`; the first decides what counts as right, and alone orders the pairs."""
    reward_weights: tuple[float, ...] | None = None
    """One weight a reward function."""
    eval_problems: Positive = 200
    """Held-out problems that every trained model answers."""
    eval_samples: Positive = 8
    """Answers to each."""
    eval_temperature: float = Field(default=1.0, gt=0)
    """At which they are drawn."""
    settings: Annotated[dict[str, dict[str, Any]], tyro.conf.Suppress] = Field(default_factory=dict)
    """Further settings by method, or for `pairs` and `reward_model`: {dpo: {beta: 0.2}}. In a recipe only."""
    output_dir: str = "runs/comparison"
    overwrite: bool = False
    """Train again what an earlier comparison in the same folder trained with other settings, instead of refusing."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        problems = [_unknown("methods", name, KNOWN) for name in self.methods if name not in KNOWN]
        named = (*KNOWN, PAIRS, REWARD_MODEL)
        problems += [_unknown("settings", name, named) for name in self.settings if name not in named]
        if not self.methods or len(set(self.methods)) < len(self.methods):
            problems.append("methods must name at least one method, and none twice")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            problems.append("seeds must name at least one seed, and none twice")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def answers_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def judge(self) -> str:
        """Name of the reward function that decides what is right."""
        if self.rewards:
            return self.rewards[0]
        return "correct_number" if self.train_file else get_task(self.task).rewards[0]


def _unknown(setting: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"{setting}: there is no method {name!r}; did you mean {near!r}? There are {', '.join(known)}"


def jobs(config: CompareConfig, seed: int, folder: Path) -> dict[str, tuple[str, RunSettings]]:
    """Name -> (what is run, its settings), in the order in which one needs another; all of one seed.

    folder: the seed's; each job writes to `folder / name`. ConfigError: a method does not take such a setting.
    """
    names = list(dict.fromkeys(part for m in config.methods for part in (*STAGES.get(m, ()), m)))
    return {name: _job(config, name, seed, folder) for name in names}


def needed(name: str) -> tuple[str, ...]:
    """What must be made before this part."""
    return STAGES.get(name, (PAIRS,) if name == REWARD_MODEL else ())


def evaluation(config: CompareConfig, seed: int) -> Config:
    """What every trained model is measured with; the model is filled in."""
    own = ("eval_problems", "eval_samples", "eval_temperature", "max_completion_length", "stop", "rewards")
    given = {name: getattr(config, name) for name in (*own, "reward_weights")}
    return Config(**_shared(config, Config) | given | {"seed": seed, "lora_r": 0, "lora_alpha": None})


def _job(config: CompareConfig, name: str, seed: int, folder: Path) -> tuple[str, RunSettings]:
    given: dict[str, Any] = {"steps": config.steps, "seed": seed, "output_dir": str(folder / name)}
    given["save_steps"] = 0  # a part that was cut short is made again
    online = {
        "prompts_per_step": config.prompts_per_step,
        "num_generations": config.num_generations,
        "max_completion_length": config.max_completion_length,
        "temperature": config.temperature,
        "stop": config.stop,
        "rewards": config.rewards,
        "reward_weights": config.reward_weights,
        "eval_problems": 0,
        "log_rollouts": False,
    }
    pairs = folder / PAIRS
    of_pairs = {
        "pairs_file": str(pairs / "train.jsonl"),
        "eval_pairs_file": str(pairs / "held_out.jsonl"),
        "batch_size": max(1, config.answers_per_step // 2),
    }
    run, kind = "train", Config
    values: dict[str, Any]
    if name == PAIRS:
        run, values = PAIRS, online | {"rewards": (config.judge,), "reward_weights": None}
        values["eval_problems"] = min(config.eval_problems, MOST_HELD_OUT_PAIRS)
    elif name == SFT:
        problems = config.steps * config.prompts_per_step
        run, kind = SFT, SftConfig  # type: ignore[assignment]
        values = {"problems": problems, "batch_size": config.answers_per_step, "eval_problems": 0}
    elif name == DPO:
        run, kind, values = DPO, DpoConfig, of_pairs  # type: ignore[assignment]
    elif name == REWARD_MODEL:
        run, kind, values = REWARD_MODEL, RewardModelConfig, of_pairs  # type: ignore[assignment]
    elif name in (PPO, RLHF):
        run, kind, values = PPO, PpoConfig, online | {"num_iterations": 1}  # type: ignore[assignment]
        if name == RLHF:
            values["reward_model"] = str(folder / REWARD_MODEL / "model")
    else:
        values = online | {"objective": name}
    try:
        return run, kind(**_shared(config, kind) | given | values | config.settings.get(name, {}))
    except ConfigError as error:
        raise ConfigError(f"settings of {name}: {error}") from None


def _shared(config: CompareConfig, kind: type[RunSettings]) -> dict[str, Any]:
    """What every method takes over: model, problems, optimiser. Pairs hold whole prompts, and need no more of them."""
    left_out = {"steps", "seed", "output_dir", "overwrite"}
    if "pairs_file" in kind.model_fields:
        left_out |= {"train_file", "eval_file", "system_prompt"}
    return {name: getattr(config, name) for name in RunSettings.model_fields if name not in left_out}
