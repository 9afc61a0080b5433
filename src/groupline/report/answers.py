"""The answers that a run wrote: an index over all of them, and the few whose texts a page carries.

A page holds a capped sample of whole groups, so that a run of 100,000 answers opens like one of 1,000. Which groups those
are follows from the files and the cap alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

from groupline.runlog import read_jsonl_at

Source = Literal["train", "held_out"]
FILES: Mapping[Source, str] = {"train": "rollouts.jsonl", "held_out": "held_out.jsonl"}
KILOBYTE = 1000  # of a page for each answer asked for, in the mean: long answers are fewer
PER_PROBLEM = 6  # steps at which the same prompt is shown
TOKEN_DIGITS = 4

T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """A group in its file, with what is counted of it. right: answers that the first reward function gives 1 or more."""

    source: Source
    step: int
    group: int
    problem: str
    at: list[int] = field(default_factory=list)  # first bytes of its rows
    right: list[bool] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    tokens: bool = False  # whether the trainer's own numbers of each token are logged


class Answers:
    """An index of rollouts.jsonl or held_out.jsonl, in the order of the file; `read` goes on where it stopped.

    rewards: names of the reward functions, as the first row has them.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.file, self.source = folder / FILES[source], source
        self.forget()

    def forget(self) -> None:
        self._read = 0
        self.places: dict[tuple[int, int], Place] = {}
        self.rewards: list[str] = []

    def read(self) -> None:
        """Take in the rows that are new. A file that is shorter than it was (a run went back) is read from its start.

        ValueError naming the file and the line if one in the middle is not JSON.
        """
        size = self.file.stat().st_size if self.file.is_file() else 0
        if size < self._read:
            self.forget()
        if size == 0:
            return
        for begin, end, row in read_jsonl_at(self.file, self._read):
            self._read = end
            key = (int(row["step"]), int(row.get("group", 0)))
            place = self.places.get(key)
            if place is None:
                place = self.places[key] = Place(self.source, *key, str(row.get("problem", "")))
            judged = row.get("rewards") or {}
            self.rewards = self.rewards or list(judged)
            first = next(iter(judged.values()), None)
            place.at.append(begin)
            place.right.append(first is not None and first >= 1)
            place.rewards.append(number(row.get("reward"), 15))
            place.lengths.append(len(row.get("ids") or ()))
            place.cut.append(row.get("finish_reason") == "length")
            place.tokens |= "tokens" in row

    def rows(self, place: Place) -> list[dict[str, Any]]:
        """A group's rows, as they were written."""
        found = []
        with self.file.open("rb") as file:
            for at in place.at:
                file.seek(at)
                found.append(json.loads(file.readline()))
        return found


def packed(
    place: Place, rows: Sequence[Mapping[str, Any]], problems: dict[str, int], rewards: Sequence[str]
) -> dict[str, Any]:
    """A group as the page has it: a list a column, an entry an answer. problems: key -> place, added to."""
    first = rows[0]
    prompt, gold = first.get("prompt", ""), str(first.get("gold", ""))
    key = json.dumps([place.problem, prompt, gold], ensure_ascii=False)
    out: dict[str, Any] = {
        "source": place.source,
        "step": place.step,
        "group": place.group,
        "problem": problems.setdefault(key, len(problems)),
        "version": first.get("policy_version"),
        "texts": [str(row.get("text", "")) for row in rows],
        "reward": [number(row.get("reward"), 6) for row in rows],
        "rewards": [[number((row.get("rewards") or {}).get(name), 6) for name in rewards] for row in rows],
        "advantage": [number(row.get("advantage"), 5) for row in rows],
        "stop": [row.get("finish_reason") for row in rows],
        "right": list(place.right),
        "ids": [row.get("ids") or [] for row in rows],
        "logprobs": [[number(x, TOKEN_DIGITS) for x in row.get("logprobs") or []] for row in rows],
    }
    if any(row.get("extras") for row in rows):
        out["extras"] = [row.get("extras") or {} for row in rows]
    if place.tokens:
        out["tokens"] = [_tokens(row.get("tokens")) for row in rows]
    return out


def _tokens(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    return {k: [number(x, TOKEN_DIGITS) for x in v] if isinstance(v, list) else v for k, v in told.items()}


def number(value: Any, digits: int) -> float | int | None:
    """Rounded to significant digits; None for what is no finite number, which a page cannot draw."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def sample(
    train: Answers, held_out: Answers, limit: int, first: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(groups, their problems): whole groups of at most `limit` answers, and about a kilobyte of page for each of these.

    Half are spread over the steps, those named in `first` before others; a quarter each are prompts that training met at
    several steps, and held-out prompts at every evaluation. Where there is none of a kind, others take its part.
    """
    rewards = train.rewards or held_out.rewards
    # (a source, how much of the page it gets, its groups in order of preference)
    queues = [
        (train, 2, iter(_by_step(train.places.values(), first))),
        (train, 1, iter(_by_problem(train.places.values(), 2))),
        (held_out, 1, iter(_by_problem(held_out.places.values(), 1))),
    ]
    problems: dict[str, int] = {}
    chosen: dict[tuple[Source, int, int], dict[str, Any]] = {}
    answers = size = 0
    taken = [0] * len(queues)
    waiting = list(range(len(queues)))
    while waiting:
        turn = min(waiting, key=lambda i: taken[i] / queues[i][1])
        source, _, places = queues[turn]
        place = next(places, None)
        if place is None:
            waiting.remove(turn)
            continue
        key = (place.source, place.step, place.group)
        if key in chosen:
            continue
        if answers + len(place.at) > limit:
            break
        group = packed(place, source.rows(place), problems, rewards)
        size += len(json.dumps(group, ensure_ascii=False).encode())
        if chosen and size > limit * KILOBYTE:
            break
        chosen[key] = group
        taken[turn] += len(place.at)
        answers += len(place.at)
    used = {group["problem"] for group in chosen.values()}
    known = [json.loads(key) for key, place in problems.items() if place in used]  # the last one tried may be left out
    listed = [{"id": name, "prompt": prompt, "gold": gold} for name, prompt, gold in known]
    order: tuple[Source, ...] = ("train", "held_out")
    groups = sorted(chosen.values(), key=lambda g: (order.index(g["source"]), g["step"], g["group"]))
    return groups, listed


def spread(items: Iterable[T]) -> list[T]:
    """In an order whose every beginning is spread over them: first, last, middle, quarters, and so on."""
    rest = list(items)
    if len(rest) < 3:
        return rest
    order, gaps = [0, len(rest) - 1], [(0, len(rest) - 1)]
    for low, high in gaps:  # which grows
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [rest[i] for i in order]


def _by_step(places: Iterable[Place], first: Sequence[int]) -> Iterator[Place]:
    steps: dict[int, list[Place]] = {}
    for place in places:
        steps.setdefault(place.step, []).append(place)
    named = [step for step in dict.fromkeys(first) if step in steps]
    order = [*named, *(step for step in spread(sorted(steps)) if step not in set(named))]
    own = [sorted(steps[step], key=lambda p: not p.tokens) for step in order]  # those with token numbers first
    for turn in zip_longest(*own):
        yield from (place for place in turn if place is not None)


def _by_problem(places: Iterable[Place], least: int) -> Iterator[Place]:
    """Of problems met at `least` steps or more, all steps of one and then of the next."""
    problems: dict[str, dict[int, Place]] = {}
    for place in places:
        problems.setdefault(place.problem, {}).setdefault(place.step, place)
    for steps in spread([own for own in problems.values() if len(own) >= least]):
        yield from spread(steps.values())[:PER_PROBLEM]
