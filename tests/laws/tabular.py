"""A softmax policy small enough to work out by hand: one table of logits, and the answers drawn from it.

The reference losses are written over Python floats and 0-d tensors, one answer at a time, with none of the package's
own functions, from the formulas of DESIGN and the papers. Legend: V tokens, P positions, S answers.
"""

import math

import torch

V, P = 3, 6
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.0, 1.0, 1.0, 0.0]  # two groups of four
LENGTHS = [1, 4, 2, 6, 3, 5, 1, 2]
GROUP = 4
BUDGET = 6


class Case:
    """Fixed data: answers (token ids by position) and three tables of logits [P, V], in fp64."""

    def __init__(self, *, lengths=LENGTHS, rewards=REWARDS, drift=0.3, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.lengths, self.rewards = list(lengths), list(rewards)
        self.ids = [torch.randint(V, (n,), generator=rng).tolist() for n in lengths]
        self.logits = torch.randn(P, V, generator=rng, dtype=torch.float64)
        self.old_logits = self.logits + drift * torch.randn(P, V, generator=rng, dtype=torch.float64)
        self.ref_logits = self.logits + 0.5 * torch.randn(P, V, generator=rng, dtype=torch.float64)

    def flat(self, logits, answers):
        """Log-probs of these answers' tokens, one after the other, and each token's place in `answers`."""
        table = torch.log_softmax(logits, -1)
        logp = [table[t, token] for s in answers for t, token in enumerate(self.ids[s])]
        place = [i for i, s in enumerate(answers) for _ in self.ids[s]]
        return torch.stack(logp), torch.tensor(place)


def reference_advantages(rewards, row):
    out = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean = sum(group) / GROUP
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (GROUP - row.ddof))
        for r in group:
            a = r - (sum(group) - r) / (GROUP - 1) if row.baseline == "leave_one_out" else r - mean
            out.append(a / (std + row.eps) if row.scale == "group" else a)
    return out


def reference_loss(case, row, logits):
    """The whole step's loss, differentiable in logits, by loops."""
    new, old, ref = (torch.log_softmax(x, -1) for x in (logits, case.old_logits, case.ref_logits))
    rewards = list(case.rewards)
    if row.kl_place == "reward" and row.beta:
        for s, ids in enumerate(case.ids):
            rewards[s] -= row.beta * sum((old[t, i] - ref[t, i]).item() for t, i in enumerate(ids))
    advantages = reference_advantages(rewards, row)
    total = torch.zeros((), dtype=torch.float64)
    for s, ids in enumerate(case.ids):
        a = advantages[s]
        log_ratios = [new[t, i] - old[t, i] for t, i in enumerate(ids)]
        for t, i in enumerate(ids):
            if row.ratio == "sequence":
                ratio = math.e ** (sum(log_ratios) / len(ids))
            elif row.ratio == "sequence_product":
                ratio = torch.stack([math.e**x for x in log_ratios]).prod()
            else:
                ratio = math.e ** log_ratios[t]
            low = 0 if row.clip_low is None else 1 - row.clip_low
            high = math.inf if row.clip_high is None else 1 + row.clip_high
            if row.ratio == "none":
                loss = -a * new[t, i]
            elif row.form == "detached":
                loss = -min(max(ratio.item(), low), high) * a * new[t, i]
            else:
                first = ratio if row.delta is None or ratio.item() <= row.delta else logits.new_tensor(row.delta)
                clipped = (
                    ratio if low <= ratio.item() <= high else logits.new_tensor(low if ratio.item() < low else high)
                )
                loss = -(first * a if (first * a).item() < (clipped * a).item() else clipped * a)
            if row.kl_place == "loss" and row.beta:
                x = math.e ** (ref[t, i] - new[t, i])
                kl = {"k1": -torch.log(x), "k2": torch.log(x) ** 2 / 2, "k3": x - 1 - torch.log(x)}[row.kl]
                loss = loss + row.beta * kl * (ratio if row.kl_times_ratio else 1)
            total = (
                total
                + loss
                / {
                    "per_sequence": len(case.ids) * len(ids),
                    "per_token": sum(len(x) for x in case.ids),
                    "per_budget": len(case.ids) * BUDGET,
                    "sequence_sum": len(case.ids),
                }[row.token_weight]
            )
    return total


def gradient(loss, logits):
    (grad,) = torch.autograd.grad(loss, logits)
    return grad
