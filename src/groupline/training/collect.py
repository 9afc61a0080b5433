"""Problems -> sampler -> judges -> Groups."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupline.chat import completion_text, encode_prompt, prompt_text, template_prefill
from groupline.config import ConfigError, RunSettings
from groupline.records import Group, Problem, Rollout, SamplingParams
from groupline.rewards import Reward, call_rewards
from groupline.sampling import Engine


@dataclass(frozen=True)
class Prompted:
    """A problem as the model sees it. prefill: what the chat template already wrote of the answer."""

    problem: Problem
    ids: tuple[int, ...]
    prefill: str


def encode_problems(
    problems: Sequence[Problem], tokenizer: Any, settings: RunSettings, limit: int | None
) -> tuple[list[Prompted], int]:
    """(problems with their prompt ids, how many were dropped as too long).

    limit: most prompt tokens. Raises ConfigError naming the first prompt over it if the settings say to refuse.
    """
    kept = []
    for problem in problems:
        text = prompt_text(tokenizer, problem.prompt, settings.chat_template_kwargs)
        ids = encode_prompt(tokenizer, problem.prompt, settings.chat_template_kwargs)
        if not ids:
            raise ConfigError(f"problem {problem.id!r} has an empty prompt")
        if limit is not None and len(ids) > limit:
            if settings.long_prompts == "refuse":
                raise ConfigError(
                    f"the prompt of problem {problem.id!r} has {len(ids)} tokens and the limit is {limit}; raise "
                    "max_prompt_length (within the model's positions), or set long_prompts: drop"
                )
            continue
        kept.append(Prompted(problem, tuple(ids), template_prefill(text)))
    if problems and not kept:
        raise ConfigError(f"all {len(problems)} prompts are over the limit of {limit} tokens")
    return kept, len(problems) - len(kept)


class Stream(Protocol):
    """Which prompts each step takes."""

    @property
    def prompted(self) -> Sequence[Prompted]: ...

    def take(self, step: int, count: int) -> list[Prompted]:
        """The prompts of step `step` (from 0), `count` of them unless an epoch ends early."""
        ...


class ProblemStream:
    """Problems in a new seeded order every epoch; an epoch's incomplete rest opens the next step's prompts.

    The prompts of a step depend on the seed and the step alone.
    """

    def __init__(self, prompted: Sequence[Prompted], seed: int) -> None:
        self.prompted, self.seed = prompted, seed
        self._orders: dict[int, list[int]] = {}

    def take(self, step: int, count: int) -> list[Prompted]:
        """`count` prompts of step `step` (from 0)."""
        return [self._at(i) for i in range(step * count, (step + 1) * count)]

    def _at(self, place: int) -> Prompted:
        epoch, i = divmod(place, len(self.prompted))
        if epoch not in self._orders:
            order = list(range(len(self.prompted)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self.prompted[self._orders[epoch][i]]


def collect(
    prompted: Sequence[Prompted],
    engine: Engine,
    tokenizer: Any,
    rewards: Sequence[Reward],
    n: int,
    params: SamplingParams,
    *,
    seed: int,
    label: str,
) -> tuple[list[Group], dict[str, float]]:
    """(a group of n scored answers per problem, seconds spent generating and scoring).

    Draws are keyed by (seed, label, the problem's id, how often it came before in this call).
    """
    began = time.perf_counter()
    seen: dict[str, int] = {}
    keys = []
    for p in prompted:
        seen[p.problem.id] = seen.get(p.problem.id, -1) + 1
        keys.append(f"{label}/{p.problem.id}/{seen[p.problem.id]}")
    answers = engine.generate([p.ids for p in prompted], n, params, seed=seed, keys=keys)
    generated = time.perf_counter()
    flat = [(p, c) for p, own in zip(prompted, answers, strict=True) for c in own]
    texts = [completion_text(tokenizer, c) for _, c in flat]
    scores = call_rewards(
        rewards,
        problems=[p.problem for p, _ in flat],
        completions=texts,
        completion_ids=[c.ids for _, c in flat],
        columns={"prefill": [p.prefill for p, _ in flat]},
    )
    rollouts = [
        Rollout(c, text, row, total)
        for (_, c), text, row, total in zip(flat, texts, scores.rows, scores.totals, strict=True)
    ]
    groups = [Group(p.problem, tuple(rollouts[i * n : (i + 1) * n])) for i, p in enumerate(prompted)]
    return groups, {"generate": generated - began, "reward": time.perf_counter() - generated}
