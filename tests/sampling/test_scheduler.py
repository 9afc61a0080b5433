"""The scheduler and its pages, driven as the engine drives them, over cache slots that remember what was written."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import groupline
from groupline.sampling.blocks import OutOfPages, PagePool
from groupline.sampling.scheduler import Scheduler

SAMPLING = Path(groupline.__file__).parent / "sampling"


@pytest.mark.parametrize("name", ["blocks.py", "scheduler.py"])
def test_bookkeeping_imports_no_tensors(name):
    tree = ast.parse((SAMPLING / name).read_text(encoding="utf-8"))
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert modules <= {"__future__", "heapq", "collections.abc", "dataclasses", "groupline.sampling.blocks"}


class Cache:
    """One call of the engine without its model. ends[answer]: how many tokens the answer will have."""

    def __init__(self, pages, size, rows, prefill=8192):
        self.pool = PagePool(pages, size)
        self.scheduler = Scheduler(self.pool, rows, prefill)
        self.rows = rows
        self.slots = {}
        self.ends = {}
        self.written = {}  # live answer -> tokens drawn so far
        self.finished = []
        self.preemptions = 0
        self.started = []

    def add(self, length, lengths, max_new):
        prompt = self.scheduler.add(length, len(lengths), max_new)
        self.ends |= {(prompt.index, n): e for n, e in enumerate(lengths)}
        return prompt

    def slot(self, pages, j):
        return pages[j // self.pool.size] * self.pool.size + j % self.pool.size

    def unfinished(self):
        return sorted(self.ends.keys() - set(self.finished))

    def draw(self, answers):
        ended = []
        for a in answers:
            self.written[a.key] += 1
            if self.written[a.key] == self.ends[a.key]:
                ended.append(a)
                self.finished.append(a.key)
        self.scheduler.finish(ended)

    def step(self):
        oldest = self.unfinished()[0]
        step = self.scheduler.schedule()
        self.preemptions += len(step.preempted)
        assert oldest not in [a.key for a in step.preempted]
        assert oldest in [a.key for a in self.scheduler.live]  # so it draws a token in every step: nothing starves
        for a in step.preempted:
            assert (a.pages, a.length) == ([], 0)
        for p in step.prompts:
            for j in range(p.length):
                self.slots[self.slot(p.pages, j)] = ("prompt", p.index, j)
        for a in step.started:
            self.written[a.key] = 0
            self.started.append(a.key)
        self.check()
        self.draw(step.started)
        live = list(self.scheduler.live)
        for a in live:
            assert self.written[a.key] == a.length + 1  # the newest token is drawn and not yet in the cache
            self.slots[self.slot(a.pages, a.length)] = (*a.key, a.length)
        self.scheduler.advance(live)
        self.check()
        self.draw(live)
        self.check()

    def check(self):
        live = self.scheduler.live
        assert len(live) <= self.rows
        own = [page for a in live for page in a.pages]
        resident = {id(p): p for p in [a.prompt for a in live] + self.scheduler.idle}.values()
        shared = [page for p in resident for page in p.pages]
        assert len(own) + len(shared) == len({*own, *shared})  # no page has two owners
        assert self.pool.free == self.pool.total - len(own) - len(shared)  # and none is lost
        for a in live:
            assert a.prompt.resident
            for j in range(a.length):
                assert self.slots[self.slot(a.pages, j)] == (*a.key, j)
        for p in resident:
            assert p.resident
            for j in range(p.length):
                assert self.slots[self.slot(p.pages, j)] == ("prompt", p.index, j)

    def run(self):
        steps = 0
        while not self.scheduler.done:
            self.step()
            steps += 1
        assert not self.unfinished()
        assert self.pool.free == self.pool.total
        assert steps <= sum(self.ends.values())
        return self


requests = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 9)).flatmap(
        lambda pm: st.tuples(st.just(pm[0]), st.lists(st.integers(1, pm[1]), min_size=1, max_size=5), st.just(pm[1]))
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(requests, st.integers(1, 4), st.integers(0, 12), st.integers(1, 7), st.integers(1, 30), st.data())
def test_random_walks_finish_and_leak_nothing(queue, size, spare, rows, prefill, data):
    """The cache holds the largest request and `spare` pages more, so most walks preempt."""
    pool = PagePool(1, size)
    needs = [pool.needed(length) + max(1, pool.needed(most - 1)) for length, _, most in queue]
    cache = Cache(max(needs) + spare, size, rows, prefill)
    early = data.draw(st.integers(1, len(queue)))
    for request in queue[:early]:
        cache.add(*request)
    for request in queue[early:]:  # the rest arrive while others run
        for _ in range(data.draw(st.integers(0, 4))):
            if not cache.scheduler.done:
                cache.step()
        cache.add(*request)
    cache.run()


def test_preemption_is_forced_and_survived():
    cache = Cache(pages=5, size=2, rows=4)
    cache.add(2, [8, 8, 8, 8], 8)  # one page of prompt and four of answer: two answers never fit together to the end
    cache.run()
    assert cache.preemptions > 0
    assert cache.finished == [(0, 0), (0, 1), (0, 2), (0, 3)]  # the oldest always goes on


def test_shared_prompt_pages_are_released_after_the_last_answer():
    cache = Cache(pages=20, size=4, rows=2)
    prompt = cache.add(5, [1, 3, 2], 4)
    cache.step()
    assert len(prompt.pages) == 2
    while len(cache.finished) < 3:
        assert prompt.resident
        cache.step()
    assert not prompt.resident
    assert cache.pool.free == 20


def test_a_prompt_is_prefilled_once_for_its_answers_while_pages_last():
    cache = Cache(pages=50, size=4, rows=2)
    cache.add(9, [2] * 7, 4)
    prefills = 0
    while not cache.scheduler.done:
        step = cache.scheduler.schedule()
        prefills += len(step.prompts)
        cache.scheduler.advance(cache.scheduler.live)
        cache.scheduler.finish(list(cache.scheduler.live))
    assert prefills == 1


def test_an_idle_prompt_gives_way_before_an_answer_does():
    """Prompt 1's only live answer is preempted; its prompt pages go before the older answer would have to wait."""
    cache = Cache(pages=4, size=2, rows=2)
    first = cache.add(2, [6], 6)  # 1 + 3 pages
    second = cache.add(2, [6], 6)
    while not cache.finished:
        cache.step()
    assert cache.finished == [(0, 0)]
    assert cache.preemptions == 1
    assert not first.resident
    cache.run()
    assert not second.resident


