"""The settings of a run: those that every kind of training shares, and those of GRPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from groupline.settings import (
    RENAMED,
    ConfigError,
    Fraction01,
    NonNegative,
    Positive,
    Settings,
    VllmSettings,
    explain_unknown,
    read_recipe,
    read_yaml,
    tracker_names,
)

__all__ = [
    "RENAMED",
    "Config",
    "ConfigError",
    "Positive",
    "ResumableSettings",
    "RunSettings",
    "Settings",
    "explain_unknown",
    "read_recipe",
    "read_yaml",
]


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
    """Of AdamW, after the warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stays, or falls to 0 by the last update."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Of AdamW."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    micro_batch_tokens: Positive | None = None
    """Most row tokens of one forward pass: a memory setting, the gradient does not depend on it. By default chosen from
    the model and the free memory; the plan says how many and why."""

    # Run
    output_dir: str = "runs/run"
    """The run's folder."""
    overwrite: bool = False
    """Delete an earlier run in the same folder instead of refusing."""
    seed: int = 0
    """Of draws, problem order, a fresh adapter and a new model."""

    # Trackers
    report_to: tuple[str, ...] = ()
    """Trackers told of the run beside its files: tensorboard, wandb, trackio, mlflow; all: those installed."""
    run_name: str | None = None
    """The run's name in trackers; that of output_dir by default."""
    project: str | None = None
    """The trackers' project, or MLflow's experiment."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _trackers(cls, value: Any) -> tuple[str, ...]:
        return tracker_names(value)


class ResumableSettings(RunSettings):
    """What every run has that trains: checkpoints, and going on from one."""

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


class Config(VllmSettings, ResumableSettings):
    """Every setting of a GRPO run."""

    # Rewards
    rewards: tuple[str, ...] | None = None
    """Built-in names or module.function; the task's own by default."""
    reward_weights: tuple[float, ...] | None = None
    """One weight a reward function."""
    reward_timeouts: tuple[Annotated[float, Field(gt=0)] | None, ...] | None = None
    """Most seconds that one call of each reward function may take; null: no limit."""

    # Sampling
    prompts_per_step: Positive = 16
    """Different prompts a step."""
    num_generations: int = 8
    """Answers to each prompt: the group."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """Most rounds in which groups without signal are replaced by groups of other prompts; 0: they stay."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Answers within so many tokens of max_completion_length lose reward, up to 1 at the limit; 0: none do."""
    max_completion_length: Positive = 256
    """Most tokens of an answer."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in training alike."""
    top_p: Fraction01 = 1.0
    """Draw from the smallest set of tokens whose probability reaches it; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Draw from the k most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less probable than this times the most probable one; 0: none."""
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
    kl: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL; the row's own by default."""
    kl_place: Literal["loss", "reward"] | None = None
    """Whether the penalty is in each token's loss or taken from the answer's reward; the row's own by default."""
    epsilon: float | None = Field(default=None, ge=0, lt=1)
    """Lower clip bound (and upper, unless epsilon_high is given)."""
    epsilon_high: NonNegative | None = None
    """Upper clip bound."""
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
    """Temperature of held-out answers, drawn without filters; 0: greedy."""

    log_rollouts: bool = True
    """Write every sample with its rewards and advantage."""
    log_tokens: int = Field(default=1, ge=0)
    """Groups a step whose answers are logged with what the trainer knew of each token; 0: none."""
    stop_on_alarm: bool = False
    """End the run, its model saved, when an alarm says that it is broken."""

    # Memory, and several processes
    activation_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass, which computes the rest again: less memory, a third more time."""
    parallel: Literal["auto", "replicate", "fsdp"] = "auto"
    """With torchrun: every process has a copy of the model, or a share of it (FSDP2); auto shares what does not fit."""
    rank_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that one process may keep the others waiting; then the run ends and says who waited for whom."""

    @property
    def filters(self) -> bool:
        """Whether tokens are left out before the draw: top_p, top_k or min_p."""
        return bool(self.top_p < 1 or self.top_k or self.min_p)

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
        if self.old_logprobs == "sampler" and self.filters:
            problems.append(
                "old_logprobs is sampler, but top_p, top_k or min_p make the sampler's log-probs those of another "
                "distribution; use old_logprobs: recompute, or no filter"
            )
        given, weights = self.rewards, self.reward_weights
        if given is not None and weights is not None and len(given) != len(weights):
            problems.append(f"{len(given)} rewards but {len(weights)} reward_weights; give one for each")
        timeouts = self.reward_timeouts
        if given is not None and timeouts is not None and len(given) != len(timeouts):
            problems.append(f"{len(given)} rewards but {len(timeouts)} reward_timeouts; give one for each, or null")
        if self.dynamic_sampling and self.objective == "ppo":
            problems.append("dynamic_sampling replaces groups whose answers are all rewarded alike; PPO compares none")
        if self.overlong_buffer > self.max_completion_length:
            problems.append(
                f"overlong_buffer is {self.overlong_buffer}; it can be no more than max_completion_length, "
                f"{self.max_completion_length}"
            )
        if self.rewards == ():
            problems.append("rewards is empty; name at least one reward function")
        if self.lora_r == 0 and self.lora_alpha is not None:
            problems.append("lora_alpha is set but lora_r is 0; set lora_r to train an adapter")
        if self.sampler_correction not in ("auto", "off") and (self.old_logprobs == "sampler" or self.filters):
            problems.append(
                f"sampler_correction is {self.sampler_correction}, but with old_logprobs: sampler the ratio itself "
                "corrects, and under top_p, top_k or min_p the sampler's log-probs are of another distribution; use off"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
