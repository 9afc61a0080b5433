"""Problems -> sampler -> judges -> Groups."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupline.chat import completion_text, encode_prompt, prompt_text, template_prefill
from groupline.config import ConfigError, RunSettings
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Judging, Reward
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

    def __init__(self, prompted: Sequence[Prompted], seed: int | str) -> None:
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
    state: Any = None,
    log: Callable[[Mapping[str, float]], Any] | None = None,
) -> tuple[list[Group], dict[str, float]]:
    """(a group of n scored answers per problem, seconds spent generating and scoring).

    Draws are keyed by (seed, label, the problem's id, how often it came before in this call).
    state: what reward functions receive as `trainer_state`. log: receives what they logged as metrics, and for each
    with a timeout how many rows ran out of it. Functions that score group by group begin while others are decoded.
    """
    began = time.perf_counter()
    seen: dict[str, int] = {}
    keys = []
    for p in prompted:
        seen[p.problem.id] = seen.get(p.problem.id, -1) + 1
        keys.append(f"{label}/{p.problem.id}/{seen[p.problem.id]}")
    texts: dict[int, list[str]] = {}

    def columns(prompts: Sequence[int], answers: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """What is judged of the prompts with these numbers."""
        for i, own in zip(prompts, answers, strict=True):
            texts[i] = texts.get(i) or [completion_text(tokenizer, c) for c in own]
        return {
            "problems": [prompted[i].problem for i in prompts for _ in range(n)],
            "completions": [text for i in prompts for text in texts[i]],
            "completion_ids": [c.ids for own in answers for c in own],
            "columns": {"prefill": [prompted[i].prefill for i in prompts for _ in range(n)]},
        }

    with Judging(rewards, trainer_state=state) as judging:

        def judge(prompt: int, own: list[Completion]) -> None:
            judging.add(prompt, **columns([prompt], [own]))

        early: dict[str, Any] = {"on_group": judge} if judging.by_group else {}
        answers = engine.generate([p.ids for p in prompted], n, params, seed=seed, keys=keys, **early)
        generated = time.perf_counter()
        scores = judging.finish(**columns(range(len(prompted)), answers), group_size=n)
    if log is not None:
        log(scores.metrics)
        log({f"rewards/{name}/timeouts": float(count) for name, count in scores.timeouts.items()})
    completions = [c for own in answers for c in own]
    written = [text for i in range(len(prompted)) for text in texts[i]]
    judged = zip(completions, written, scores.rows, scores.totals, scores.extras, strict=True)
    rollouts = [Rollout(*parts) for parts in judged]
    groups = [Group(p.problem, tuple(rollouts[i * n : (i + 1) * n])) for i, p in enumerate(prompted)]
    return groups, {"generate": generated - began, "reward": time.perf_counter() - generated}
