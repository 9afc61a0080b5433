"""groupline: group-relative policy optimisation on rewards that code can check.

The public names, sorted. Each is imported on first use, so `import groupline` alone loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BNPO": "groupline.objective",
    "CISPO": "groupline.objective",
    "Completion": "groupline.records",
    "Config": "groupline.config",
    "ConfigError": "groupline.settings",
    "DAPO": "groupline.objective",
    "DR_GRPO": "groupline.objective",
    "DpoConfig": "groupline.training.dpo",
    "Engine": "groupline.sampling",
    "GRPO": "groupline.objective",
    "GRPOConfig": "groupline.trl",
    "GRPOTrainer": "groupline.trl",
    "GSPO": "groupline.objective",
    "Group": "groupline.records",
    "OBJECTIVES": "groupline.objective",
    "Objective": "groupline.objective",
    "Pair": "groupline.records",
    "PpoConfig": "groupline.training.ppo",
    "Problem": "groupline.records",
    "REINFORCE": "groupline.objective",
    "RLOO": "groupline.objective",
    "Reward": "groupline.rewards",
    "RewardError": "groupline.rewards",
    "RewardModelConfig": "groupline.training.reward_model",
    "Rollout": "groupline.records",
    "Sampler": "groupline.sampling",
    "SamplerError": "groupline.sampling",
    "SamplingParams": "groupline.records",
    "SftConfig": "groupline.training.sft",
    "Sink": "groupline.training.sinks",
    "VllmOptions": "groupline.sampling.vllm_options",
    "VllmSampler": "groupline.sampling.vllm",
    "bootstrap_interval": "groupline.metrics",
    "compare_ability": "groupline.ability",
    "dpo": "groupline.training.dpo",
    "evaluate": "groupline.evaluation",
    "get_objective": "groupline.objective",
    "group_advantages": "groupline.objective",
    "kl": "groupline.objective",
    "load_reward_model": "groupline.models.reward_head",
    "load_value_model": "groupline.models.value",
    "maj_at_k": "groupline.metrics",
    "pass_at_k": "groupline.metrics",
    "policy_loss": "groupline.objective",
    "ppo": "groupline.training.ppo",
    "read_pairs": "groupline.tasks",
    "read_problems": "groupline.tasks",
    "reward_model": "groupline.training.reward_model",
    "rewards": "groupline",
    "sft": "groupline.training.sft",
    "token_weights": "groupline.objective",
    "train": "groupline.training.grpo",
    "wilson_interval": "groupline.metrics",
}
_MODULES = {"kl": "groupline.objective.kl", "rewards": "groupline.rewards"}

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "DR_GRPO",
    "GRPO",
    "GSPO",
    "OBJECTIVES",
    "REINFORCE",
    "RLOO",
    "Completion",
    "Config",
    "ConfigError",
    "DpoConfig",
    "Engine",
    "GRPOConfig",
    "GRPOTrainer",
    "Group",
    "Objective",
    "Pair",
    "PpoConfig",
    "Problem",
    "Reward",
    "RewardError",
    "RewardModelConfig",
    "Rollout",
    "Sampler",
    "SamplerError",
    "SamplingParams",
    "SftConfig",
    "Sink",
    "VllmOptions",
    "VllmSampler",
    "__version__",
    "bootstrap_interval",
    "compare_ability",
    "dpo",
    "evaluate",
    "get_objective",
    "group_advantages",
    "kl",
    "load_reward_model",
    "load_value_model",
    "maj_at_k",
    "pass_at_k",
    "policy_loss",
    "ppo",
    "read_pairs",
    "read_problems",
    "reward_model",
    "rewards",
    "sft",
    "token_weights",
    "train",
    "wilson_interval",
]

if TYPE_CHECKING:
    from groupline import rewards
    from groupline.ability import compare_ability
    from groupline.config import Config, ConfigError
    from groupline.evaluation import evaluate
    from groupline.metrics import bootstrap_interval, maj_at_k, pass_at_k, wilson_interval
    from groupline.models.reward_head import load_reward_model
    from groupline.models.value import load_value_model
    from groupline.objective import (
        BNPO,
        CISPO,
        DAPO,
        DR_GRPO,
        GRPO,
        GSPO,
        OBJECTIVES,
        REINFORCE,
        RLOO,
        Objective,
        get_objective,
        group_advantages,
        kl,
        policy_loss,
        token_weights,
    )
    from groupline.records import Completion, Group, Pair, Problem, Rollout, SamplingParams
    from groupline.rewards import Reward, RewardError
    from groupline.sampling import Engine, Sampler, SamplerError
    from groupline.sampling.vllm import VllmSampler
    from groupline.sampling.vllm_options import VllmOptions
    from groupline.tasks import read_pairs, read_problems
    from groupline.training.dpo import DpoConfig, dpo
    from groupline.training.grpo import train
    from groupline.training.ppo import PpoConfig, ppo
    from groupline.training.reward_model import RewardModelConfig, reward_model
    from groupline.training.sft import SftConfig, sft
    from groupline.training.sinks import Sink
    from groupline.trl import GRPOConfig, GRPOTrainer


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groupline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
