"""What a step's groups say, under TRL's metric names where TRL has them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from groupline.evaluation import is_right
from groupline.records import Group


def summarise(groups: Sequence[Group], judge: str) -> dict[str, float]:
    """Means over all answers (never means of means). judge: the reward whose 1.0 counts as right."""
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [len(r.completion.ids) for r in rollouts]
    ended = [len(r.completion.ids) for r in rollouts if r.completion.finish_reason == "stop"]
    right = [[is_right(r.rewards.get(judge)) for r in g.rollouts] for g in groups]
    out = {
        "reward": _mean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "frac_reward_zero_std": sum(not g.has_signal for g in groups) / len(groups),
        "frac_groups_with_signal": sum(g.has_signal for g in groups) / len(groups),
        "accuracy": sum(map(sum, right)) / len(rollouts),
        "groups/all_right": sum(map(all, right)) / len(groups),
        "groups/all_wrong": sum(not any(g) for g in right) / len(groups),
        "groups/mixed": sum(any(g) and not all(g) for g in right) / len(groups),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": float(min(ended, default=0)),
        "completions/max_terminated_length": float(max(ended, default=0)),
        "completions/clipped_ratio": 1 - len(ended) / len(rollouts),
        "completions/repetition": _mean([float(repeats(r.completion.ids)) for r in rollouts]),
        "num_completion_tokens": float(sum(lengths)),
        "num_prompt_tokens": float(sum(len(g.rollouts[0].completion.prompt_ids) for g in groups)),
        "rewards_not_applicable": float(len(rollouts) - len(rewards)),
    }
    for name in rollouts[0].rewards:
        values = [v for r in rollouts if (v := r.rewards[name]) is not None]
        out[f"rewards/{name}/mean"] = _mean(values)
        out[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return out


def repeats(ids: Sequence[int], n: int = 4, least: int = 32) -> bool:
    """Whether more than half of an answer's n-grams stood in it before; answers under `least` tokens are not judged."""
    if len(ids) < least:
        return False
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) < len(grams) / 2


def with_logged(metrics: Mapping[str, Any], logged: Mapping[str, float]) -> dict[str, Any]:
    """The metrics and what reward functions logged, which goes under `log_metric/` where its name is taken."""
    return {**metrics, **{f"log_metric/{name}" if name in metrics else name: v for name, v in logged.items()}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
