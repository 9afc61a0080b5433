"""A simulation of many devices, some sampling and some training: step time and utilisation, by discrete events.

    python bench/scale_sim.py fit RUN                  phase times of a run of one process, as one JSON line
    python bench/scale_sim.py check RUN [RUN2 N]       simulated beside measured: every second step, a run of N processes
    python bench/scale_sim.py scale RUN [--figure FILE]  1 to 1,024 devices like the measured one: a table, a figure

A device decodes its live rows together: a decode step of b rows takes base + per_row * b seconds, as fitted to the run.
Answers wait in one queue and go to the device with the fewest rows, at most `rows` each. A step's training begins when
all its answers are judged and the update before it is done. Staleness k: the answers of step n (from 0) may begin when
n - k updates are published; 0 is synchronous, and then the same devices sample and train in turn. Seeded, pure Python.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Times:
    """Seconds. base, per_row: of a decode step. prefill: of a prompt. judge: of an answer. train, train_token: of an
    update, and of one of its row tokens. publish: of new weights, wherever they go. link: of adding gradients up over two
    or more devices.
    """

    base: float
    per_row: float
    train_token: float
    prefill: float = 0.0
    judge: float = 0.0
    train: float = 0.0
    publish: float = 0.0
    link: float = 0.0


@dataclass(frozen=True)
class Layout:
    """samplers and trainers: devices. shared: the same ones do both, in turn. rows: most answers a sampler decodes."""

    samplers: int
    trainers: int
    staleness: int = 0
    rows: int = 256
    shared: bool = False

    @property
    def devices(self) -> int:
        return self.samplers if self.shared else self.samplers + self.trainers


@dataclass
class Result:
    """ends: when each step's update was published. busy: device-seconds of sampling and training."""

    ends: list[float]
    sampling: float
    training: float
    devices: int

    @property
    def step(self) -> float:
        """Seconds a step, the first third of the steps (the pipe filling) not counted."""
        skip = len(self.ends) // 3
        before = self.ends[skip - 1] if skip else 0.0
        return (self.ends[-1] - before) / (len(self.ends) - skip)

    @property
    def utilisation(self) -> float:
        """Share of all device-seconds in which something was sampled or trained."""
        return (self.sampling + self.training) / (self.devices * self.ends[-1])


class Sampler:
    """One device's rows. Every live row is at the same speed, so an answer ends when `tokens` has grown by its length."""

    def __init__(self, times: Times) -> None:
        self.times, self.tokens, self.now, self.busy = times, 0.0, 0.0, 0.0
        self.ready = 0.0  # until then it prefills
        self.rows: list[tuple[float, int, int]] = []  # (value of `tokens` at the end, number, step)

    @property
    def seconds(self) -> float:
        """Of a decode step."""
        return self.times.base + self.times.per_row * len(self.rows)

    def advance(self, now: float) -> None:
        """To this time; nothing may end before it."""
        start = max(self.now, min(self.ready, now))
        self.busy += now - self.now if self.rows else 0.0
        if self.rows and now > start:
            self.tokens += (now - start) / self.seconds
        self.now = now

    def next_end(self) -> float:
        return max(self.now, self.ready) + (self.rows[0][0] - self.tokens) * self.seconds


