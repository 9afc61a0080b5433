"""Every figure of docs/traps.md, from the runs of traps.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import traps_numbers as numbers
from traps import GROUP_SIZES, TEMPERATURES, finished

from groupline.metrics import wilson_interval
from groupline.runlog import read_json, read_jsonl

LAST = 10  # steps that "at the end" is the mean of
RARE = (0.02, 0.05, 0.1, 0.2)
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
PENALTIES = {
    "kl_free": "no penalty", "kl_k1_loss": "k1 in the loss", "kl_k3_loss": "k3 in the loss",
    "kl_k1_reward": "k1 in the reward",
}  # fmt: skip
SEEDS = (0, 1)


@dataclass(frozen=True)
class Run:
    """One run's files."""

    folder: Path

    def __post_init__(self) -> None:
        if not finished(self.folder):
            name = self.folder.name
            raise FileNotFoundError(f"{self.folder} holds no finished run: python bench/traps.py run {name}")

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "metrics.jsonl"))

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "rollouts.jsonl"))

    @cached_property
    def held_out(self) -> dict[str, tuple[float, float, float]]:
        """{"before", "after": pass@1 and the ends of its bootstrap interval}."""
        found = read_json(self.folder / "results.json")["held_out"]
        return {w: (found[w]["pass@1"]["value"], *found[w]["pass@1"]["bootstrap"]) for w in ("before", "after")}

    def curve(self, key: str) -> list[float]:
        return [row[key] for row in self.steps]

    def at_the_end(self, key: str) -> float:
        return mean(self.curve(key)[-LAST:])

    def by_problem(self, key: str = "reward") -> dict[str, list[float]]:
        found = defaultdict(list)
        for answer in self.answers:
            found[answer["problem"]].append(answer[key])
        return dict(found)


def found(root: Path) -> dict[str, Any]:
    """{trap: its figures}, plain values."""
    return {
        "empty_think": empty_think(root), "groups": groups(root), "temperature": temperature(root), "std": std(root),
        "length": length(root), "kl": penalties(root),
    }  # fmt: skip


def empty_think(root: Path) -> dict[str, Any]:
    out = {}
    for name in ("naive_0", "naive_1", "fixed_0", "fixed_1", "light_0"):
        run = Run(root / f"empty_think_{name}")
        empty = numbers.mean_by_step((a["step"], float(numbers.thinks_nothing(a["text"]))) for a in run.answers)
        out[name] = {
            "empty": [share for _, share, _ in empty], "reward": run.curve("reward"), "accuracy": run.curve("accuracy"),
            **run.held_out,
        }  # fmt: skip
    return out


def groups(root: Path) -> dict[str, Any]:
    drawn, again = Run(root / "groups_chance").by_problem(), Run(root / "groups_32").by_problem()
    right = [int(sum(r)) for r in drawn.values()]
    p = mean(map(mean, drawn.values()))
    out: dict[str, Any] = {"p": p, "right": right, "sizes": {}}
    for size in GROUP_SIZES:
        run = list(Run(root / f"groups_{size}").by_problem().values())
        cut = [b for r in again.values() for b in numbers.blocks(r, size)]
        dead = numbers.dead_share(run)
        out["sizes"][size] = {
            "measured": dead, "wilson": wilson_interval(round(dead * len(run)), len(run)),
            "cut": numbers.dead_share(cut), "cut_groups": len(cut),
            "one_p": numbers.dead_chance(p, size), "each_p": numbers.dead_chance_mean(right, 32, size),
        }  # fmt: skip
    return out


def std(root: Path) -> dict[str, Any]:
    chances = {k: mean(v) for k, v in Run(root / "groups_chance").by_problem().items()}
    out: dict[str, Any] = {}
    for name, divided in (("groups_8", True), ("groups_8_no_std", False)):
        own = {k: sum(map(abs, v)) for k, v in Run(root / name).by_problem("advantage").items()}
        exact = [numbers.expected_weight(chances[k], 8, divided) for k in own]
        shares = numbers.shares_by_chance([chances[k] for k in own], list(own.values()), QUARTERS)
        expected = numbers.shares_by_chance([chances[k] for k in own], exact, QUARTERS)
        out["divided" if divided else "not divided"] = {
            "measured": [s for _, s in shares], "expected": [s for _, s in expected], "groups": [n for n, _ in shares],
            "relative": [numbers.expected_weight(p, 8, divided) / numbers.expected_weight(0.5, 8, divided) for p in RARE],
        }  # fmt: skip
    return out


def temperature(root: Path) -> dict[str, Any]:
    out = {}
    for t in TEMPERATURES:
        runs = [Run(root / f"temperature_{t}_{seed}") for seed in SEEDS]
        out[t] = {
            key: [mean(values) for values in zip(*(r.curve(name) for r in runs), strict=True)]
            for key, name in (
                ("signal", "frac_groups_with_signal"), ("accuracy", "accuracy"), ("length", "completions/mean_length"),
            )
        }  # fmt: skip
        out[t]["held_out"] = [r.held_out for r in runs]
    return out


