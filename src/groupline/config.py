"""The typed, frozen configuration of a run, its YAML form, and errors that name key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from groupline.runlog import write_text

# Keys of other trainers, and what takes their place here.
RENAMED = {
    "max_prompt_lenght": "max_prompt_length",
    "per_device_train_batch_size": "prompts_per_step (prompts, not answers) and micro_batch_tokens (memory only)",
    "gradient_accumulation_steps": "micro_batch_tokens: micro-batches follow from it and never change the gradient",
    "generation_batch_size": "prompts_per_step",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "loss_type": "objective",
    "use_liger_kernel": "nothing: logits are never held whole",
    "bf16": "precision",
    "fp16": "precision",
    "reward_funcs": "rewards",
    "max_new_tokens": "max_completion_length",
    "group_size": "num_generations",
    "dataset_name": "train_file: hub:owner/name",
    "columns": "prompt_column and answer_column",
    "clip_range": "epsilon",
    "kl_coef": "beta",
}

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction01 = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run; the message lists every problem found."""


class Settings(BaseModel):
    """Typed, frozen settings. Unknown keys are refused with the nearest valid one, every problem in one message."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        known = type(self).model_fields
        problems = [explain_unknown(key, known) for key in values if key not in known]
        try:
            super().__init__(**{k: v for k, v in values.items() if k in known})
        except ValidationError as error:
            problems += map(_explain, error.errors())
        if problems:
            raise ConfigError("; ".join(problems)) from None

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Self:
        """From a YAML file. Numbers such as 1e-5, which YAML reads as text, are converted by the key's type.

        changes: settings over the file's; `fast=True` first lays its block `fast_settings` over it (see `read_recipe`).
        """
        fast = changes.pop("fast", None)
        return cls(**(read_recipe(Path(path), cls.model_fields, fast) | changes))

    def save(self, path: Path) -> None:
        """Written whole or not at all."""
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


class RunSettings(Settings):
    """What every kind of training shares: model, problems, optimiser, run folder."""

    # Model
    model: str = "builtin"
    """Folder in Hugging Face format, hub id, or "builtin"."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, if not the model's own."""
    trust_remote_code: bool = False
    """Whether the model folder may bring code that runs here."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Number format of the forward passes; auto chooses from the device and prints why."""
    lora_r: int = Field(default=0, ge=0)
    """Rank of a LoRA adapter; 0 trains all weights."""
    lora_alpha: int | None = Field(default=None, gt=0)
    """The adapter's output is scaled by alpha / r; twice the rank by default."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in training passes only."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter."""

    # Problems
    task: str = "arithmetic_th"
    """A built-in task by name, or gym:NAME of reasoning-gym; `train_file` takes its place if given."""
    train_file: str | None = None
    """Training problems: a JSONL, CSV or Parquet file, a data set's folder, or hub:owner/name."""
    eval_file: str | None = None
    """Held-out problems, likewise."""
    data_seed: int = 0
    """Seed of a built-in task's problems."""
    prompt_column: str | None = None
    """Column that holds the prompt, text or conversation; by default prompt, question or problem."""
    answer_column: str | None = None
    """Column that holds the gold answer; by default answer, reward_model.ground_truth or solution."""
    system_prompt: str | None = None
    """Put before the prompts of `train_file` and `eval_file`."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """What happens to a prompt over the limit; either way it is found before training and counted."""
    chat_template_kwargs: dict[str, str | bool | int | float] = Field(default_factory=dict)
    """Passed to the chat template (for instance enable_thinking)."""

    # Optimiser
    steps: Positive = 100
    """Rollouts; each gives num_iterations optimiser steps."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: NonNegative = 0.0
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    micro_batch_tokens: Positive | None = None
    """Most row tokens of one forward pass: a memory setting, the gradient does not depend on it. By default chosen from
    the model and the free memory; the plan says how many and why."""

    # Run
    output_dir: str = "runs/run"
    overwrite: bool = False
    """Delete an earlier run in the same folder instead of refusing."""
    seed: int = 0


