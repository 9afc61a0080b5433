"""Sampler and trainer compute a token's log-prob each in their own way: how far they are apart, and what is done about it.

Legend: M scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from groupline.batch import MicroBatch
from groupline.config import Config
from groupline.objective import Correction, effective_share
from groupline.parallel.mesh import SOLO, World

ROUNDING = 1e-3  # nats: a weight within 0.1% of 1, and so no weight at all
RATIO = "sampling/importance_sampling_ratio"


def correction_of(config: Config) -> Correction | None:
    """The rule that the settings ask for, if any."""
    chosen = config.sampler_correction
    if chosen == "auto":
        comparable = config.old_logprobs == "recompute" and config.top_p == 1 and not config.top_k and not config.min_p
        apart = config.sampler == "vllm" or config.staleness > 0
        chosen = "token_truncate" if apart and comparable else "off"
    if chosen == "off":
        return None
    level, _, beyond = chosen.partition("_")
    return Correction(level, beyond, config.sampler_correction_cap, ROUNDING)  # type: ignore[arg-type]


def importance_of(micro: MicroBatch, logp: Tensor, rows: slice) -> Tensor | None:
    """What multiplies the policy term of these tokens, whose log-probs these are.

    The correction compares the sampler with the trainer under the weights that drew the answers: the first pass's own
    log-probs, until they are kept as the old ones.
    """
    own = None if micro.importance is None else micro.importance[rows]
    if micro.correction is None:
        return own
    old = logp if micro.old_logp is None else micro.old_logp[rows]
    weights = micro.correction.weights(old, micro.sampler_logp[rows], micro.row.sequence[rows], micro.row.num_sequences)
    return weights if own is None else own * weights


def correction_facts(
    micro_batches: Sequence[MicroBatch], rule: Correction | None, world: World = SOLO
) -> dict[str, float]:
    """Least, mean and largest weight, the effective sample size as a share of the tokens, the share that is corrected.

    world: its ranks' tokens count together.
    """
    if rule is None:
        return {}
    own = [
        rule.weights(m.old_logp, m.sampler_logp, m.row.sequence, m.row.num_sequences).cpu()
        for m in micro_batches
        if m.old_logp is not None and m.answers
    ]
    weights = [w for held in world.gather(own, "importance weights") for w in held]
    if not weights:
        return {}
    w = torch.cat(weights)
    return {
        f"{RATIO}/min": float(w.min()),
        f"{RATIO}/mean": float(w.mean()),
        f"{RATIO}/max": float(w.max()),
        "sampling/effective_sample_share": effective_share(w),
        "sampling/corrected_share": float((w != 1).float().mean()),
    }


def verdict(metrics: Mapping[str, Any], config: Config) -> str:
    """The first step's self-check in words."""
    found = metrics.get("sampling/sampling_logp_difference/max")
    if found is None:
        return "sampler and trainer: log-probs were not compared in the first step (no token, or another distribution)"
    mean = metrics["sampling/sampling_logp_difference/mean"]
    told = f"sampler and trainer: the log-probs of the first step's tokens differ by {mean:.1e} in the mean, {found:.1e} at most"
    if found <= ROUNDING:
        return f"{told}: rounding, nothing is corrected"
    rule = correction_of(config)
    if rule is None:
        return f"{told}: more than rounding, and nothing corrects it (sampler_correction)"
    return (
        f"{told}: more than rounding; {metrics['sampling/corrected_share']:.1%} of the tokens are weighed "
        f"({rule.level}_{rule.beyond}, cap {rule.cap:g}), effective sample {metrics['sampling/effective_sample_share']:.1%}"
    )
