"""How much better than its baseline each answer was.

Legend: B prompts, G answers per prompt.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "batch", "none"]
Scale = Literal["group", "batch", "none"]
GROUP_BASELINES: tuple[Baseline, ...] = ("mean", "leave_one_out")


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """A_i = (r_i - baseline) / (std + eps).

    rewards [B*G], group by group, any real dtype; NaN means "not scored": left out of every mean and std, advantage 0.
    -> [B*G], in rewards' unit (no scale) or in standard deviations; float64 if the rewards are, else float32.

    baseline: "mean" of the group (GRPO, arXiv 2402.03300); "leave_one_out", the mean of the group's other answers,
    equal to n/(n-1) * (r - mean) (RLOO, arXiv 2402.14740); "batch", the mean of all rewards; "none", zero.
    scale: the std divided by is the group's, that of all rewards in the batch, or none (Dr. GRPO, arXiv 2503.20783).
    ddof: 1 for the sample std, 0 for the population's. eps: added to the std; rewards' unit.

    Answers whose peers (the group, or the batch for baseline "batch") all have the same reward get exactly 0: decided
    on max == min, never on a rounded std. Arithmetic is float64 inside, so a common offset cancels.

    ValueError: a size that does not divide, a group (or batch) of one, an infinite reward, or a scale without the
    baseline it needs.
    """
    check_advantage_rule(baseline, scale, ddof, eps)
    if rewards.dim() != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"group_advantages: rewards of shape {tuple(rewards.shape)} do not split into groups of {group_size}; "
            "give a flat tensor of B * group_size rewards, group by group"
        )
    if group_size == 1 and baseline in GROUP_BASELINES:
        raise ValueError(
            f'group_advantages: baseline "{baseline}" compares an answer with the others in its group, so group_size '
            'must be at least 2 (it is 1); use baseline "batch" for single answers'
        )
    if len(rewards) == 1 and baseline == "batch":
        raise ValueError('group_advantages: baseline "batch" needs at least 2 rewards; the batch has 1')
    r = rewards.detach().to(torch.float64).view(-1, group_size)  # [B, G]
    if torch.isinf(r).any():
        where = int(torch.isinf(r).flatten().nonzero()[0])
        raise ValueError(f"group_advantages: reward {where} is {r.flatten()[where].item()}; rewards must be finite")
    scored = ~torch.isnan(r)  # [B, G]
    values = r.masked_fill(~scored, 0.0)  # [B, G]

    count = scored.sum(1, keepdim=True, dtype=torch.float64)  # [B, 1]
    group_mean = values.sum(1, keepdim=True) / count.clamp(min=1)  # [B, 1]
    batch_count = scored.sum(dtype=torch.float64)  # []
    batch_mean = values.sum() / batch_count.clamp(min=1)  # []

    if baseline == "none":
        centred = values
    elif baseline == "batch":
        centred = values - batch_mean
    else:
        centred = values - group_mean
        if baseline == "leave_one_out":
            centred = centred * (count / (count - 1).clamp(min=1))

    if scale == "group":
        squares = ((values - group_mean) ** 2).masked_fill(~scored, 0.0).sum(1, keepdim=True)  # [B, 1]
        centred = centred / ((squares / (count - ddof).clamp(min=1)).sqrt() + eps)
    elif scale == "batch":
        total = ((values - batch_mean) ** 2).masked_fill(~scored, 0.0).sum()  # []
        centred = centred / ((total / (batch_count - ddof).clamp(min=1)).sqrt() + eps)

    dropped = ~scored
    if baseline != "none":
        low, high = r.masked_fill(~scored, torch.inf), r.masked_fill(~scored, -torch.inf)  # [B, G]
        peers = (low, high) if baseline in GROUP_BASELINES else (low.view(1, -1), high.view(1, -1))
        same = peers[0].amin(1, keepdim=True) >= peers[1].amax(1, keepdim=True) if len(rewards) else dropped
        dropped = dropped | same
    result = centred.masked_fill(dropped, 0.0).flatten()  # [B*G]
    return result if rewards.dtype == torch.float64 else result.to(torch.float32)


def check_advantage_rule(baseline: str, scale: str, ddof: int, eps: float) -> None:
    """ValueError naming the setting that is not accepted, or the pair that has no meaning."""
    if baseline not in get_args(Baseline):
        raise ValueError(f'baseline is "{baseline}"; it must be one of {", ".join(get_args(Baseline))}')
    if scale not in get_args(Scale):
        raise ValueError(f'scale is "{scale}"; it must be one of {", ".join(get_args(Scale))}')
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; it must be 0 (population std) or 1 (sample std)")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; it must be 0 or a positive number")
    if scale == "group" and baseline not in GROUP_BASELINES:
        raise ValueError(
            f'scale "group" with baseline "{baseline}" would divide by 0 in groups whose rewards are equal; '
            'use baseline "mean" or "leave_one_out", or scale "batch" or "none"'
        )
    if scale == "batch" and baseline == "none":
        raise ValueError('scale "batch" needs a baseline; use baseline "batch", "mean" or "leave_one_out"')
