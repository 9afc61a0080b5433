"""The objective: tensors in, tensors out. Knows no config, model, device or logger."""

from groupline.objective.advantages import group_advantages
from groupline.objective.kl import add_kl_to_reward, answer_kl, k1, k2, k3, kl_estimate
from groupline.objective.policy import PolicyFacts, clipped_tokens, policy_loss
from groupline.objective.preference import PreferenceFacts, bradley_terry_loss, dpo_loss
from groupline.objective.presets import (
    BNPO,
    CISPO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    OBJECTIVES,
    PPO,
    REINFORCE,
    RLOO,
    Objective,
    get_objective,
)
from groupline.objective.ratios import (
    LOG_RATIO_BOUND,
    Correction,
    effective_share,
    sequence_product_ratio,
    sequence_ratio,
    sequence_sum,
    token_ratio,
    truncated_importance_weights,
)
from groupline.objective.supervised import supervised_loss
from groupline.objective.value import explained_variance, gae, token_rewards, value_loss, whiten
from groupline.objective.weights import step_totals, token_weights

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "DR_GRPO",
    "GRPO",
    "GSPO",
    "LOG_RATIO_BOUND",
    "OBJECTIVES",
    "PPO",
    "REINFORCE",
    "RLOO",
    "Correction",
    "Objective",
    "PolicyFacts",
    "PreferenceFacts",
    "add_kl_to_reward",
    "answer_kl",
    "bradley_terry_loss",
    "clipped_tokens",
    "dpo_loss",
    "effective_share",
    "explained_variance",
    "gae",
    "get_objective",
    "group_advantages",
    "k1",
    "k2",
    "k3",
    "kl_estimate",
    "policy_loss",
    "sequence_product_ratio",
    "sequence_ratio",
    "sequence_sum",
    "step_totals",
    "supervised_loss",
    "token_ratio",
    "token_rewards",
    "token_weights",
    "truncated_importance_weights",
    "value_loss",
    "whiten",
]
