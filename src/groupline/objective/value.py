"""What PPO adds to the policy's loss: rewards token by token, advantages from a value function, and that one's loss.

Legend: N trained tokens, answer by answer in the order they were written; S answers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WHITEN_EPS = 1e-8  # added to the variance, in its unit


def token_rewards(scores: Tensor, kl: Tensor | None, sequence: Tensor, beta: float) -> Tensor:
    """r_t = -beta * kl_t at every token, and the answer's score on top at its last (arXiv 1909.08593, 2203.02155).

    scores [S]; kl [N], nats: log pi_old - log pi_ref of each token drawn (`kl.k1`), None for no penalty; sequence [N]
    -> [N], float64, detached. An answer without tokens keeps its score to itself.
    """
    rewards = torch.zeros(len(sequence), dtype=torch.float64, device=scores.device)
    if kl is not None:
        rewards -= beta * kl.detach().double()
    last = _lengths(sequence, len(scores)).cumsum(0) - 1  # [S]
    some = _lengths(sequence, len(scores)) > 0
    rewards[last[some]] += scores.detach().double()[some]
    return rewards


def gae(
    rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over answers of different lengths: (advantages, returns).

        delta_t = r_t + gamma * V_{t+1} - V_t,        V behind the last token being 0
        A_t     = delta_t + gamma * lam * A_{t+1}  =  sum over l of (gamma * lam)^l * delta_{t+l}
        R_t     = A_t + V_t

    rewards, values [N]: V_t is the value of the state that token t was drawn from, that is before it. sequence [N]:
    each token's answer, never falling. -> [N], [N] in the rewards' unit, detached; float64 if the rewards are, else
    float32. lam 1 gives the discounted reward to go less V_t, lam 0 the one-step error delta_t.
    ValueError: shapes that differ, gamma or lam outside 0..1, or a sequence that falls.
    """
    for name, x in (("gamma", gamma), ("lam", lam)):
        if not 0 <= x <= 1:
            raise ValueError(f"gae: {name} is {x}; it must be in 0..1")
    if not rewards.shape == values.shape == sequence.shape or rewards.dim() != 1:
        raise ValueError(
            f"gae: rewards have shape {tuple(rewards.shape)}, values {tuple(values.shape)}, sequence "
            f"{tuple(sequence.shape)}; each must be flat, one entry per token"
        )
    lengths = _lengths(sequence, int(sequence[-1]) + 1 if len(sequence) else 0)  # [S]
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(sequence), device=sequence.device) - starts[sequence]  # [N] of the token in its answer
    width = int(lengths.max()) if len(lengths) else 0

    def padded(x: Tensor) -> Tensor:
        out = torch.zeros(len(lengths), width + 1, dtype=torch.float64, device=x.device)
        out[sequence, place] = x.detach().double()
        return out

    r, v = padded(rewards), padded(values)  # [S, T + 1]: the column behind an answer's end is 0
    advantages = torch.zeros_like(v)
    for t in range(width - 1, -1, -1):  # behind an answer's end everything is 0 and stays so
        advantages[:, t] = r[:, t] + gamma * v[:, t + 1] - v[:, t] + gamma * lam * advantages[:, t + 1]
    flat = advantages[sequence, place]  # [N]
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return flat.to(dtype), (flat + values.detach().double()).to(dtype)


def whiten(x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of an optimiser step, the sample variance (ddof 1) taken.

    x [N]; mask [N]: tokens that count, all by default; the others come back as 0. shift_mean: False adds the mean
    again, so that only the scale changes. -> [N], detached, float64 if x is, else float32. Fewer than two tokens have
    no variance and come back as they are.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.detach().double()
    counted = torch.ones_like(wide, dtype=torch.bool) if mask is None else mask.bool()
    own = wide[counted]
    if len(own) >= 2:
        mean = own.mean()
        own = (own - mean) * torch.rsqrt(own.var(correction=1) + WHITEN_EPS) + (0.0 if shift_mean else mean)
    out = torch.zeros_like(wide)
    out[counted] = own
    return out.to(dtype)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.2) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per token, and which tokens the clip stops.

    values [N], differentiable; old_values, returns [N] -> loss [N], fp32 or better, and bool [N]. The clip is that of
    the code of arXiv 1707.06347 (openai/baselines, ppo2); None leaves it out. As there, a token counts as clipped where
    the clipped error is the larger one, which is where its gradient is 0.
    ValueError: shapes that differ, or a clip that is not positive.
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"value_loss: values have shape {tuple(values.shape)}, old_values {tuple(old_values.shape)}, returns "
            f"{tuple(returns.shape)}; one entry per token each"
        )
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"value_loss: clip is {clip}; it must be positive, or None for no clip")
    v = values if values.dtype == torch.float64 else values.float()
    old, target = old_values.detach().to(v.dtype), returns.detach().to(v.dtype)
    plain = (v - target).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (torch.clamp(v, old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(plain, clipped), clipped.detach() > plain.detach()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for values that tell the returns, 0 for a constant, below 0 for worse than that.

    values, returns [N]. NaN where the returns do not vary, as nothing can be explained then.
    """
    r, v = returns.detach().double(), values.detach().double()
    if not len(r) or float(r.max()) == float(r.min()):
        return math.nan
    return float(1 - (r - v).var(correction=0) / r.var(correction=0))


def _lengths(sequence: Tensor, answers: int) -> Tensor:
    """Tokens of each answer [S]."""
    if len(sequence) > 1 and bool((sequence[1:] < sequence[:-1]).any()):
        raise ValueError("tokens must stand answer by answer: the answers' numbers in `sequence` may not fall")
    return torch.bincount(sequence, minlength=answers)
