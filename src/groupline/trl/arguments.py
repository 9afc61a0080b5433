"""GRPOConfig: TRL's options, checked against the table, and what they say in groupline's own settings."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from groupline.config import Config, ConfigError
from groupline.objective import Objective
from groupline.objective.weights import TokenWeight
from groupline.settings import tracker_names
from groupline.trl.options import OLDER, OPTIONS, check, plain

WEIGHTS: dict[str, TokenWeight] = {
    "grpo": "per_sequence",
    "bnpo": "per_token",
    "dr_grpo": "per_budget",
    "dapo": "per_token",
    "cispo": "per_token",
    "luspo": "sequence_sum",
}


class GRPOConfig:
    """The options of TRL 1.16's GRPOConfig, and some of earlier releases, with TRL's defaults.

    `groupline compat` prints what becomes of each. Raises ConfigError (a ValueError) listing every option that is
    unknown or not taken here, with what to use instead, and batch sizes that do not fit together.
    """

    world_size = 1
    process_index = 0
    local_process_index = 0
    should_save = True
    should_log = True
    n_gpu = 1
    generation_batch_size: Any
    steps_per_generation: Any

    def __init__(self, output_dir: str | Path | None = None, **options: Any) -> None:
        given = {"output_dir": None if output_dir is None else str(output_dir), **options}
        problems = check(given)
        values = {name: copy.copy(option.default) for name, option in (OPTIONS | OLDER).items()}
        values |= {name: plain(value) for name, value in given.items() if name in values}
        scale = values["scale_rewards"]
        values["scale_rewards"] = {True: "group", False: "none"}.get(scale, scale)
        if values["output_dir"] is None:
            values["output_dir"] = "trainer_output"
        if values["eval_steps"] is None:
            values["eval_steps"] = values["logging_steps"]
        best = values["metric_for_best_model"]
        if values["greater_is_better"] is None and best is not None:
            values["greater_is_better"] = not best.endswith("loss")
        self.__dict__.update(values)
        if not problems:
            problems += self._sizes()
        try:
            tracker_names(self.report_to)
        except ValueError as error:
            problems.append(f"report_to: {error}")
        if self.fp16 and self.bf16:
            problems.append("fp16 and bf16 are both set; give one")
        if self.sync_ref_model and not self.beta:
            problems.append("sync_ref_model needs a reference, so beta must be above 0")
        if problems:
            raise ConfigError("; ".join(problems))

    def __getattr__(self, name: str) -> Any:  # an option that __init__ did not set; also tells a type checker of those
        raise AttributeError(f"GRPOConfig has no option {name!r}")

    def __repr__(self) -> str:
        changed = {n: v for n, v in vars(self).items() if n in OPTIONS and v != OPTIONS[n].default}
        return f"GRPOConfig({', '.join(f'{n}={v!r}' for n, v in changed.items())})"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self.to_dict().items()}

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")

    @property
    def train_batch_size(self) -> int:
        return int(self.per_device_train_batch_size)

    def _sizes(self) -> list[str]:
        """TRL's batch arithmetic: fills in what follows, and says what does not fit."""
        per_step, accumulate, size = (
            self.per_device_train_batch_size, self.gradient_accumulation_steps, self.num_generations,
        )  # fmt: skip
        if size < 2:
            return [f"num_generations is {size}: a group of one has nothing to be compared with; use at least 2"]
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            return ["generation_batch_size and steps_per_generation say the same thing; give one of them"]
        if self.generation_batch_size is not None:
            whole = self.generation_batch_size
            if whole % per_step:
                return [f"generation_batch_size ({whole}) must be a multiple of per_device_train_batch_size "
                        f"({per_step}): {_nearest(whole, per_step)}"]  # fmt: skip
            self.steps_per_generation = whole // per_step
        elif self.steps_per_generation is None:
            self.steps_per_generation = accumulate
        self.generation_batch_size = per_step * self.steps_per_generation
        whole, slices = self.generation_batch_size, self.steps_per_generation
        if whole % size:
            return [f"generation_batch_size ({whole}, that is per_device_train_batch_size {per_step} x "
                    f"steps_per_generation {slices}) must be a multiple of num_generations ({size}): "
                    f"{_nearest(whole, size)}"]  # fmt: skip
        if slices % accumulate and (accumulate % slices or self.num_iterations > 1):
            return [f"steps_per_generation ({slices}) must be a multiple of gradient_accumulation_steps ({accumulate}), "
                    f"{_nearest(slices, accumulate)}, or a divisor of it with num_iterations 1"]  # fmt: skip
        return []

    @property
    def updates_per_pass(self) -> int:
        """Optimiser steps that one pass over a generation batch is cut into."""
        return max(1, int(self.steps_per_generation) // int(self.gradient_accumulation_steps))

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser steps that the answers of one rollout give."""
        return int(self.num_iterations) * self.updates_per_pass

    @property
    def generations_per_rollout(self) -> int:
        """Generation batches that one optimiser step takes, where steps_per_generation is the smaller number."""
        return max(1, int(self.gradient_accumulation_steps) // int(self.steps_per_generation))

    def objective(self) -> Objective:
        """The objective of these options. ValueError naming the field that is out of range."""
        kind, high = self.loss_type, self.epsilon if self.epsilon_high is None else self.epsilon_high
        detached = kind == "cispo"  # there TRL's epsilon_high is the bound itself, not its distance from 1
        return Objective(
            name=f"trl {kind}",
            baseline="mean",
            scale=self.scale_rewards,
            ratio=self.importance_sampling_level,
            form="detached" if detached else "surrogate",
            clip_low=None if detached else self.epsilon,
            clip_high=high - 1 if detached else high,
            delta=None if detached else self.delta,
            token_weight=WEIGHTS[kind],
            kl="k3" if self.beta else "none",
            beta=self.beta,
            kl_times_ratio=bool(self.beta) and self.use_bias_correction_kl,
            mask_truncated=self.mask_truncated_completions,
            count_masked=True if kind in ("grpo", "luspo") else None,
            top_entropy=self.top_entropy_quantile,
        )

    def settings(self, plan: Plan, folder: Path, lora_dropout: float) -> Config:
        """groupline's own settings for a run in `folder`."""
        kind = {"constant_with_warmup": "constant"}.get(self.lr_scheduler_type, self.lr_scheduler_type)
        warmup = self.warmup_steps or self.warmup_ratio
        warmup = math.ceil(plan.updates * warmup) if warmup < 1 else int(warmup)
        precision: Literal["fp16", "bf16", "auto"] = "fp16" if self.fp16 else "bf16" if self.bf16 else "auto"
        return Config(
            output_dir=str(folder),
            device=self.device.type,
            precision="auto" if self.device.type == "cpu" else precision,
            lora_dropout=0.0 if self.disable_dropout else lora_dropout,
            trust_remote_code=self.trust_remote_code,
            max_prompt_length=self.max_prompt_length,
            long_prompts="drop",
            chat_template_kwargs=self.chat_template_kwargs or {},
            steps=plan.rollouts,
            prompts_per_step=plan.prompts,
            num_generations=self.num_generations,
            num_iterations=self.num_iterations,
            updates_per_pass=self.updates_per_pass,
            max_completion_length=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            learning_rate=self.learning_rate,
            lr_scheduler_type=kind,
            warmup_steps=0 if self.lr_scheduler_type == "constant" else warmup,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_epsilon=self.adam_epsilon,
            max_grad_norm=self.max_grad_norm,
            objective={"luspo": "gspo"}.get(self.loss_type, self.loss_type),
            beta=self.beta,
            eval_problems=0,
            save_steps=0,  # the trainer saves under TRL's names
            seed=self.seed,
            report_to=self.report_to,
            run_name=self.run_name or Path(self.output_dir).resolve().name,
            project=None if self.project == OPTIONS["project"].default else self.project,
        )


@dataclass(frozen=True)
class Plan:
    """How many of what a run takes, as TRL counts.

    prompts: of a rollout. rollouts, updates: of the run; updates are optimiser steps. per_epoch: updates of an epoch.
    """

    prompts: int
    rollouts: int
    updates: int
    per_epoch: int

    @classmethod
    def of(cls, args: GRPOConfig, problems: int) -> Plan:
        """ConfigError if the problems do not fill one generation batch."""
        batch = args.generation_batch_size // args.num_generations
        batches = problems // batch  # an epoch's incomplete rest is left out
        if not batches:
            raise ConfigError(
                f"a generation batch takes {batch} prompts (generation_batch_size {args.generation_batch_size} / "
                f"num_generations {args.num_generations}), and there are {problems}; give more prompts, or lower "
                "per_device_train_batch_size or steps_per_generation"
            )
        together = args.generations_per_rollout
        rollouts_per_epoch = -(-batches // together)
        per_rollout = args.updates_per_rollout
        per_epoch = rollouts_per_epoch * per_rollout
        updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        if updates < 1:
            raise ConfigError(f"num_train_epochs is {args.num_train_epochs}: there is nothing to do")
        return cls(batch * together, -(-updates // per_rollout), updates, per_epoch)


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit} for instance"
