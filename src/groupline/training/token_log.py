"""What the trainer knew of each token of an answer, for rollouts.jsonl (the setting log_tokens)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from groupline.batch import Batch, MicroBatch
from groupline.objective import Objective, clipped_tokens
from groupline.records import Group

DIGITS = 5


def token_rows(
    batch: Batch, groups: Sequence[Group], objective: Objective, count: int, whole: bool = True
) -> dict[int, dict[str, Any]]:
    """Place of an answer in the step -> its row's `tokens`, for the first `count` groups with signal, or else the first.

    `trained`: whether it was in the loss; if so a list each, a number a token: `logprobs` and `entropy` (nats) of the last
    training pass; `ratio`, to the log-probs that the update compares with, by the objective's rule; `clipped`, -1 at the
    lower bound, 1 at the upper one, 0 otherwise, and only if any is; `advantages`, only where they differ; `kept`, 0 where
    the token's policy term is left out, only if any is. whole: whether the batch is all of the step's; with several
    processes each has its own answers, and of others nothing is said.
    """
    size = len(groups[0].rollouts)
    order = sorted(range(len(groups)), key=lambda b: not groups[b].has_signal)[:count]
    wanted = {b * size + i for b in order for i in range(size)}
    rows: dict[int, dict[str, Any]] = {place: {"trained": False} for place in sorted(wanted)} if whole else {}
    for micro in batch.micro_batches:
        if wanted.isdisjoint(micro.answers) or micro.logp is None:  # the run ended before this part's update
            continue
        told = _of_micro(micro, objective)
        sequence = micro.row.sequence.cpu()
        for number, place in enumerate(micro.answers):
            if place in wanted:
                own = sequence == number
                rows[place] = {"trained": True} | {
                    name: [round(x, DIGITS) for x in values[own].tolist()] for name, values in told.items()
                }
    return {place: _short(row) for place, row in rows.items()}


def _of_micro(micro: MicroBatch, objective: Objective) -> dict[str, Tensor]:
    assert micro.logp is not None
    assert micro.entropy is not None
    old = micro.logp if micro.old_logp is None else micro.old_logp
    ratio, clipped = clipped_tokens(
        micro.logp, old, micro.advantages, objective,
        sequence=micro.row.sequence, num_sequences=micro.row.num_sequences,
    )  # fmt: skip
    found = {"logprobs": micro.logp, "entropy": micro.entropy, "ratio": ratio, "clipped": clipped}
    found["advantages"] = micro.advantages
    if micro.importance is not None:
        found["kept"] = micro.importance
    return {name: values.cpu() for name, values in found.items()}


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says nothing: advantages that are all equal, no token clipped, none left out."""
    same = len(set(row.get("advantages", ()))) < 2
    idle = {"advantages": same, "clipped": not any(row.get("clipped", ())), "kept": all(row.get("kept", ()))}
    return {k: v for k, v in row.items() if not idle.get(k)}
