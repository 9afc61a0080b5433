"""Problems -> sampler -> judges -> Groups."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupline.chat import completion_text, encode_prompt, prompt_text, template_prefill
from groupline.config import ConfigError, RunSettings
from groupline.parallel.mesh import SOLO, World
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.rewards import Judging, Reward
from groupline.sampling import Sampler


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
    engine: Sampler,
    tokenizer: Any,
    rewards: Sequence[Reward],
    n: int,
    params: SamplingParams,
    *,
    seed: int,
    label: str,
    state: Any = None,
    log: Callable[[Mapping[str, float]], Any] | None = None,
    world: World = SOLO,
) -> tuple[list[Group], dict[str, float]]:
    """(a group of n scored answers per problem, seconds spent generating and scoring).

    Draws are keyed by (seed, label, the problem's id, how often it came before in this call).
    state: what reward functions receive as `trainer_state`. log: receives what they logged as metrics, and for each
    with a timeout how many rows ran out of it. Functions that score group by group begin while others are decoded.
    world: each rank draws and scores its share of the problems, and all get all groups, in the order of the problems;
    a function sees the rows of its rank, and an error on one rank is raised on all.
    """
    began = time.perf_counter()
    seen: dict[str, int] = {}
    keys = []
    for p in prompted:
        seen[p.problem.id] = seen.get(p.problem.id, -1) + 1
        keys.append(f"{label}/{p.problem.id}/{seen[p.problem.id]}")
    own, own_keys = world.deal(prompted), world.deal(keys)

    def work() -> _Share:
        return _scored(own, own_keys, engine, tokenizer, rewards, n, params, seed, state, world)

    shares = world.together(work, "all ranks' answers")
    groups = [shares[i % world.size].groups[i // world.size] for i in range(len(prompted))]
    if log is not None:
        log(_merged([s.metrics for s in shares], [len(s.groups) for s in shares]))
        counts = [s.timeouts for s in shares]
        log({f"rewards/{name}/timeouts": sum(c.get(name, 0.0) for c in counts) for c in counts for name in c})
    seconds = shares[world.rank].seconds
    if world.size > 1:
        seconds["others"] = time.perf_counter() - began - sum(seconds.values())
    return groups, seconds


@dataclass(frozen=True)
class _Share:
    """What one rank drew and scored."""

    groups: list[Group]
    metrics: Mapping[str, float]
    timeouts: Mapping[str, float]
    seconds: dict[str, float]


def _scored(
    prompted: Sequence[Prompted],
    keys: Sequence[str],
    engine: Sampler,
    tokenizer: Any,
    rewards: Sequence[Reward],
    n: int,
    params: SamplingParams,
    seed: int,
    state: Any,
    world: World,
) -> _Share:
    began = time.perf_counter()
    if not prompted:  # more ranks than prompts
        return _Share([], {}, {}, {"generate": 0.0, "reward": 0.0})
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
        world.now("scoring")
        scores = judging.finish(**columns(range(len(prompted)), answers), group_size=n)
    completions = [c for own in answers for c in own]
    written = [text for i in range(len(prompted)) for text in texts[i]]
    judged = zip(completions, written, scores.rows, scores.totals, scores.extras, strict=True)
    rollouts = [Rollout(*parts) for parts in judged]
    groups = [Group(p.problem, tuple(rollouts[i * n : (i + 1) * n])) for i, p in enumerate(prompted)]
    seconds = {"generate": generated - began, "reward": time.perf_counter() - generated}
    timeouts = {name: float(count) for name, count in scores.timeouts.items()}
    return _Share(groups, scores.metrics, timeouts, seconds)


def _merged(metrics: Sequence[Mapping[str, float]], groups: Sequence[int]) -> Mapping[str, float]:
    """What functions logged on each rank as one mean, each rank counting as many times as it had groups."""
    if len(metrics) == 1:
        return metrics[0]
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for own in metrics for name in own):
        held = [(own[name], count) for own, count in zip(metrics, groups, strict=True) if name in own]
        out[name] = sum(value * count for value, count in held) / sum(count for _, count in held)
    return out
