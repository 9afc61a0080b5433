"""Who runs in the next step: admission, growth and preemption of answers. Bookkeeping only: no tensors.

Order is arrival order throughout: the oldest waiting answer is admitted first and the youngest live one is preempted
first. The oldest answer therefore always advances, and it fits alone (checked on arrival), so nothing starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from groupline.sampling.blocks import OutOfPages, PagePool

PREFILL_TOKENS = 8192  # of new prompts in one step, unless one alone has more


@dataclass(eq=False)
class Prompt:
    """A prompt and the pages that its answers share. Resident while it holds pages."""

    index: int
    length: int
    max_new: int
    pages: list[int] = field(default_factory=list)
    live: int = 0
    waiting: int = 0

    @property
    def resident(self) -> bool:
        return bool(self.pages)


@dataclass(eq=False)
class Answer:
    """One answer. `length` tokens of it have their keys in the cache."""

    prompt: Prompt
    number: int
    length: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt.index, self.number


@dataclass(frozen=True)
class Step:
    """What the engine does next: prefill `prompts`, draw first tokens of `started`, then decode every live answer."""

    prompts: list[Prompt]
    started: list[Answer]
    preempted: list[Answer]


class Scheduler:
    """Continuous batching over at most `max_rows` live answers and one page pool.

    Call `schedule` before each decode step, `advance` after it for every answer that goes on, and `finish` for every
    answer that ends. A preempted answer loses its pages and starts afresh later (its draws are seeded, so it redraws
    the same tokens). Live answers stand side by side in the cache, so each one holds as many pages as the longest.
    """

    def __init__(self, pool: PagePool, max_rows: int, prefill_tokens: int = PREFILL_TOKENS) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; at least one answer must be able to run")
        self.pool, self.max_rows, self.prefill_tokens = pool, max_rows, prefill_tokens
        self.live: list[Answer] = []
        self._waiting: list[tuple[tuple[int, int], Answer]] = []
        self._arrived = 0
        self._idle: dict[int, Prompt] = {}  # resident prompts without a live answer, still waited for

    def add(self, length: int, answers: int, max_new: int) -> Prompt:
        """Queue a prompt of `length` tokens with `answers` answers of at most `max_new` tokens."""
        need = self.pool.needed(length) + max(1, self.pool.needed(max_new - 1))
        if need > self.pool.total:
            raise ValueError(
                f"a prompt of {length} tokens with answers of up to {max_new} needs {need} cache pages of "
                f"{self.pool.size} tokens and the cache has {self.pool.total}; raise the cache budget or lower the limits"
            )
        prompt = Prompt(self._arrived, length, max_new, waiting=answers)
        self._arrived += 1
        for number in range(answers):
            answer = Answer(prompt, number)
            heapq.heappush(self._waiting, (answer.key, answer))
        return prompt

    @property
    def idle(self) -> list[Prompt]:
        """Resident prompts whose answers all wait."""
        return list(self._idle.values())

    @property
    def done(self) -> bool:
        return not self.live and not self._waiting

    def schedule(self) -> Step:
        """Make room for every live answer's next token, then admit waiting answers while rows and pages last."""
        preempted = self._grow()
        prompts: list[Prompt] = []
        started: list[Answer] = []
        budget = self.prefill_tokens
        width = self.width
        while self._waiting and len(self.live) < self.max_rows and not preempted:
            answer = self._waiting[0][1]
            prompt = answer.prompt
            if not prompt.resident and prompts and prompt.length > budget:
                break
            own = 0 if prompt.resident else self.pool.needed(prompt.length)
            while self.pool.free < own + width and self._evict_idle(keep=prompt):
                pass
            if self.pool.free < own + width:
                break
            heapq.heappop(self._waiting)
            if own:
                prompt.pages = self.pool.take(own)
                prompts.append(prompt)
                budget -= prompt.length
            self._idle.pop(prompt.index, None)
            self.pool.share(prompt.pages)
            answer.pages = self.pool.take(width)
            prompt.live += 1
            prompt.waiting -= 1
            self.live.append(answer)
            started.append(answer)
        if not self.live and self._waiting:
            raise RuntimeError("scheduler: nothing runs although answers wait; this is a defect of the scheduler")
        return Step(prompts, started, preempted)

    def advance(self, answers: Sequence[Answer]) -> None:
        """These answers' last token is now in the cache."""
        for answer in answers:
            answer.length += 1

    def finish(self, answers: Sequence[Answer]) -> None:
        """These live answers have ended; their pages are free again."""
        gone = set(map(id, answers))
        self.live = [a for a in self.live if id(a) not in gone]
        for answer in answers:
            self._let_go(answer)
        self._trim()

    @property
    def width(self) -> int:
        """Pages that each live answer needs for the longest one's next token."""
        return self.pool.needed(max((a.length for a in self.live), default=0) + 1)

    def _grow(self) -> list[Answer]:
        preempted: list[Answer] = []
        width = self.width
        while short := [a for a in self.live if len(a.pages) < width]:
            try:
                for answer in short:
                    answer.pages += self.pool.take(width - len(answer.pages))
            except OutOfPages:
                if not self._evict_idle():
                    preempted.append(self._preempt_youngest())
                    self._trim()
                    width = self.width
        return preempted

    def _trim(self) -> None:
        """Free what the longest answer alone needed, once it is gone."""
        width = self.width
        for answer in self.live:
            self.pool.release(answer.pages[width:])
            del answer.pages[width:]

    def _preempt_youngest(self) -> Answer:
        youngest = max(self.live, key=lambda a: a.key)
        self.live.remove(youngest)
        youngest.prompt.waiting += 1
        heapq.heappush(self._waiting, (youngest.key, youngest))
        self._let_go(youngest)
        return youngest

    def _let_go(self, answer: Answer) -> None:
        prompt = answer.prompt
        self.pool.release(answer.pages)
        self.pool.release(prompt.pages)
        answer.pages, answer.length = [], 0
        prompt.live -= 1
        if not prompt.live:
            if prompt.waiting:
                self._idle[prompt.index] = prompt
            else:
                self._drop(prompt)

    def _evict_idle(self, keep: Prompt | None = None) -> bool:
        """Give up the youngest resident prompt that no live answer needs."""
        candidates = [i for i, p in self._idle.items() if p is not keep]
        if not candidates:
            return False
        self._drop(self._idle.pop(max(candidates)))
        return True

    def _drop(self, prompt: Prompt) -> None:
        self.pool.release(prompt.pages)
        prompt.pages = []
