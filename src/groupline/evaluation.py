"""Held-out problems -> pass@k with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupline.metrics import pass_at_k_curve
from groupline.parallel.mesh import SOLO, World
from groupline.records import Group, SamplingParams
from groupline.rewards import Reward
from groupline.sampling import Sampler
from groupline.training.collect import Prompted, collect


def evaluate(
    engine: Sampler,
    tokenizer: Any,
    problems: Sequence[Prompted],
    rewards: Sequence[Reward],
    params: SamplingParams,
    *,
    samples: int = 8,
    ks: Sequence[int] | None = None,
    seed: int = 0,
    state: Any = None,
    world: World = SOLO,
) -> tuple[dict[str, Any], list[Group]]:
    """(measures, the groups they come from). Changes nothing that training uses: draws have keys of their own.

    The same problems and seed give paired results before and after training. ks: by default the powers of two up to
    `samples`. An answer is right if the first reward function gives it 1 or more. state: what reward functions receive
    as `trainer_state`; what they log as metrics is under `logged`. world: the problems are dealt over its ranks.
    """
    logged: dict[str, float] = {}
    groups, seconds = collect(
        problems,
        engine,
        tokenizer,
        rewards,
        samples,
        params,
        seed=seed,
        label="held-out",
        state=state,
        log=logged.update,
        world=world,
    )
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples] if ks is None else ks
    measured = summarise_held_out(groups, rewards[0].name, ks) | {"seconds": seconds}
    return measured | ({"logged": logged} if logged else {}), groups


def summarise_held_out(groups: Sequence[Group], judge: str, ks: Sequence[int]) -> dict[str, Any]:
    """pass@k for each k with Wilson and bootstrap 95% intervals over problems, reward, length and share truncated."""
    right = [sum(is_right(r.rewards.get(judge)) for r in g.rollouts) for g in groups]
    n = len(groups[0].rollouts)
    rollouts = [r for g in groups for r in g.rollouts]
    scored = [r.reward for r in rollouts if r.reward is not None]
    out: dict[str, Any] = {"judge": judge, "policy_version": rollouts[0].completion.policy_version}
    out |= pass_at_k_curve(right, n, ks)
    out["reward"] = sum(scored) / len(scored) if scored else None
    for name in rollouts[0].rewards:
        own = [v for r in rollouts if (v := r.rewards[name]) is not None]
        out[f"rewards/{name}"] = sum(own) / len(own) if own else None
    out["completion_length"] = sum(len(r.completion.ids) for r in rollouts) / len(rollouts)
    out["truncated"] = sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts)
    out["right_per_problem"] = {g.problem.id: c for g, c in zip(groups, right, strict=True)}
    return out


def is_right(value: float | None) -> bool:
    return value is not None and value >= 1
