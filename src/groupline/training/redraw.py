"""Groups without signal replaced by others within a step: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from groupline.records import Group
from groupline.training.collect import ProblemStream, Prompted

# (prompts, label of their draws) -> (groups, seconds by phase, what reward functions logged)
Draw = Callable[[Sequence[Prompted], str], tuple[list[Group], dict[str, float], Mapping[str, float]]]
TIMEOUTS = "/timeouts"  # how the names of logged counts end; all others are means


@dataclass
class Drawn:
    """What a step drew. groups: those trained on. replaced: those without signal whose places others took."""

    groups: list[Group]
    replaced: list[Group]
    seconds: dict[str, float]
    logged: dict[str, float] = field(default_factory=dict)


def draw_groups(
    draw: Draw, prompted: Sequence[Prompted], more: Callable[[int, int], Sequence[Prompted]], rounds: int, label: str
) -> Drawn:
    """One group per prompt, those without signal replaced by groups of other prompts, in at most `rounds` rounds.

    A round draws as many prompts as there are groups without signal, no more. Those still without signal after the last
    round keep their places: they add nothing to the gradient, and count in what it is divided by.
    more: (round from 0, count) -> other prompts.
    """
    groups, seconds, logged = draw(prompted, label)
    drawn = Drawn(list(groups), [], dict(seconds), dict(logged))
    answers = len(groups)
    for number in range(rounds):
        dead = [place for place, group in enumerate(drawn.groups) if not group.has_signal]
        if not dead:
            break
        found, spent, logged = draw(more(number, len(dead)), f"{label} again {number + 1}")
        for name, value in spent.items():
            drawn.seconds[name] += value
        share = len(found) / (answers + len(found))
        for name, value in logged.items():
            before = drawn.logged.get(name)
            if before is None:
                drawn.logged[name] = value
            else:
                drawn.logged[name] = before + (value if name.endswith(TIMEOUTS) else share * (value - before))
        answers += len(found)
        free = iter(dead)
        for group in found:
            if group.has_signal:
                place = next(free)
                drawn.replaced.append(drawn.groups[place])
                drawn.groups[place] = group
            else:
                drawn.replaced.append(group)
    return drawn


def others(
    prompted: Sequence[Prompted], seed: int, rounds: int, count: int
) -> Callable[[int, int, int], list[Prompted]]:
    """(step, round, how many) -> prompts in a seeded order of their own, so that a step's own prompts stay what they are.

    They depend on seed, step and round alone, which is what lets a run go on from a checkpoint. count: most that a
    round may ask for.
    """
    stream = ProblemStream(prompted, f"{seed}/again")
    return lambda step, number, wanted: stream.take(step * rounds + number, count)[:wanted]