class Config(RunSettings):
    """Every setting of a GRPO run."""

    # Rewards
    rewards: tuple[str, ...] | None = None
    """Built-in names or module.function; the task's own by default."""
    reward_weights: tuple[float, ...] | None = None
    """One weight a reward function."""

    # Sampling
    prompts_per_step: Positive = 16
    """Different prompts a step."""
    num_generations: int = 8
    """Answers to each prompt: the group."""
    max_completion_length: Positive = 256
    """Most tokens of an answer."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in training alike."""
    top_p: Fraction01 = 1.0
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    max_rows: Positive = 256
    """Most answers decoded at once."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Budget for cached keys and values; a quarter of the free memory by default."""

    # Objective
    objective: str = "grpo"
    """A row of `groupline.objective.OBJECTIVES`."""
    beta: NonNegative | None = None
    """Weight of the KL penalty to the starting policy; the row's own by default."""
    epsilon: float | None = Field(default=None, ge=0, lt=1)
    """Lower clip bound (and upper, unless epsilon_high is given)."""
    epsilon_high: NonNegative | None = None
    delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio before clipping, for either sign of the advantage."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Which standard deviation divides the advantages."""
    ddof: Literal[0, 1] | None = None
    """1: sample standard deviation; 0: population."""
    mask_truncated_completions: bool | None = None
    """Leave answers without an end out of the loss."""
    top_entropy_quantile: Fraction01 | None = None
    """Share of the tokens, those of highest entropy, that keep their policy term."""
    num_iterations: Positive = 1
    """Passes over each rollout."""
    updates_per_pass: Positive = 1
    """Optimiser steps that a pass over a rollout is cut into, its answers shuffled."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Where the ratio's denominator comes from: the first training pass itself, or the sampler."""

    # Held-out problems
    eval_problems: int = Field(default=200, ge=0)
    """Held-out problems evaluated before and after training; 0 turns evaluation off."""
    eval_samples: Positive = 8
    """Answers to each held-out problem."""
    eval_every: int = Field(default=0, ge=0)
    """Also evaluate every so many steps; 0: only before and after."""
    eval_temperature: float = Field(default=1.0, ge=0)

    log_rollouts: bool = True
    """Write every sample with its rewards and advantage."""

    # Checkpoints
    save_steps: int = Field(default=100, ge=0)
    """Write a checkpoint every so many steps; 0: none."""
    save_total_limit: Positive | None = 2
    """Most checkpoints kept; older ones are deleted, the newest whole one never. None keeps all."""
    resume: bool | str = False
    """Continue the run in output_dir from its newest whole checkpoint, or from the checkpoint folder named."""

    @field_validator("resume", mode="before")
    @classmethod
    def _truth(cls, value: Any) -> Any:
        return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.num_generations < 2 and self.objective != "ppo":
            problems.append(
                f"num_generations is {self.num_generations}: a group of one has nothing to be compared with; use at least 2"
            )
        if self.temperature <= 0:
            problems.append(
                f"temperature is {self.temperature}: greedy answers of a group are all equal, so nothing could be learned; "
                "use a positive one (eval_temperature may be 0)"
            )
        if self.old_logprobs == "sampler" and (self.top_p < 1 or self.top_k or self.min_p):
            problems.append(
                "old_logprobs is sampler, but top_p, top_k or min_p make the sampler's log-probs those of another "
                "distribution; use old_logprobs: recompute, or no filter"
            )
        given, weights = self.rewards, self.reward_weights
        if given is not None and weights is not None and len(given) != len(weights):
            problems.append(f"{len(given)} rewards but {len(weights)} reward_weights; give one for each")
        if self.rewards == ():
            problems.append("rewards is empty; name at least one reward function")
        if self.lora_r == 0 and self.lora_alpha is not None:
            problems.append("lora_alpha is set but lora_r is 0; set lora_r to train an adapter")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must hold settings, one `key: value` a line")
    return {str(key): value for key, value in values.items()}


def read_recipe(path: Path, known: Collection[str], fast: bool | None = None) -> dict[str, Any]:
    """The settings of a recipe, which may hold a quicker variant of itself: a block `fast_settings` of settings that
    take the place of those beside it where `fast` is true, in the recipe or as the argument, which goes first.

    known: the settings there are. Neither of the two keys is in what is returned.

    Raises:
        ConfigError: the two are not of that kind; a key in the block is unknown, used or not; there is no block to use.
    """
    values = read_yaml(path)
    chosen, block = values.pop("fast", False), values.pop("fast_settings", None)
    if not isinstance(chosen, bool):
        raise ConfigError(f"{path}: fast is {chosen!r}; it is true or false, and its settings stand in fast_settings")
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f"{path}: fast_settings is {block!r}; it must hold settings, one `key: value` a line")
    unknown = [explain_unknown(str(key), known) for key in block or () if key not in known]
    if unknown:
        raise ConfigError(f"{path}: in fast_settings: {'; '.join(unknown)}")
    if not (chosen if fast is None else fast):
        return values
    if block is None:
        raise ConfigError(f"{path} has no fast_settings, so there is no fast variant of it")
    return values | {str(key): value for key, value in block.items()}


def explain_unknown(key: str, known: Iterable[str]) -> str:
    if key in RENAMED:
        return f"unknown setting {key!r}; here it is {RENAMED[key]}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; `--help` lists them all")


def _explain(error: Any) -> str:
    loc = error["loc"]  # after the key itself come the keys within a nested model, or the member of a union
    nested = loc[:1] == ("new_model",)
    key = ".".join(str(part) for part in (loc if nested else loc[:1]))
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{key} is {error['input']!r}: {message}" if key else message
