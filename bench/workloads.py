"""The benchmark's workloads: what is sampled and trained in one optimiser step. No library under test is imported here."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens. lora: rank (0: full fine-tune). dead: share of groups whose rewards are all equal.

    uneven: each answer's forced length by its number in the group; empty: `answer` for all of them.
    tiny: the built-in model with the prompts of its own task, instead of the model folder with random words.
    target: at least so many times faster than the peer. peak_limit: at most this share of the peer's peak memory.
    floor_limit: at most this many times the floor. None: no such aim.
    """

    name: str
    what: str
    prompt: int = 75
    answer: int = 64
    group: int = 8
    prompts: int = 4
    lora: int = 16
    beta: float = 0.04
    dead: float = 0.0
    tiny: bool = False
    uneven: tuple[int, ...] = ()
    target: float = 1.0
    peak_limit: float | None = None
    floor_limit: float | None = None

    @property
    def answers(self) -> int:
        """Of one step."""
        return self.group * self.prompts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of one group's answers."""
        return self.uneven or (self.answer,) * self.group

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def new_tokens(self) -> int:
        """Sampled in one step."""
        return self.prompts * sum(self.lengths)

    @property
    def dead_groups(self) -> int:
        return int(self.dead * self.prompts)

    @property
    def trained_groups(self) -> int:
        """Groups that carry a gradient: with a KL penalty every group does."""
        return self.prompts - (0 if self.beta > 0 else self.dead_groups)

    @property
    def trained_tokens(self) -> int:
        """Answer tokens of one step that carry a gradient."""
        return self.trained_groups * sum(self.lengths)


UNEVEN = (16, 16, 16, 32, 32, 48, 96, 256)  # mean 64
WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "short", target=2.5, peak_limit=0.5, floor_limit=1.6),
        Workload(
            "W2", "long prompt", prompt=400, answer=48, group=16, prompts=2, target=8.0, peak_limit=0.5,
            floor_limit=1.6,
        ),
        Workload("W3", "no KL, half the groups without signal", beta=0.0, dead=0.5, target=3.0, peak_limit=0.5),
        Workload("W4", "full fine-tune", beta=0.0, lora=0, target=2.0, peak_limit=0.5),
        Workload("W5", "tiny", prompt=0, answer=48, prompts=16, beta=0.0, lora=0, tiny=True, target=5.0),
        Workload("W6", "uneven lengths", beta=0.0, uneven=UNEVEN, target=4.0),
    )
}  # fmt: skip


def texts(workload: Workload, tokenizer: Any, count: int) -> list[str]:
    """`count` prompts of random words that encode to at most `workload.prompt` tokens, most of them to exactly so many."""
    out = []
    for number in range(count):
        draw = random.Random(number)
        ids = [draw.randrange(300, min(tokenizer.vocab_size, 20000)) for _ in range(workload.prompt)]
        text = tokenizer.decode(ids)
        while len(tokenizer(text)["input_ids"]) > workload.prompt:  # decoded text need not encode to the same ids
            ids.pop()
            text = tokenizer.decode(ids)
        out.append(text)
    return out


def reward_of(workload: Workload, place: int) -> float:
    """Reward of answer `place` of the step (group by group): half of each group right, dead groups all alike."""
    if place // workload.group < workload.dead_groups:
        return 1.0
    return float(place % workload.group % 2)