@dataclass
class Simulation:
    """Runs `lengths[n]`, the answers' tokens of step n (group by group), through a layout."""

    times: Times
    layout: Layout
    lengths: Sequence[Sequence[int]]
    group: int
    prompt: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    now: float = 0.0
    count: int = 0

    def run(self) -> Result:
        steps = len(self.lengths)
        self.samplers = [Sampler(self.times) for _ in range(self.layout.samplers)]
        self.versions = [0] * len(self.samplers)  # of the samplers' plans: an event of an older plan is void
        self.queue: deque[tuple[int, int]] = deque()  # (step, tokens)
        self.left = [len(x) for x in self.lengths]
        self.ends = [0.0] * steps
        self.published = self.begun = 0
        self.training_until = self.training = 0.0
        self.judged: dict[int, float] = {}
        self.trained = 0
        self.release()
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        if self.published < steps:
            raise RuntimeError(f"simulation: {self.published} of {steps} steps were published and nothing is to happen")
        return Result(self.ends, sum(s.busy for s in self.samplers), self.training, self.layout.devices)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, self.count, action))
        self.count += 1

    def release(self) -> None:
        """Queue the steps that the published weights allow."""
        while self.begun < len(self.lengths) and self.begun - self.layout.staleness <= self.published:
            self.queue += [(self.begun, n) for n in self.lengths[self.begun]]
            self.begun += 1
        self.admit()

    def admit(self) -> None:
        changed = set()
        load = [(len(s.rows), i) for i, s in enumerate(self.samplers) if len(s.rows) < self.layout.rows]
        heapq.heapify(load)
        while self.queue and load:
            rows, i = heapq.heappop(load)
            sampler = self.samplers[i]
            if i not in changed:
                sampler.advance(self.now)
                changed.add(i)
            step, tokens = self.queue.popleft()
            sampler.ready = max(sampler.ready, self.now) + self.times.prefill / self.group
            heapq.heappush(sampler.rows, (sampler.tokens + tokens, self.count, step))
            self.count += 1
            if rows + 1 < self.layout.rows:
                heapq.heappush(load, (rows + 1, i))
        for i in changed:
            self.plan(i)

    def plan(self, i: int) -> None:
        self.versions[i] += 1
        if self.samplers[i].rows:
            version = self.versions[i]
            self.at(self.samplers[i].next_end(), lambda: self.ended(i, version))

    def ended(self, i: int, version: int) -> None:
        if version != self.versions[i]:
            return
        sampler = self.samplers[i]
        sampler.advance(self.now)
        sampler.tokens = sampler.rows[0][0]  # free of rounding
        while sampler.rows and sampler.rows[0][0] <= sampler.tokens:
            step = heapq.heappop(sampler.rows)[2]
            self.left[step] -= 1
            if not self.left[step]:
                judge = self.times.judge * len(self.lengths[step]) / self.layout.samplers
                self.at(self.now + judge, lambda step=step: self.scored(step))
        if self.queue:
            self.admit()
        self.plan(i)

    def scored(self, step: int) -> None:
        self.judged[step] = self.now
        while self.trained in self.judged:
            seconds = train_seconds(
                self.times, self.layout.trainers, self.lengths[self.trained], self.group, self.prompt
            )
            start = max(self.training_until, self.judged[self.trained])
            self.training_until = start + seconds + self.times.publish
            self.training += seconds * self.layout.trainers
            self.at(self.training_until, self.publish)
            self.trained += 1

    def publish(self) -> None:
        self.ends[self.published] = self.now
        self.published += 1
        self.release()


def train_seconds(times: Times, trainers: int, lengths: Sequence[int], group: int, prompt: float) -> float:
    """Of one update: the row tokens are shared out evenly, what an update costs by itself is not."""
    tokens = row_tokens(lengths, group, prompt)
    return times.train + times.train_token * tokens / trainers + (times.link if trainers > 1 else 0.0)


def row_tokens(lengths: Sequence[int], group: int, prompt: float) -> float:
    """Every prompt once, answers without their last token."""
    return sum(lengths) - len(lengths) + prompt * len(lengths) / group


def best(
    times: Times, devices: int, staleness: int, lengths: Any, group: int, prompt: float, rows: int
) -> tuple[Layout, Result]:
    """The quickest layout: shared when synchronous or alone, otherwise the best of some shares of trainers."""
    if staleness == 0 or devices == 1:
        layouts = [Layout(devices, devices, 0, rows, shared=True)]
    else:
        shares = {max(1, min(devices - 1, round(devices * share / 8))) for share in range(3, 6)}
        layouts = [Layout(devices - t, t, staleness, rows) for t in sorted(shares)]
    results = [(layout, Simulation(times, layout, lengths, group, prompt).run()) for layout in layouts]
    return min(results, key=lambda pair: pair[1].step)


# Fed with a run


@dataclass(frozen=True)
class Measured:
    """A run's steps: seconds by phase, and what they did."""

    rows: list[dict[str, Any]]
    lengths: list[list[int]]
    group: int
    prompt: float  # tokens

    def share(self, steps: Sequence[int]) -> float:
        """Of the row tokens of all answers, those that were trained on: groups without signal are not."""
        whole = sum(row_tokens(self.lengths[i], self.group, self.prompt) for i in steps)
        return float(sum(self.rows[i]["row_tokens"] for i in steps) / whole)


