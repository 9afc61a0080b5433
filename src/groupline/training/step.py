"""Batch -> one optimiser step: scoring, loss, backward, update. Micro-batches only add up.

Legend: M scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from groupline.batch import Batch, MicroBatch
from groupline.models.logprobs import find_head, token_logprobs
from groupline.models.one_pass import PerTokenLoss, one_pass_loss
from groupline.models.packing import PackedRow, causal_lm, eval_mode, hidden_states, why_not_shared
from groupline.models.reference import Reference
from groupline.objective import Objective, PolicyFacts, policy_loss
from groupline.parallel.mesh import SOLO, World
from groupline.training.correction import importance_of
from groupline.training.optim import NonFinite, Optimiser

TOKEN_RATIOS = ("token", "none")  # with these a token's loss is a function of its own log-prob alone
EVERY = slice(None)


@dataclass
class Scorer:
    """Log-probs of answers under a model, at the temperature they were drawn with, prompts shared where possible."""

    temperature: float = 1.0
    shared: bool = True
    compute: torch.dtype = torch.float32

    @classmethod
    def for_model(cls, model: nn.Module, temperature: float, compute: torch.dtype) -> tuple[Scorer, str | None]:
        """A scorer and, if the model's attention cannot be shared, the reason."""
        reason = why_not_shared(model)
        return cls(temperature, reason is None, compute), reason

    def __call__(self, model: nn.Module, row: PackedRow) -> tuple[Tensor, Tensor]:
        """(log-probs [M], differentiable; entropy [M])."""
        with self._autocast(row.input_ids.device):
            hidden = hidden_states(model, row, self.shared)
            return token_logprobs(hidden, find_head(causal_lm(model)), row.targets, self.temperature)

    def loss(
        self, model: nn.Module, row: PackedRow, per_token_loss: PerTokenLoss, scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, differentiable; log-probs [M]; entropy [M]) of a loss of each token's own log-prob: `one_pass_loss`."""
        with self._autocast(row.input_ids.device):
            hidden = hidden_states(model, row, self.shared)
            head = find_head(causal_lm(model))
            return one_pass_loss(hidden, head, row.targets, self.temperature, per_token_loss, scale)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, self.compute, enabled=self.compute != torch.float32)


@torch.no_grad()
def fill_reference(micro_batches: Iterable[MicroBatch], reference: Reference, scorer: Scorer) -> None:
    """ref_logp of every micro-batch, once a rollout, without dropout."""
    with reference.running() as model:
        for micro in micro_batches:
            micro.ref_logp = scorer(model, micro.row)[0]


@torch.no_grad()
def fill_old(micro_batches: Iterable[MicroBatch], policy: nn.Module, scorer: Scorer) -> None:
    """old_logp of every micro-batch in a pass of its own: needed where training has dropout, which old ones have not."""
    with eval_mode(policy):
        for micro in micro_batches:
            micro.old_logp = scorer(policy, micro.row)[0]


@torch.no_grad()
def keep_top_entropy(
    micro_batches: Sequence[MicroBatch], policy: nn.Module, scorer: Scorer, share: float, world: World = SOLO
) -> None:
    """importance of every micro-batch: 1 for the share of all their tokens with the highest entropy, 0 for others.

    The entropies are those of the weights as they are now, in a pass of its own without dropout (arXiv 2506.01939).
    """
    with eval_mode(policy):
        entropies = [scorer(policy, micro.row)[1].float() for micro in micro_batches]
    own = [e.cpu() if world.size > 1 else e for m, e in zip(micro_batches, entropies, strict=True) if m.answers]
    every = [e for held in world.gather(own, "entropies") for e in held]
    if every and entropies:
        threshold = torch.quantile(torch.cat(every), 1 - share).to(entropies[0].device)
        for micro, entropy in zip(micro_batches, entropies, strict=True):
            micro.importance = (entropy >= threshold).float()


