"""Groups -> Batch: advantages and token weights are attached here, once, over the whole optimiser step.

Legend: S answers of the step, s answers of a micro-batch, M scored tokens of a micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from groupline.models.memory import free_memory
from groupline.models.packing import PackedRow, causal_lm, pack
from groupline.objective import Correction, Objective, group_advantages, token_weights
from groupline.parallel.deal import share_out
from groupline.records import Completion, Group

# Row tokens of a micro-batch: products are slower below the first and no faster above the second (above MOST_ON_CPU on
# CPU, where caches are small); the last is for models whose configuration does not tell their size.
FEWEST, MOST, MOST_ON_CPU, UNKNOWN = 512, 16384, 4096, 4096


@dataclass
class MicroBatch:
    """One packed row and what its tokens are trained with.

    old_logp and ref_logp [M] are filled by the trainer: by the first pass (or the sampler), and by the reference pass.
    importance [M], if any, multiplies the policy term and not the KL; correction: how another engine's tokens are
    weighed. old_values and returns [M] are PPO's.
    answers: places of the row's answers in the step, group by group; none in a row that only keeps a rank in step with
    the others. part: number of the update that it belongs to.
    logp, entropy [M]: as the last training pass found them, for the log.
    """

    row: PackedRow
    answers: list[int]
    advantages: Tensor  # [M]
    weights: Tensor  # [M]
    sampler_logp: Tensor  # [M]
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    importance: Tensor | None = None
    correction: Correction | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    part: int = 0
    logp: Tensor | None = None
    entropy: Tensor | None = None


@dataclass
class Batch:
    """One rollout as the optimiser sees it. Every loss is (weights * per_token).sum() over all micro-batches.

    advantages [S] and lengths [S] (trained tokens, 0 for an answer masked out) are those of every answer; answers that
    carry no gradient are in no micro-batch (`skipped` of them) and still count in the weights' denominators. Of several
    ranks each has its own micro-batches; `total` and `row_tokens` count those of all.
    """

    micro_batches: list[MicroBatch]
    advantages: Tensor
    lengths: Tensor
    skipped: int
    parts: int = 1
    total: int = 0
    row_tokens: int = 0

    def updates(self) -> Iterator[Batch]:
        """This batch as one pass trains on it: what each optimiser step takes, in order."""
        for part in range(self.parts):
            yield replace(self, micro_batches=[m for m in self.micro_batches if m.part == part])


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
    parts: int = 1,
    seed: int | str = 0,
    rank: int = 0,
    ranks: int = 1,
    in_step: bool = False,
) -> Batch:
    """Advantages, weights and packed micro-batches of one step.

    budget: most tokens of an answer (`per_budget`'s constant). micro_batch_tokens: most row tokens of a micro-batch; a
    larger group is split by answers, its prompt repeated. rewards [S]: in place of the groups' own (a KL penalty taken
    off). skip_idle: leave answers with exactly no gradient out of the micro-batches. parts: optimiser steps that a pass
    is cut into: the answers are shuffled by the seed and shared out evenly, whatever their group. Weights are counted
    over the whole rollout, times `parts`, so every update divides by an average part and none by what fell into it.
    rank, ranks: of several processes that all hold these groups, the one whose share of the micro-batches is made; all
    are weighed alike, and each rank has about as many row tokens. in_step: fill up with rows of no weight, so that every
    rank has as many micro-batches.
    Raises ValueError if groups differ in size, if parts does not divide the answers, or if a sampler's log-prob is not
    finite, naming the first.
    """
    size = len(groups[0].rollouts)
    for g in groups:
        if len(g.rollouts) != size:
            raise ValueError(f"make_batch: group {g.problem.id!r} has {len(g.rollouts)} answers, the first has {size}")
        for i, r in enumerate(g.rollouts):
            for at, x in enumerate(r.completion.logprobs):
                if x is None or not math.isfinite(x):  # an engine may have given none
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
    weights = parts * token_weights(
        lengths, objective.token_weight, budget=budget, count_masked=objective.count_masked, dtype=torch.float64
    )
    skip_idle &= objective.top_entropy == 1  # the threshold is a quantile over every trained token
    idle = advantages == 0 if skip_idle and _kl_free(objective) else torch.zeros(len(completions), dtype=torch.bool)
    used = ((lengths > 0) & ~idle).tolist()
    part_of = _share_out(len(used), parts, seed)
    prompts, own = [len(g.rollouts[0].completion.prompt_ids) for g in groups], [len(c.ids) - 1 for c in completions]
    micro: list[MicroBatch] = []
    total = row_tokens = 0
    for part in range(parts):
        alive = [
            [i for i in range(b * size, (b + 1) * size) if used[i] and part_of[i] == part] for b in range(len(groups))
        ]
        bins = share_out(alive, prompts, own, micro_batch_tokens, ranks)
        rows = [_micro_batch(answers, completions, size, advantages, weights, device) for answers, _ in bins[rank]]
        if in_step:
            rows += [_weightless(device) for _ in range(max(map(len, bins)) - len(rows))]
        for row in rows:
            row.part = part
        micro += rows
        total += sum(map(len, bins))
        row_tokens += sum(n for rows in bins for _, n in rows)
    skipped = len(used) - sum(used)
    return Batch(micro, advantages, lengths, skipped, parts=parts, total=total, row_tokens=row_tokens)


def _weightless(device: torch.device | str) -> MicroBatch:
    zero = torch.zeros(1, device=device)
    return MicroBatch(pack([[0]], [[[0]]], device), [], zero, zero, zero)


def _share_out(answers: int, parts: int, seed: int | str) -> list[int]:
    """The part that each answer belongs to."""
    if answers % parts:
        raise ValueError(f"make_batch: {answers} answers cannot be shared out evenly over {parts} updates a pass")
    order = list(range(answers))
    if parts > 1:
        random.Random(f"parts/{seed}").shuffle(order)
    found = [0] * answers
    for place, i in enumerate(order):
        found[i] = place * parts // answers
    return found


def _kl_free(objective: Objective) -> bool:
    """Whether an answer's gradient is its advantage times something, so that advantage 0 means no gradient."""
    return objective.beta == 0 or objective.kl_place == "reward"


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