def length(root: Path) -> dict[str, Any]:
    """{row: one dictionary a seed}: tokens of wrong and of right answers, the end included, by windows of 5 steps."""
    out: dict[str, Any] = {}
    for row in ("grpo", "dr_grpo"):
        out[row] = []
        for seed in SEEDS:
            run = Run(root / f"length_{row}_{seed}")
            tokens = [(a["reward"], a["step"], len(a["ids"])) for a in run.answers]
            last = [n for reward, step, n in tokens if reward == 0 and step > run.steps[-1]["step"] - 5]
            out[row].append({
                "wrong": numbers.mean_by_step(((step, n) for reward, step, n in tokens if reward == 0), 5),
                "right": numbers.mean_by_step(((step, n) for reward, step, n in tokens if reward == 1), 5),
                "error": stdev(last) / sqrt(len(last)), "held_out": run.held_out,
            })  # fmt: skip
    return out


def penalties(root: Path) -> dict[str, Any]:
    out = {}
    for name, label in PENALTIES.items():
        seeds = (0,) if name == "kl_free" else SEEDS
        runs = [Run(root / f"{name}_{seed}") for seed in seeds]
        out[label] = {
            "kl": [r.curve("kl") for r in runs], "end": [r.at_the_end("kl") for r in runs],
            "accuracy": [r.at_the_end("accuracy") for r in runs], "grad_norm": [r.at_the_end("grad_norm") for r in runs],
            "held_out": [r.held_out for r in runs],
        }  # fmt: skip
    return out


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as text, in the order of the page."""
    say = [
        "1. empty thought: empty at step 1 / most (step) / last; reward first / most / last; accuracy first / least / last"
    ]
    for name, f in figures["empty_think"].items():
        empty, reward, accuracy = f["empty"], f["reward"], f["accuracy"]
        top = max(range(len(empty)), key=empty.__getitem__)
        say.append(
            f"   {name:8} empty {empty[0]:.0%} / {empty[top]:.0%} ({top + 1}) / {empty[-1]:.0%}  "
            f"reward {reward[0]:.2f} / {max(reward):.2f} / {reward[-1]:.2f}  "
            f"accuracy {accuracy[0]:.0%} / {min(accuracy):.0%} / {accuracy[-1]:.0%}  held out {_held(f)}"
        )
    found = figures["groups"]
    say.append(f"2. dead groups of 128, and among 32 answers to each cut up; mean p {found['p']:.3f}")
    for size, f in found["sizes"].items():
        say.append(
            f"   G {size:2} measured {f['measured']:.3f} ({f['wilson'][0]:.3f} to {f['wilson'][1]:.3f}), cut {f['cut']:.4f} "
            f"of {f['cut_groups']}; with one p {f['one_p']:.4f}, with each problem's own {f['each_p']:.4f}"
        )
    say.append(f"3. temperature: means of two seeds; accuracy at step 1 and over the last {LAST}")
    for t, f in figures["temperature"].items():
        say.append(
            f"   {t} signal {mean(f['signal']):.0%}, last {LAST} {mean(f['signal'][-LAST:]):.0%}; "
            f"accuracy {f['accuracy'][0]:.0%} to {mean(f['accuracy'][-LAST:]):.0%}; "
            f"length {mean(f['length'][-LAST:]):.1f}; held out {'; '.join(map(_held, f['held_out']))}"
        )
    say.append("4. share of the summed |A| by p, four quarters")
    for name, f in figures["std"].items():
        say.append(
            f"   {name:12} measured {_thousandths(f['measured'])} expected {_thousandths(f['expected'])} "
            f"groups {f['groups']}; a group's weight at p {_thousandths(RARE)} to that at 1/2: {_thousandths(f['relative'])}"
        )
    say.append("5. tokens of wrong answers, windows of 5 steps: mean (count); standard error of the last")
    for row, seed, f in ((row, seed, f) for row, seeds in figures["length"].items() for seed, f in enumerate(seeds)):
        shown = " ".join(f"{m:.1f}({n})" for _, m, n in f["wrong"])
        say.append(
            f"   {row:8} {seed}: {shown}; {f['error']:.1f}; right, last: {f['right'][-1][1]:.1f}; held out {_held(f['held_out'])}"
        )
    say.append(f"6. KL to the start, nats a token, means of the last {LAST} steps, by seed")
    for label, f in figures["kl"].items():
        say.append(
            f"   {label:16} kl {_thousandths(f['end'])} accuracy {_thousandths(f['accuracy'])} "
            f"gradient norm {_thousandths(f['grad_norm'])} held out {'; '.join(map(_held, f['held_out']))}"
        )
    return say


def _held(f: dict[str, Any]) -> str:
    (before, *_), (after, low, high) = f["before"], f["after"]
    return f"{before:.1%} to {after:.1%} ({low:.1%} to {high:.1%})"


def _thousandths(values: Sequence[float]) -> str:
    return "/".join(f"{v:.3f}" for v in values)