def read(run: Path) -> Measured:
    """From a run's folder: metrics.jsonl, rollouts.jsonl, config.yaml. The first step, which warms up, is left out."""
    import yaml

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()][1:]
    group = yaml.safe_load((run / "config.yaml").read_text("utf-8"))["num_generations"]
    found: dict[int, list[int]] = {}
    for line in (run / "rollouts.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).append(len(row["ids"]))
    answers = sum(len(found[r["step"]]) for r in rows)
    prompt = sum(r["num_prompt_tokens"] for r in rows) / (answers / group)
    return Measured(rows, [found[r["step"]] for r in rows], group, prompt)


def fit(*parts: tuple[Measured, Sequence[int]]) -> Times:
    """Least squares over these steps of these runs: generating = base * longest + per_row * tokens, training = train +
    train_token * row tokens. Negative coefficients are taken as 0, and the other by itself. Where all steps have as many
    answers of one greatest length, the two of generating cannot be told apart: give a run of fewer answers beside it.
    """
    rows = [(run.rows[i], run.lengths[i]) for run, steps in parts for i in steps]
    longest, tokens = [float(max(n)) for _, n in rows], [float(sum(n)) for _, n in rows]
    base, per_row = two(longest, tokens, [r["time/generate"] for r, _ in rows])
    spent = [r["time/train"] + r["time/reference"] for r, _ in rows]
    train, train_token = two([1.0] * len(rows), [float(r["row_tokens"]) for r, _ in rows], spent)
    judge = statistics.median(r["time/reward"] / len(n) for r, n in rows)
    return Times(base=base, per_row=per_row, train=train, train_token=train_token, judge=judge)


def two(a: Sequence[float], b: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(u, v) >= 0 that make u a + v b nearest to y."""
    aa, ab, bb = (sum(p * q for p, q in zip(m, n, strict=True)) for m, n in ((a, a), (a, b), (b, b)))
    ay, by = (sum(p * q for p, q in zip(m, y, strict=True)) for m in (a, b))
    det = aa * bb - ab * ab
    u, v = ((ay * bb - by * ab) / det, (by * aa - ay * ab) / det) if det > 1e-9 * aa * bb else (-1.0, -1.0)
    if u >= 0 and v >= 0:
        return u, v
    alone = [((ay / aa, 0.0), ay * ay / aa), ((0.0, by / bb), by * by / bb)]
    return max(alone, key=lambda pair: pair[1])[0]


def tails(kind: str, answers: int, steps: int, mean: float, seed: int, most: float = 8.0) -> list[list[int]]:
    """Lengths of this mean: `even` (all alike), or log-normal with sigma 0.5 (`mild`) or 1 (`long`), cut at most * mean."""
    draw = random.Random(f"{kind}/{seed}")
    sigma = {"even": 0.0, "mild": 0.5, "long": 1.0}[kind]
    middle = mean / math.exp(sigma**2 / 2)

    def one() -> int:
        return max(1, round(min(mean * most, draw.lognormvariate(0, sigma) * middle)))

    return [[one() for _ in range(answers)] for _ in range(steps)]


def main() -> None:
    from scale_report import check, scale  # tables and the figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fit", "check", "scale"])
    parser.add_argument("run", type=Path)
    parser.add_argument("more", nargs="*", help="check: a run of several processes, and how many")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--also", type=Path, help="a run of fewer answers, to fit beside RUN")
    parser.add_argument(
        "--link", type=float, default=0.0, help="seconds to add gradients up over devices: an assumption"
    )
    args = parser.parse_args()
    run = read(args.run)
    steps = range(len(run.rows))
    also = [(few, range(len(few.rows))) for few in [read(args.also)]] if args.also else []
    times = replace(fit((run, steps), *also), link=args.link)
    times = replace(times, train_token=times.train_token * run.share(steps))
    if args.what == "fit":
        print(json.dumps(asdict(times)))
    elif args.what == "check":
        check(run, also, [(read(Path(p)), int(n)) for p, n in zip(args.more[::2], args.more[1::2], strict=True)])
    else:
        scale(run, times, args.figure)


if __name__ == "__main__":
    main()
