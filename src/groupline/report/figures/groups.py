"""One group that teaches and one that cannot: rewards, the line they are judged by, advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import torch

from groupline.objective import GRPO, group_advantages
from groupline.report.figure import BLUE, GREY, ORANGE
from groupline.runlog import read_jsonl

LABELLED = 8  # answers; with more of them the numbers over the bars would touch
TEACHES, CANNOT = (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """Rewards and advantages of a group's answers, in order. origin: where they are from, in words."""

    origin: str
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]

    @property
    def teaches(self) -> bool:
        return max(self.rewards) > min(self.rewards)


def example_groups() -> tuple[ShownGroup, ShownGroup]:
    """Two of four right, and all right, with the advantages of the default objective."""
    both = torch.tensor(TEACHES + CANNOT, dtype=torch.float64)
    found = group_advantages(
        both, len(TEACHES), scale=GRPO.scale, baseline=GRPO.baseline, ddof=GRPO.ddof, eps=GRPO.eps
    ).tolist()
    origin = "an example"
    return ShownGroup(origin, TEACHES, tuple(found[:4])), ShownGroup(origin, CANNOT, tuple(found[4:]))


def recorded_groups(run: Path) -> tuple[ShownGroup, ShownGroup]:
    """A group that teaches and one that cannot, from rollouts.jsonl: of the first step that has both.

    Of that step's groups the one whose rewards are spread most, and the first without spread. Where no step has both,
    the first step that has the one, and that has the other; where a kind is missing, the example's. Only groups judged
    by their own mean are taken: an answer not scored, or advantages from elsewhere (PPO's), would need another picture.
    """
    first: tuple[ShownGroup | None, ShownGroup | None] = (None, None)
    for groups in _steps(run):
        teaching = max((g for g in groups if g.teaches), key=lambda g: pvariance(g.rewards), default=None)
        dead = next((g for g in groups if not g.teaches), None)
        if teaching and dead:
            return teaching, dead
        first = first[0] or teaching, first[1] or dead
    example = example_groups()
    return first[0] or example[0], first[1] or example[1]


def _steps(run: Path) -> Iterator[list[ShownGroup]]:
    """The groups of each step that are judged by their own mean."""
    if not (run / "rollouts.jsonl").is_file():
        return
    for step, rows in groupby(read_jsonl(run / "rollouts.jsonl"), key=lambda row: row["step"]):
        found = []
        for number, answers in groupby(rows, key=lambda row: row["group"]):
            pairs = [(row["reward"], row["advantage"]) for row in answers]
            if len(pairs) < 2 or any(reward is None or advantage is None for reward, advantage in pairs):
                continue
            rewards, advantages = (tuple(map(float, column)) for column in zip(*pairs, strict=True))
            group = ShownGroup(f"step {step}, group {number + 1}", rewards, advantages)
            if _judged_by_its_mean(group):
                found.append(group)
        yield found


def _judged_by_its_mean(group: ShownGroup) -> bool:
    largest = max(map(abs, group.advantages))
    if not group.teaches:
        return largest == 0
    return largest > 0 and abs(sum(group.advantages)) < 1e-4 * largest * len(group.advantages)


def draw_groups(pyplot: Any, groups: tuple[ShownGroup, ShownGroup]) -> Any:
    """A row a group: rewards with their mean on the left, advantages on the right."""
    figure, axes = pyplot.subplots(2, 2, figsize=(7.4, 5.6), sharey="col")
    for row, (group, title) in enumerate(zip(groups, ("A group that teaches", "A group that cannot"), strict=True)):
        left, right = axes[row]
        places = range(1, len(group.rewards) + 1)
        mean = fmean(group.rewards)
        side = [BLUE if a > 0 else ORANGE if a < 0 else GREY for a in group.advantages]
        left.bar(places, group.rewards, width=0.66, color=side)
        left.axhline(mean, color="black", linestyle="--", linewidth=1.4)
        left.set_title(f"{title}\n{group.origin}", fontsize=10, loc="left")
        left.set_title(f"- - mean {mean:.2f}", fontsize=9.5, loc="right")
        left.set_ylabel("reward")
        right.bar(places, group.advantages, width=0.66, color=side)
        right.axhline(0, color="black", linewidth=0.8)
        right.set_ylabel("advantage")
        right.set_title(
            "above the mean: more likely\nbelow it: less likely" if group.teaches else "all 0: no gradient",
            fontsize=10, loc="left",
        )  # fmt: skip
        if len(places) <= LABELLED:
            _label(left, places, group.rewards, "{:.2g}")
            _label(right, places, group.advantages, "{:+.2f}" if group.teaches else "{:.0f}")
        for axis in (left, right):
            axis.set_xticks([n for n in places if len(places) <= LABELLED or n == 1 or n % 8 == 0])
            axis.set_xlabel("answer")
            axis.margins(y=0.2)
            axis.spines[["top", "right"]].set_visible(False)
    return figure


def _label(axis: Any, places: range, values: tuple[float, ...], form: str) -> None:
    for x, value in zip(places, values, strict=True):
        axis.annotate(
            form.format(value), (x, value), (0, 3 if value >= 0 else -3), textcoords="offset points",
            ha="center", va="bottom" if value >= 0 else "top", fontsize=7.5,
        )  # fmt: skip
