"""Groups -> Batch: advantages and token weights are attached here, once, over the whole optimiser step.

Legend: S answers of the step, s answers of a micro-batch, M scored tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupline.models.packing import PackedRow, pack
from groupline.objective import Objective, group_advantages, token_weights
from groupline.records import Completion, Group


@dataclass
class MicroBatch:
    """One packed row and what its tokens are trained with.

    old_logp and ref_logp [M] are filled by the trainer: by the first pass (or the sampler), and by the reference pass.
    answers: places of the row's answers in the step, group by group.
    """

    row: PackedRow
    answers: list[int]
    advantages: Tensor  # [M]
    weights: Tensor  # [M]
    sampler_logp: Tensor  # [M]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None


@dataclass
class Batch:
    """One rollout as the optimiser sees it. Every loss is (weights * per_token).sum() over all micro-batches.

    advantages [S] and lengths [S] (trained tokens, 0 for an answer masked out) are those of every answer; answers that
    carry no gradient are in no micro-batch (`skipped` of them) and still count in the weights' denominators.
    """

    micro_batches: list[MicroBatch]
    advantages: Tensor
    lengths: Tensor
    skipped: int
    row_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_tokens = sum(len(m.row.input_ids) for m in self.micro_batches)


def rewards_tensor(groups: Sequence[Group]) -> Tensor:
    """[S] in fp64, group by group; NaN where no reward applies."""
    flat = [r.reward for g in groups for r in g.rollouts]
    return torch.tensor([float("nan") if r is None else r for r in flat], dtype=torch.float64)


def make_batch(
    groups: Sequence[Group],
    objective: Objective,
    *,
    budget: int,
    micro_batch_tokens: int,
    device: torch.device | str = "cpu",
    rewards: Tensor | None = None,
    skip_idle: bool = True,
) -> Batch:
    """Advantages, weights and packed micro-batches of one step.

    budget: most tokens of an answer (`per_budget`'s constant). micro_batch_tokens: most row tokens of a micro-batch; a
    larger group is split by answers, its prompt repeated. rewards [S]: in place of the groups' own (a KL penalty taken
    off). skip_idle: leave answers with exactly no gradient out of the micro-batches.
    Raises ValueError if groups differ in size, or if a sampler's log-prob is not finite, naming the first.
    """
    size = len(groups[0].rollouts)
    for g in groups:
        if len(g.rollouts) != size:
            raise ValueError(f"make_batch: group {g.problem.id!r} has {len(g.rollouts)} answers, the first has {size}")
        for i, r in enumerate(g.rollouts):
            for at, x in enumerate(r.completion.logprobs):
                if not math.isfinite(x):
                    raise ValueError(f"make_batch: group {g.problem.id!r}, answer {i}, token {at} has log-prob {x}")
    completions = [r.completion for g in groups for r in g.rollouts]
    advantages = group_advantages(
        rewards_tensor(groups) if rewards is None else rewards,
        size,
        scale=objective.scale,
        baseline=objective.baseline,
        ddof=objective.ddof,
        eps=objective.eps,
    )
    masked = [objective.mask_truncated and c.finish_reason == "length" for c in completions]
    lengths = torch.tensor([0 if out else len(c.ids) for c, out in zip(completions, masked, strict=True)])
    weights = token_weights(lengths, objective.token_weight, budget=budget, dtype=torch.float64)
    idle = advantages == 0 if skip_idle and _kl_free(objective) else torch.zeros(len(completions), dtype=torch.bool)
    used = ((lengths > 0) & ~idle).tolist()
    items: list[tuple[list[int], int]] = []
    for b in range(len(groups)):
        alive = [i for i in range(b * size, (b + 1) * size) if used[i]]
        items += _split(alive, completions, micro_batch_tokens)
    micro = [
        _micro_batch(answers, completions, size, advantages, weights, device)
        for answers in _bins(items, micro_batch_tokens)
    ]
    return Batch(micro, advantages, lengths, skipped=len(used) - sum(used))


def _kl_free(objective: Objective) -> bool:
    """Whether an answer's gradient is its advantage times something, so that advantage 0 means no gradient."""
    return objective.beta == 0 or objective.kl_place == "reward"


def _split(alive: list[int], completions: Sequence[Completion], tokens: int) -> list[tuple[list[int], int]]:
    """(answers of one group, row tokens), in pieces of at most `tokens` (or one answer, if that alone is more)."""
    pieces: list[tuple[list[int], int]] = []
    for i in alive:
        prompt, own = len(completions[i].prompt_ids), len(completions[i].ids) - 1
        if pieces and pieces[-1][1] + own <= tokens:
            pieces[-1] = ([*pieces[-1][0], i], pieces[-1][1] + own)
        else:
            pieces.append(([i], prompt + own))
    return pieces


def _bins(items: list[tuple[list[int], int]], tokens: int) -> list[list[int]]:
    """First-fit decreasing: pieces of like size end up together, so little is padded inside attention."""
    bins: list[tuple[list[int], int]] = []
    for answers, size in sorted(items, key=lambda item: -item[1]):
        for k, (held, total) in enumerate(bins):
            if total + size <= tokens:
                bins[k] = ([*held, *answers], total + size)
                break
        else:
            bins.append((answers, size))
    return [answers for answers, _ in bins]


def _micro_batch(
    answers: list[int],
    completions: Sequence[Completion],
    size: int,
    advantages: Tensor,
    weights: Tensor,
    device: torch.device | str,
) -> MicroBatch:
    prompts: list[tuple[int, ...]] = []
    own: list[list[tuple[int, ...]]] = []
    previous = -1
    for i in answers:
        if i // size != previous:
            previous = i // size
            prompts.append(completions[i].prompt_ids)
            own.append([])
        own[-1].append(completions[i].ids)
    row = pack(prompts, own, device)
    place = torch.tensor(answers)[row.sequence.cpu()]  # [M] each token's answer in the step
    sampled = [x for i in answers for x in completions[i].logprobs]
    return MicroBatch(
        row,
        answers,
        advantages[place].float().to(device),
        weights[place].float().to(device),
        torch.tensor(sampled, dtype=torch.float32, device=device),
    )
