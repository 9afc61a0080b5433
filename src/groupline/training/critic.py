"""PPO's value model in a run: values before the update, advantages and returns from them, and its own update.

Legend: S answers of the step, M scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from groupline.batch import Batch, MicroBatch
from groupline.models.packing import eval_mode
from groupline.models.value import ValueModel
from groupline.objective import explained_variance, gae, kl_estimate, token_rewards, value_loss, whiten
from groupline.training.optim import NonFinite, Optimiser


@dataclass
class Critic:
    """The value model with its optimiser. clip, coef: of its loss, see `value_loss`."""

    model: ValueModel
    optimiser: Optimiser
    clip: float | None = 0.2
    coef: float = 1.0

    @torch.no_grad()
    def fill(self, micro_batches: Iterable[MicroBatch]) -> None:
        """old_values of every micro-batch, once a rollout, without dropout."""
        with eval_mode(self.model):
            for micro in micro_batches:
                micro.old_values = self.model(micro.row)

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimiser step on coef * (weights * value_loss).sum(); its facts, means over the trained tokens.

        Raises NonFinite if the loss is not finite; the value model has not changed then.
        """
        total, tokens, clipped = 0.0, 0, 0
        for micro in batch.micro_batches:
            assert micro.old_values is not None
            assert micro.returns is not None
            per_token, at_clip = value_loss(self.model(micro.row), micro.old_values, micro.returns, self.clip)
            loss = self.coef * (micro.weights * per_token).sum()
            if not bool(torch.isfinite(loss)):
                self.optimiser.adam.zero_grad(set_to_none=True)
                raise NonFinite(f"the value model's loss is not finite in answers {micro.answers[:8]} of the step")
            self.optimiser.backward(loss)
            counted = micro.weights > 0
            total += float(per_token.detach()[counted].sum())
            tokens += int(counted.sum())
            clipped += int((at_clip & counted).sum())
        own = self.optimiser.step()
        return {
            "value/loss": total / max(1, tokens),
            "value/clip_ratio": clipped / max(1, tokens),
            "value/grad_norm": own["grad_norm"],
            "value/learning_rate": own["learning_rate"],
            "value/skipped_steps": own["skipped_steps"],
        }


def estimate(
    batch: Batch,
    scores: Tensor,
    *,
    beta: float,
    gamma: float,
    lam: float,
    whiten_rewards: bool = False,
    whiten_advantages: bool = True,
) -> dict[str, float]:
    """Advantages, per token, and returns of every micro-batch, from its reference log-probs and old values; facts.

    scores [S]: NaN where no reward applies: such an answer is not trained on, its tokens' weights become 0 (they stay
    in the denominators, as in GRPO). The KL is k1 from the sampler's log-probs. Both whitenings are over all tokens of
    the step; that of the rewards keeps their mean. batch.advantages [S] become the means over the answers' tokens.
    """
    micros = batch.micro_batches
    batch.advantages.zero_()
    if not micros:
        return {}
    place = torch.cat([torch.tensor(m.answers)[m.row.sequence.cpu()] for m in micros])  # each token's answer, 0..S-1
    step_scores = scores.double()
    applies = ~torch.isnan(step_scores)[place]
    kls, rewards = [], []
    for m in micros:
        kl = None if m.ref_logp is None else kl_estimate(m.sampler_logp, m.ref_logp, "k1")
        own = step_scores[m.answers].nan_to_num(0.0)
        rewards.append(token_rewards(own, None if kl is None else kl.cpu(), m.row.sequence.cpu(), beta))
        kls.append(torch.zeros_like(rewards[-1]) if kl is None else kl.double().cpu())
    sizes = [len(r) for r in rewards]
    per_token = torch.cat(rewards)
    if whiten_rewards:
        per_token = whiten(per_token, applies, shift_mean=False)
    values = [_values(m).double().cpu() for m in micros]
    found = [
        gae(r, v, m.row.sequence.cpu(), gamma=gamma, lam=lam)
        for r, v, m in zip(torch.split(per_token, sizes), values, micros, strict=True)
    ]
    advantages, returns = (torch.cat(parts) for parts in zip(*found, strict=True))
    if whiten_advantages:
        advantages = whiten(advantages, applies)
    advantages = advantages.masked_fill(~applies, 0.0)
    for m, a, r, live in zip(
        micros, torch.split(advantages, sizes), torch.split(returns, sizes), torch.split(applies, sizes), strict=True
    ):
        device = m.weights.device
        m.advantages, m.returns = a.float().to(device), r.float().to(device)
        m.weights = m.weights * live.to(device)
        m.ref_logp = None  # its part is done: the penalty is in the rewards
    counts = torch.bincount(place, minlength=len(scores))
    batch.advantages.index_add_(0, place, advantages.to(batch.advantages.dtype)).div_(counts.clamp(min=1))
    kl_of = torch.zeros(len(scores), dtype=torch.float64).index_add_(0, place, torch.cat(kls))
    trained = (counts > 0) & ~torch.isnan(step_scores)
    flat, old = returns[applies], torch.cat(values)[applies]
    facts = {
        "objective/scores": _mean(step_scores[trained]),
        "objective/rlhf_reward": _mean((step_scores - beta * kl_of)[trained]),
        "value/mean": _mean(old),
        "value/return_mean": _mean(flat),
        "value/explained_variance": explained_variance(old, flat),
    }
    if beta > 0:
        facts |= {"kl": float(kl_of.sum()) / len(place), "objective/kl": _mean(kl_of[counts > 0])}
    return facts


def _values(micro: MicroBatch) -> Tensor:
    assert micro.old_values is not None
    return micro.old_values


def _mean(x: Tensor) -> float:
    return float(x.mean()) if len(x) else 0.0