def automatic_tokens(
    model: nn.Module,
    device: torch.device,
    compute: torch.dtype,
    *,
    group: int = 0,
    padding: float = 1.0,
    free: int | None = None,
) -> tuple[int, str]:
    """(row tokens of a micro-batch, why so many) for a model that has not been trained on `device` yet.

    compute: number format of the forward passes. group: row tokens of a whole group, see `choose_tokens`. padding:
    tokens computed for each row token, where the model runs on padded rows. free: bytes that the device can give once
    the model is on it; by default what it can give now.
    """
    per_token = activation_bytes(getattr(causal_lm(model), "config", None), compute.itemsize)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    free = free_memory(device) if free is None else free
    free = max(0, free - 3 * trained)  # a gradient and two moments a weight are still to come
    if device.type == "cuda":
        # Half of what is free, and no more for the sake of a group: memory ends hard here.
        budget, group, most = free // 2, 0, MOST
    else:
        budget, most = min(3 << 29, free // 4), MOST_ON_CPU
    return choose_tokens(None if per_token is None else math.ceil(per_token * padding), budget, group, most)


def choose_tokens(per_token: int | None, budget: int, group: int = 0, most: int = MOST) -> tuple[int, str]:
    """(row tokens of a micro-batch, why so many).

    per_token, budget: bytes of activations, of one token (None: unknown) and in all. group: row tokens of a whole
    group, which is not cut if twice the tokens hold it: every piece would compute the prompt again.
    """
    if per_token is None:
        return UNKNOWN, "the model's configuration does not tell its size"
    fit = budget // per_token
    tokens = min(max(fit, FEWEST), most)
    why = f"{budget / 2**30:.2f} GiB of activations at {per_token / 2**20:.3g} MiB a token"
    if tokens != fit:
        why += f", at {'least' if tokens > fit else 'most'} {tokens:,}"
    whole = max(tokens, min(2 * tokens, group))
    return whole, why if whole == tokens else f"{why}; raised for a group of {group:,}"


def activation_bytes(config: Any, element: int) -> int | None:
    """Bytes that one row token takes at the peak of forward and backward, or None if `config` does not tell.

    element: bytes of a number in the forward passes. Layers x (16 attention widths + 8 feed-forward widths), fitted to
    the growth of the resident set with the row (docs/design/packing.md). The former are counted in fp32 whatever the
    format: autocast keeps residuals and norms in it.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, hidden, inner = (
        getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(inner, int)):
        return None
    heads = (getattr(config, "num_attention_heads", None) or 0) * (getattr(config, "head_dim", None) or 0)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = max(inner, experts * (getattr(config, "moe_intermediate_size", None) or inner))
    return layers * (16 * 4 * max(hidden, heads) + 8 * element * inner)