def test_prefill_is_bounded_but_one_prompt_always_passes():
    cache = Cache(pages=50, size=4, rows=8, prefill=10)
    for length in (12, 6, 3, 6):
        cache.add(length, [2], 2)
    sizes = []
    while not cache.scheduler.done:
        step = cache.scheduler.schedule()
        sizes.append([p.length for p in step.prompts])
        cache.scheduler.advance(cache.scheduler.live)
        cache.scheduler.finish(list(cache.scheduler.live))
    assert sizes == [[12], [6, 3], [6]]


@pytest.mark.parametrize(("length", "most"), [(9, 1), (1, 14), (5, 6), (100, 100)])
def test_an_impossible_request_is_refused_on_arrival(length, most):
    cache = Cache(pages=3, size=4, rows=2)
    cache.add(4, [3], 3)
    with pytest.raises(ValueError, match=rf"prompt of {length} tokens .* up to {most} needs \d+ .* has 3; raise the"):
        cache.add(length, [1], most)
    cache.run()
    assert cache.finished == [(0, 0)]


def test_the_largest_possible_request_passes():
    cache = Cache(pages=3, size=4, rows=2)
    cache.add(4, [9], 9)  # 1 page of prompt, 8 cached tokens: the last token is never fed
    cache.run()


def test_no_rows_and_no_pages_are_refused():
    with pytest.raises(ValueError, match="max_rows is 0"):
        Scheduler(PagePool(1, 1), 0)
    for total, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match=f"got {total} pages of {size}"):
            PagePool(total, size)


class Pages(RuleBasedStateMachine):
    """PagePool against a plain count of holders."""

    TOTAL = 5

    def __init__(self):
        super().__init__()
        self.pool = PagePool(self.TOTAL, 3)
        self.holders = {}

    @rule(count=st.integers(0, 6))
    def take(self, count):
        if count > self.TOTAL - len(self.holders):
            with pytest.raises(OutOfPages, match=f"{count} pages asked for"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert not self.holders.keys() & set(pages)
        assert all(0 <= page < self.TOTAL for page in pages)
        self.holders |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.share([page])
        self.holders[page] += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.release([page])
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]

    @precondition(lambda self: len(self.holders) < self.TOTAL)
    @rule()
    def misuse(self):
        page = next(p for p in range(self.TOTAL) if p not in self.holders)
        with pytest.raises(ValueError, match=f"page {page} is free"):
            self.pool.share([page])
        with pytest.raises(ValueError, match=f"page {page} is released more often"):
            self.pool.release([page])

    @invariant()
    def nothing_is_lost(self):
        assert self.pool.free == self.TOTAL - len(self.holders)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_pages_needed(tokens, pages):
    assert PagePool(5, 3).needed(tokens) == pages
