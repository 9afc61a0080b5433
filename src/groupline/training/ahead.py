"""Answers drawn up to `staleness` steps before the step that trains on them: a bounded queue of steps' groups.

With staleness k the groups of step s (from 0) come from the weights as they were after step s - k, or from the start.
So one rule says which weights draw what, the run repeats itself, and 0 is the run that draws and trains in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from groupline.config import Config, ConfigError
from groupline.objective import Objective
from groupline.records import Group, Rollout
from groupline.rewards import Reward
from groupline.sampling import Elsewhere, Sampler
from groupline.training.collect import Prompted
from groupline.training.correction import correction_of
from groupline.training.redraw import Drawn


class StaleGroups(RuntimeError):
    """A step's answers were drawn from older weights than `staleness` allows."""


class Ahead:
    """The drawn groups of each step; what lies ahead is drawn here or, by a sampler elsewhere, in a thread meanwhile.

    draw: step -> its groups, from the sampler's weights as they are. staleness: most steps that wait in the queue.
    steps: of the whole run; nothing is drawn past them. waiting: what a checkpoint kept, by step.

    The weights that `take(step)` finds in the sampler must be those after `step` steps, and `settle` must be called
    before others are handed over: a draw that has begun ends with the weights that it began with.
    """

    def __init__(
        self,
        draw: Callable[[int], Drawn],
        sampler: Sampler,
        staleness: int,
        steps: int,
        waiting: Mapping[int, Drawn] | None = None,
    ) -> None:
        self._draw, self._sampler, self.staleness, self._steps = draw, sampler, staleness, steps
        self._drawn = dict(waiting or {})
        self._running: dict[int, Future[Drawn]] = {}
        self._elsewhere = sampler if staleness and isinstance(sampler, Elsewhere) else None
        self._thread = None if self._elsewhere is None else ThreadPoolExecutor(1, "groupline-drawing")

    def take(self, step: int) -> Drawn:
        """The step's groups, after those of the steps ahead were drawn too, or were begun. Raises what a draw raised,
        and StaleGroups."""
        wanted = [s for s in range(step, min(step + self.staleness + 1, self._steps)) if s not in self._drawn]
        if self._thread is None or self._elsewhere is None:
            self._drawn.update((s, self._draw(s)) for s in wanted)
        elif wanted:
            self._elsewhere.stand_by()  # reads the policy's weights, so not while they train
            self._running = {s: self._thread.submit(self._draw, s) for s in wanted}
            if step in self._running:
                self._drawn[step] = self._running.pop(step).result()
        drawn = self._drawn.pop(step)
        self._check(drawn, step)
        return drawn

    def settle(self) -> None:
        """Wait until no draw runs. Raises what one raised."""
        while self._running:
            step = next(iter(self._running))
            self._drawn[step] = self._running[step].result()
            del self._running[step]

    def close(self) -> None:
        """End the sampler and a draw that still runs, whose answers nobody wants any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._sampler.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _check(self, drawn: Drawn, step: int) -> None:
        for group in (*drawn.groups, *drawn.replaced):
            for number, rollout in enumerate(group.rollouts):
                version = rollout.completion.policy_version
                if step - version > self.staleness:
                    raise StaleGroups(
                        f"step {step + 1} trains weights of version {step}, and answer {number} to problem "
                        f"{group.problem.id!r} was drawn from version {version}; staleness {self.staleness} allows "
                        f"{max(0, step - self.staleness)} or newer"
                    )

    def to_json(self, prompted: Sequence[Prompted]) -> list[dict[str, Any]]:
        """What waits, once `settle` was called: rows for a checkpoint, each group's problem as its place in `prompted`."""
        place = {id(p.problem): i for i, p in enumerate(prompted)} if self._drawn else {}

        def row(group: Group) -> dict[str, Any]:
            return {"problem": place[id(group.problem)], "rollouts": [r.to_json() for r in group.rollouts]}

        return [
            {
                "step": step,
                "groups": [row(g) for g in drawn.groups],
                "replaced": [row(g) for g in drawn.replaced],
                "seconds": drawn.seconds,
                "logged": drawn.logged,
            }
            for step, drawn in sorted(self._drawn.items())
        ]


def waiting_of(rows: Iterable[Mapping[str, Any]], prompted: Sequence[Prompted]) -> dict[int, Drawn]:
    """What `Ahead.to_json` gave, for an `Ahead` of the run that goes on."""

    def group(row: Mapping[str, Any]) -> Group:
        return Group(prompted[row["problem"]].problem, tuple(Rollout.from_json(r) for r in row["rollouts"]))

    return {
        row["step"]: Drawn(
            [group(g) for g in row["groups"]],
            [group(g) for g in row["replaced"]],
            dict(row["seconds"]),
            dict(row["logged"]),
        )
        for row in rows
    }


def check_staleness(config: Config, objective: Objective, rewards: Sequence[Reward]) -> None:
    """Raises ConfigError where answers of older weights could not be trained on rightly."""
    if not config.staleness:
        return
    told = f"staleness is {config.staleness}"
    if objective.name == "ppo":
        raise ConfigError(
            f"{told}, and PPO draws and trains in turn: its rewards and values are of the same weights; use 0"
        )
    if objective.kl_place == "reward" and objective.beta > 0:
        raise ConfigError(
            f"{told}, and objective {objective.name} takes its KL from the sampler's log-probs, which are then of older "
            "weights; use beta: 0, kl_place: loss, or staleness: 0"
        )
    if correction_of(config) is None:
        raise ConfigError(
            f"{told}, and nothing corrects for the older weights that draw: that takes sampler_correction other than off, "
            "old_logprobs: recompute, and no top_p, top_k or min_p"
        )
    here = [r.name for r in rewards if r.main_thread]
    if here and config.sampler == "vllm":
        raise ConfigError(
            f"{told}, so answers are judged in the thread that draws them, and reward {here[0]!r} has main_thread; give it "
            "no main_thread, or use staleness: 0"
        )


def staleness_facts(groups: Sequence[Group], step: int) -> dict[str, float]:
    """How many updates lie between the weights that drew the step's answers and those it trains: mean and largest."""
    ages = [step - r.completion.policy_version for g in groups for r in g.rollouts]
    return {"sampling/staleness/mean": sum(ages) / len(ages), "sampling/staleness/max": float(max(ages))}


def words(config: Config) -> str:
    """For the plan."""
    how = (
        "drawn in a thread while the trainer works"
        if config.sampler == "vllm"
        else "the engine draws and trains in turn, so this saves no time"
    )
    rule = correction_of(config)
    weights = "" if rule is None else f"; {rule.level}_{rule.beyond}, cap {rule.cap:g}"
    age = f"{config.staleness} step{'s' if config.staleness > 1 else ''}"
    return f"answers are drawn up to {age} ahead, from weights up to {age} old ({how}{weights})"
