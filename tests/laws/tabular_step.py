"""One optimiser step's loss as a trainer takes it: micro-batches of answers, weights counted once for all of them."""

import functools
import operator

import torch
from tabular import BUDGET, GROUP

from groupline.objective import add_kl_to_reward, answer_kl, group_advantages, policy_loss, token_weights


def step_loss(case, row, logits, micro_batches=None, *, on_policy=False, masked=()):
    """-> loss over all micro-batches (lists of answer indices), and the facts' sum."""
    everything = list(range(len(case.ids)))
    rewards = torch.tensor(case.rewards, dtype=torch.float64)
    old_logits = logits.detach() if on_policy else case.old_logits
    if row.kl_place == "reward" and row.beta:
        old, place = case.flat(old_logits, everything)
        kl = answer_kl(old, case.flat(case.ref_logits, everything)[0], place, len(rewards), row.kl)
        rewards = add_kl_to_reward(rewards, kl, row.beta)
    advantages = group_advantages(rewards, GROUP, scale=row.scale, baseline=row.baseline, ddof=row.ddof, eps=row.eps)
    lengths = torch.tensor([0 if s in masked else len(ids) for s, ids in enumerate(case.ids)])
    weights = token_weights(lengths, row.token_weight, budget=BUDGET, dtype=torch.float64)
    losses, facts = [torch.zeros((), dtype=torch.float64)], []
    for answers in micro_batches or [everything]:
        kept = [s for s in answers if s not in masked]
        if not kept:
            continue
        logp, place = case.flat(logits, kept)
        answer = torch.tensor(kept)[place]
        per_token, fact = policy_loss(
            logp,
            None if on_policy else case.flat(case.old_logits, kept)[0],
            advantages[answer],
            row,
            sequence=place,
            num_sequences=len(kept),
            ref_logp=case.flat(case.ref_logits, kept)[0],
        )
        losses.append((weights[answer] * per_token).sum())
        facts.append(fact)
    return sum(losses), functools.reduce(operator.add, facts) if facts else None
