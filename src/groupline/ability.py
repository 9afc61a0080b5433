"""Did training create ability, or make the model surer of what it could do? Pure: counts in, numbers and words out.

Two models answered the same problems, n answers each; what is known of each problem is how many were right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupline.metrics import bootstrap_interval, pass_at_k, pass_at_k_curve

Counts = Mapping[str, int]  # a problem's id -> right answers among the n
CLASSES = ("never", "sometimes", "mostly")
LEVEL = 0.05


def compare_ability(before: Counts, after: Counts, n: int, ks: Sequence[int]) -> dict[str, Any]:
    """Everything that the counts of two models say, ready for JSON.

    before, after: right answers of n for each problem; the same problems. ks: the k of the curves, each at most n.
    Keys: `problems`, `samples`, `k`, `before` and `after` (pass@k as `pass_at_k_curve` gives it), `difference` (after
    less before, per k, see `paired_difference`), `crossing`, `gain`, `flips` and `verdict`.
    ValueError: problems that differ, a count outside 0..n, or no k within 1..n.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(
            f"compare_ability: the two were not given the same problems; one alone has {', '.join(odd[:5])}"
        )
    ids, ks = list(before), sorted(set(ks))
    was, now = [before[i] for i in ids], [after[i] for i in ids]
    curves = {"before": pass_at_k_curve(was, n, ks), "after": pass_at_k_curve(now, n, ks)}
    difference = {
        f"pass@{k}": paired_difference([pass_at_k(n, c, k) for c in was], [pass_at_k(n, c, k) for c in now]) for k in ks
    }
    found = {
        "problems": len(ids),
        "samples": n,
        "k": ks,
        **curves,
        "difference": difference,
        "crossing": crossing(was, now, n, max(ks)),
        "gain": gain_by_start(was, now, n),
        "flips": flips(before, after, n),
    }
    return found | {"verdict": verdict(found)}


