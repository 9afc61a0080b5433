"""What a training step is made of beside sampling: GRPO's own part, and the places where another method has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupline.batch import Batch, make_batch, rewards_tensor
from groupline.models.memory import Weights, weights_of
from groupline.objective import Objective, add_kl_to_reward, answer_kl
from groupline.parallel.mesh import SOLO, World
from groupline.records import Group
from groupline.training.checkpoint import Checkpoint
from groupline.training.correction import correction_facts, correction_of
from groupline.training.setup import Setup
from groupline.training.step import fill_old, fill_reference, train_step


class Method:
    """GRPO and its rows: advantages from the groups' rewards, one model that trains. A subclass changes what it needs."""

    def plan(self) -> str:
        """Lines added to the plan, each with its newline before it."""
        return ""

    def words(self, metrics: Mapping[str, Any]) -> str:
        """Added to a step's line."""
        return ""

    def scored(self, setup: Setup, groups: list[Group]) -> list[Group]:
        """The groups with what this method's own judges say of them."""
        return groups

    def batch(self, setup: Setup, groups: Sequence[Group], step: int) -> tuple[Batch, dict[str, float]]:
        """The rollout as the optimiser sees it, with reference and old log-probs, and facts about it."""
        objective, facts = setup.objective, {}
        if setup.reference is not None and objective.kl_place == "reward":
            # Every answer is scored here, masked ones too: each one's reward takes part in its group's baseline.
            whole = build(setup, groups, step, objective.replace(mask_truncated=False), skip_idle=False)
            fill_reference(whole.micro_batches, setup.reference, setup.scorer)
            rewards, penalty = kl_penalised(whole, rewards_tensor(groups), objective, setup.world)
            facts["kl"] = float(penalty.sum()) / int(whole.lengths.sum())
            batch = build(setup, groups, step, objective, rewards)
        else:
            batch = build(setup, groups, step, objective)
            if setup.reference is not None:
                fill_reference(batch.micro_batches, setup.reference, setup.scorer)
        set_old(setup, batch)
        return batch, facts

    def update(self, setup: Setup, part: Batch) -> dict[str, float]:
        """One optimiser step."""
        comparable = not setup.sampling.filters
        facts = train_step(
            setup.policy, setup.optimiser, part, setup.objective, setup.scorer, comparable=comparable, world=setup.world
        )
        return facts | correction_facts(part.micro_batches, correction_of(setup.config), setup.world)

    def models(self, setup: Setup) -> dict[str, Weights]:
        """Every model that training holds in memory, each weight counted under the first that has it."""
        named: dict[str, nn.Module | Mapping[str, Tensor]] = {"policy": setup.policy}
        if setup.reference is not None:
            named["reference"] = setup.reference.state()
        return weights_of(named)

    def save(self, setup: Setup, folder: Path) -> None:
        """Write into the run's folder what was trained beside the policy."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps beside the policy's weights: file name -> tensors."""
        return {}

    def torch_state(self) -> dict[str, Any]:
        """Likewise, of plain containers and tensors."""
        return {}

    def load(self, found: Checkpoint) -> None:
        """Take over what `tensors` and `torch_state` gave."""


def build(
    setup: Setup,
    groups: Sequence[Group],
    step: int,
    objective: Objective,
    rewards: Tensor | None = None,
    skip_idle: bool = True,
) -> Batch:
    """`make_batch` with the run's settings."""
    config = setup.config
    return make_batch(
        groups,
        objective,
        budget=config.max_completion_length,
        micro_batch_tokens=config.micro_batch_tokens,
        device=setup.precision.device,
        rewards=rewards,
        skip_idle=skip_idle,
        parts=config.updates_per_pass,
        seed=f"{config.seed}/{step}",
        rank=setup.world.rank,
        ranks=setup.world.size,
        in_step=setup.world.sharded,
    )


def set_old(setup: Setup, batch: Batch) -> None:
    """The ratio's denominators, unless the first pass may keep its own."""
    config = setup.config
    for micro in batch.micro_batches:
        micro.correction = correction_of(config)
    if config.old_logprobs == "sampler":
        for micro in batch.micro_batches:
            micro.old_logp = micro.sampler_logp
    elif config.lora_dropout > 0 or batch.parts > 1:  # a later part's first pass is no longer that of these weights
        fill_old(batch.micro_batches, setup.policy, setup.scorer)


def kl_penalised(whole: Batch, rewards: Tensor, objective: Objective, world: World = SOLO) -> tuple[Tensor, Tensor]:
    """(rewards [S] less beta times each answer's KL, those KLs [S] in nats), from the sampler's log-probs.

    whole: a batch that holds every answer, its reference log-probs filled; of several ranks, this one's share of it.
    """
    penalty = torch.zeros_like(rewards)
    for micro in whole.micro_batches:
        assert micro.ref_logp is not None
        if not micro.answers:
            continue
        place = torch.tensor(micro.answers)[micro.row.sequence.cpu()]
        penalty += answer_kl(micro.sampler_logp.cpu(), micro.ref_logp.cpu(), place, len(rewards), objective.kl)
    world.sum_([penalty], "KL penalties")
    return add_kl_to_reward(rewards, penalty, objective.beta), penalty