@dataclass
class StepFacts:
    """Sums over the trained tokens of one optimiser step."""

    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    policy: PolicyFacts | None = None
    gap_sum: float = 0.0
    gap_max: float | None = None
    error: str | None = None  # why the update must not be made

    def add(self, loss: Tensor, entropy: Tensor, policy: PolicyFacts, gap: Tensor | None) -> None:
        self.loss += float(loss)
        self.tokens += len(entropy)
        self.entropy += float(entropy.sum())
        self.policy = policy if self.policy is None else self.policy + policy
        if gap is not None:
            self.gap_sum += float(gap.sum())
            self.gap_max = max(self.gap_max or 0.0, float(gap.max()))

    def over(self, world: World) -> StepFacts:
        """Those of all ranks together, on every rank."""
        if world.size == 1:
            return self
        p = self.policy
        on_cpu = None
        if p is not None:
            held = ((field.name, getattr(p, field.name)) for field in fields(p))
            on_cpu = replace(p, **{name: fact.cpu() for name, fact in held if fact is not None})
        total, *others = world.gather(replace(self, policy=on_cpu), "facts of the step")
        for other in others:
            total = total + other
        return total

    def __add__(self, other: StepFacts) -> StepFacts:
        policies = [f.policy for f in (self, other) if f.policy is not None]
        gaps = [f.gap_max for f in (self, other) if f.gap_max is not None]
        return StepFacts(
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.entropy + other.entropy,
            sum(policies[1:], policies[0]) if policies else None,
            self.gap_sum + other.gap_sum,
            max(gaps, default=None),
            self.error or other.error,
        )

    def metrics(self) -> dict[str, float]:
        """Means over trained tokens, under TRL's names. No tokens: only the loss, which is 0."""
        out = {"loss": self.loss, "num_trained_tokens": float(self.tokens)}
        if not self.policy or not self.tokens:
            return out
        p, n = self.policy, self.tokens
        low, high = float(p.clip_low) / n, float(p.clip_high) / n
        out |= {
            "entropy": self.entropy / n,
            "ratio/mean": float(p.ratio_sum) / n,
            "ratio/min": float(p.ratio_min),
            "ratio/max": float(p.ratio_max),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if self.gap_max is not None:
            out["sampling/sampling_logp_difference/mean"] = self.gap_sum / n
            out["sampling/sampling_logp_difference/max"] = self.gap_max
        if p.kl_sum is not None:
            out["kl"] = float(p.kl_sum) / n
        return out


def train_step(
    policy: nn.Module,
    optimiser: Optimiser,
    batch: Batch,
    objective: Objective,
    scorer: Scorer,
    comparable: bool = True,
    world: World = SOLO,
) -> dict[str, float]:
    """One optimiser step; returns its metrics.

    The first pass over a micro-batch without old_logp keeps its own log-probs as the old ones: no extra pass is
    needed, and the ratio is exactly 1. comparable: whether the sampler's log-probs are of the same distribution.
    A batch in which nothing carries a gradient still steps, with zero gradients, so the moments evolve as they would.
    Raises NonFinite, naming the answers, if a log-prob or loss is not finite; no weight has changed then.
    world: each of its ranks brings its own micro-batches of the step, and all make the same update and raise alike.
    """
    facts = StepFacts()
    if objective.top_entropy < 1:
        keep_top_entropy(batch.micro_batches, policy, scorer, objective.top_entropy, world)
    for micro in batch.micro_batches:
        loss, logp, entropy = _forward(policy, micro, objective, scorer, optimiser.scale)
        per_token, policy_facts = _per_token(logp, micro, objective)
        if not bool(torch.isfinite(loss)):
            facts.error = facts.error or _blame(micro, logp, per_token)
            if world.size == 1:
                break
        with world.exchange("gradients of the layers"):
            optimiser.backward(loss)  # also if it is not finite: others may wait within it
        if not micro.answers:
            continue
        facts.add(loss.detach(), entropy, policy_facts, (logp - micro.sampler_logp).abs() if comparable else None)
        micro.logp, micro.entropy = logp, entropy.detach()
        if micro.old_logp is None:
            micro.old_logp = logp
    facts = facts.over(world)
    if facts.error is not None:
        optimiser.adam.zero_grad(set_to_none=True)
        raise NonFinite(facts.error)
    return facts.metrics() | optimiser.step()


def _forward(
    policy: nn.Module, micro: MicroBatch, objective: Objective, scorer: Scorer, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, differentiable; log-probs [M], detached; entropy [M])."""
    if objective.ratio in TOKEN_RATIOS and (micro.correction is None or micro.correction.level == "token"):

        def weighted(logp: Tensor, rows: slice) -> Tensor:
            return micro.weights[rows] * _per_token(logp, micro, objective, rows)[0]

        return scorer.loss(policy, micro.row, weighted, scale)
    logp, entropy = scorer(policy, micro.row)
    return (micro.weights * _per_token(logp, micro, objective)[0]).sum(), logp.detach(), entropy


def _per_token(
    logp: Tensor, micro: MicroBatch, objective: Objective, rows: slice = EVERY
) -> tuple[Tensor, PolicyFacts]:
    """`policy_loss` of these tokens of the micro-batch, whose log-probs these are."""
    return policy_loss(
        logp,
        None if micro.old_logp is None else micro.old_logp[rows],
        micro.advantages[rows],
        objective,
        sequence=micro.row.sequence[rows],
        num_sequences=micro.row.num_sequences,
        ref_logp=None if micro.ref_logp is None else micro.ref_logp[rows],
        importance=importance_of(micro, logp, rows),
    )


def _blame(micro: MicroBatch, logp: Tensor, per_token: Tensor) -> str:
    bad = (~torch.isfinite(per_token * micro.weights)).nonzero().squeeze(-1)
    if not len(bad):  # only their sum is not
        bad = torch.arange(len(per_token))
    what = "log-prob" if not bool(torch.isfinite(logp).all()) else "loss"
    rows = sorted({micro.answers[int(micro.row.sequence[i])] for i in bad})
    return (
        f"a {what} is not finite in answers {rows[:8]} of the step (token {int(bad[0])} of its row); training stopped"
    )