def paired_difference(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """{"value": mean of after - before, "bootstrap": its 95% interval}, a value per problem in each.

    Problems are drawn again, and each brings both its values: what makes a problem hard for both cancels.
    """
    each = [b - a for a, b in zip(before, after, strict=True)]
    return {"value": math.fsum(each) / len(each), "bootstrap": list(bootstrap_interval(each))}


def crossing(before: Sequence[int], after: Sequence[int], n: int, most: int) -> int | None:
    """The first k in 2..most at which the pass@k curves are ordered the other way round than at k = 1; None if at none.

    Equal curves have no order. This is about the curves as measured; how sure one may be of it, the intervals say.
    """
    first = 0.0
    for k in range(1, most + 1):
        gap = math.fsum(pass_at_k(n, b, k) - pass_at_k(n, a, k) for a, b in zip(before, after, strict=True))
        if abs(gap) < 1e-9 * len(before):
            continue
        if first == 0.0:
            if k > 1:  # the curves start together
                return None
            first = gap
        elif gap * first < 0:
            return k
    return None


def gain_by_start(before: Sequence[int], after: Sequence[int], n: int) -> dict[str, Any]:
    """The rise of pass@1 as the sum of two parts: over problems the start solved within n answers, and over those it
    never solved. {"all", "start_solved", "start_never"}, each a `paired_difference` over all problems.

    A problem that the start solves with a small chance p lands among the never solved with chance (1-p)^n, which moves
    at most 1/(e n) of the rise from the first part to the second.
    """

    def part(keep: Sequence[bool]) -> dict[str, Any]:
        return paired_difference(
            [a / n if k else 0.0 for a, k in zip(before, keep, strict=True)],
            [b / n if k else 0.0 for b, k in zip(after, keep, strict=True)],
        )

    solved = [a > 0 for a in before]
    return {
        "all": part([True] * len(solved)),
        "start_solved": part(solved),
        "start_never": part([not s for s in solved]),
    }


def flips(before: Counts, after: Counts, n: int) -> dict[str, Any]:
    """How problems moved between never (0 right of n), sometimes, and mostly (half or more) solved.

    table: counts, `table[class before][class after]`. gained: problems never solved before and solved after; lost: the
    reverse; each by id with both counts and whether the change is beyond noise (Fisher's exact test, Holm's correction
    over all problems, 5%). sign_test: the exact two-sided p-value of as uneven a split of gained and lost by chance
    (McNemar). clearly_better, clearly_worse: problems of any class whose change is beyond noise.
    """
    table = {a: dict.fromkeys(CLASSES, 0) for a in CLASSES}
    for name, a in before.items():
        table[_class(a, n)][_class(after[name], n)] += 1
    clear = dict(zip(before, _holm([fisher_exact(before[i], after[i], n) for i in before]), strict=True))

    def listed(names: Sequence[str]) -> list[dict[str, Any]]:
        rows = [{"id": i, "before": before[i], "after": after[i], "beyond_noise": clear[i]} for i in names]
        return sorted(rows, key=lambda row: -abs(row["after"] - row["before"]))

    gained = [i for i in before if before[i] == 0 < after[i]]
    lost = [i for i in before if after[i] == 0 < before[i]]
    return {
        "table": table,
        "gained": listed(gained),
        "lost": listed(lost),
        "never_by_either": sum(before[i] == after[i] == 0 for i in before),
        "sign_test": sign_test(len(gained), len(lost)),
        "clearly_better": sum(clear[i] and after[i] > before[i] for i in before),
        "clearly_worse": sum(clear[i] and after[i] < before[i] for i in before),
    }


def fisher_exact(a: int, b: int, n: int) -> float:
    """Two-sided p-value of a of n against b of n right (Fisher 1922): tables at most as likely as this one."""
    total = a + b
    ways = [math.comb(n, i) * math.comb(n, total - i) for i in range(max(0, total - n), min(n, total) + 1)]
    own = math.comb(n, a) * math.comb(n, b)
    return sum(w for w in ways if w <= own) / math.comb(2 * n, total)


def sign_test(ups: int, downs: int) -> float:
    """Two-sided p-value of a split as uneven as this one if either way were equally likely (McNemar 1947, exact)."""
    changed, fewer = ups + downs, min(ups, downs)
    tail = sum(math.comb(changed, i) for i in range(fewer + 1)) / float(2**changed)
    return min(1.0, 2 * tail)


def verdict(found: Mapping[str, Any]) -> dict[str, str]:
    """{"label", "text"} of what `compare_ability` found, by a rule that takes noise into account.

    Coverage, pass@k at the largest k, has changed if its paired interval leaves out 0 and the sign test of the problems
    gained and lost is below 5%. pass@1 has changed if its paired interval leaves out 0.
    lost coverage: coverage fell. both: coverage rose, and so did pass@1 on problems that the start already solved.
    created: coverage rose, and the latter did not. sharpened: pass@1 rose on problems that the start already solved,
    while coverage did not change. unresolved: pass@1 rose, and neither part can be told from chance. worse: pass@1
    fell. within noise: nothing of this.
    """
    k = found["k"][-1]
    one, cover = found["gain"]["all"], found["difference"][f"pass@{k}"]
    moved = found["flips"]["sign_test"] < LEVEL
    rose, fell = moved and cover["bootstrap"][0] > 0, moved and cover["bootstrap"][1] < 0
    sharper = found["gain"]["start_solved"]["bootstrap"][0] > 0
    if fell:
        label = "lost coverage"
    elif rose:
        label = "both" if sharper else "created"
    elif sharper:
        label = "sharpened"
    elif one["bootstrap"][0] > 0:
        label = "unresolved"
    else:
        label = "worse" if one["bootstrap"][1] < 0 else "within noise"
    return {"label": label, "text": _words(label, found, k)}


def _words(label: str, found: Mapping[str, Any], k: int) -> str:
    one, cover, gain, moves = found["gain"]["all"], found["difference"][f"pass@{k}"], found["gain"], found["flips"]
    gained, lost = len(moves["gained"]), len(moves["lost"])
    n, never = found["samples"], sum(moves["table"]["never"].values())
    meaning = {
        "lost coverage": f"fewer problems are within reach of {k} answers than before",
        "both": "training brought new problems within reach, and made the model surer of those that were",
        "created": f"problems are within reach of {k} answers that were not",
        "sharpened": "training moved what the model could already do into its first answer, and brought "
        "no new problems within reach that could be told from chance",
        "unresolved": "pass@1 rose, but whether by new ability or by sharpening cannot be told from chance",
        "worse": "training made the first answer worse",
        "within noise": "nothing that could be told from chance changed",
    }[label]
    room = f"; the start left {never} of {found['problems']} problems unsolved in {n} answers, and no more than those "
    room += "could be created"
    return (
        f"{label}: {meaning}. pass@1 {_points(one)}, of which {100 * gain['start_solved']['value']:+.1f} on problems the "
        f"start had solved; pass@{k} {_points(cover)}. Problems gained {gained}, lost {lost} (sign test p = "
        f"{moves['sign_test']:.2g}){room}."
    )


def _points(difference: Mapping[str, Any]) -> str:
    low, high = (100 * x for x in difference["bootstrap"])
    return f"{100 * difference['value']:+.1f} points (95%: {low:+.1f} to {high:+.1f})"


def _class(right: int, n: int) -> str:
    return CLASSES[0 if right == 0 else 1 if 2 * right < n else 2]


def _holm(p_values: Sequence[float]) -> list[bool]:
    """Which hypotheses Holm's step-down procedure (1979) rejects at `LEVEL`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out = [False] * len(p_values)
    for place, i in enumerate(order):
        if p_values[i] > LEVEL / (len(p_values) - place):
            break
        out[i] = True
    return out
