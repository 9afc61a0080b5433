"""An answer depends on (seed, key of its prompt, number in its group) and the weights: on nothing that is scheduling."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import random_ids, tiny_model

from groupline.records import SamplingParams
from groupline.sampling import Engine
from groupline.sampling.scheduler import Scheduler

PROMPTS = random_ids([3, 11, 1, 6])
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=10)
ENDS = list(range(0, 101, 11))
TOKEN_BYTES = 256  # of one cached token of the tiny Llama: 2 layers x keys and values x 2 heads x 8 x 4 bytes


def ids(answers):
    return [[c.ids for c in own] for own in answers]


def flat(answers):
    return [c for own in answers for c in own]


def engine(kind="llama", **changes):
    model = tiny_model(kind)
    model.generation_config.eos_token_id = ENDS  # so that answers of unequal length come and go
    return Engine(model, notify=lambda _: None, **changes)


@pytest.fixture(scope="module")
def expected():
    answers = engine().generate(PROMPTS, 5, PARAMS, seed=7)
    assert len({len(c.ids) for own in answers for c in own}) > 3
    return answers


@pytest.fixture
def preempted(monkeypatch):
    """Counts preemptions."""
    seen = []
    preempt = Scheduler._preempt_youngest
    monkeypatch.setattr(Scheduler, "_preempt_youngest", lambda self: seen.append(1) or preempt(self))
    return seen


@pytest.mark.parametrize(
    "changes", [{"max_rows": 1}, {"max_rows": 3}, {"max_rows": 7, "page_size": 2}, {"page_size": 1}, {"page_size": 128}]
)
def test_rows_and_pages_change_no_answer(expected, changes):
    answers = engine(**changes).generate(PROMPTS, 5, PARAMS, seed=7)
    assert ids(answers) == ids(expected)
    for a, b in zip(flat(answers), flat(expected), strict=True):
        assert a.finish_reason == b.finish_reason
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pages", "size"), [(8, 3), (11, 2), (21, 1), (13, 3)])
def test_a_cache_that_forces_preemption_changes_no_answer(expected, preempted, pages, size):
    small = engine(page_size=size, max_rows=8, cache_gib=pages * size * TOKEN_BYTES / 2**30)
    answers = small.generate(PROMPTS, 5, PARAMS, seed=7)
    assert preempted
    assert ids(answers) == ids(expected)
    for a, b in zip(flat(answers), flat(expected), strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(len(PROMPTS))),
    rows=st.integers(1, 9),
    size=st.integers(1, 6),
    spare=st.integers(0, 12),
)
def test_nothing_about_scheduling_changes_an_answer(expected, order, rows, size, spare):
    least = -(-11 // size) + -(-9 // size)
    small = engine(max_rows=rows, page_size=size, cache_gib=(least + spare) * size * TOKEN_BYTES / 2**30)
    answers = small.generate([PROMPTS[i] for i in order], 5, PARAMS, seed=7)
    assert ids(answers) == [ids(expected)[i] for i in order]


@pytest.mark.parametrize("kind", ["gemma3", "neox", "bloom"])
def test_the_order_of_prompts_changes_no_answer(kind):
    order = list(range(len(PROMPTS)))
    random.Random(1).shuffle(order)
    assert order != sorted(order)
    straight = engine(kind).generate(PROMPTS, 3, PARAMS, seed=2)
    shuffled = engine(kind, max_rows=4, page_size=3).generate([PROMPTS[i] for i in order], 3, PARAMS, seed=2)
    assert ids(shuffled) == [ids(straight)[i] for i in order]


def test_a_prompt_alone_or_a_smaller_group_draws_the_same_answers(expected):
    [own] = engine().generate([PROMPTS[1]], 2, PARAMS, seed=7)
    assert [c.ids for c in own] == [c.ids for c in expected[1][:2]]


def test_a_longer_limit_only_continues_an_answer(expected):
    longer = engine().generate(PROMPTS, 5, SamplingParams(temperature=0.9, max_new_tokens=16), seed=7)
    for a, b in zip(flat(expected), flat(longer), strict=True):
        assert b.ids[: len(a.ids)] == a.ids


def test_the_same_seed_reproduces_and_another_differs(expected):
    again = engine()
    assert again.generate(PROMPTS, 5, PARAMS, seed=7) == expected
    assert again.generate(PROMPTS, 5, PARAMS, seed=7) == expected  # an engine has no state that a draw moves on
    other = again.generate(PROMPTS, 5, PARAMS, seed=8)
    assert all(a != b for a, b in zip(ids(other), ids(expected), strict=True))


def test_global_generators_are_neither_read_nor_moved(expected):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    running = engine()
    torch.set_rng_state(state)
    assert running.generate(PROMPTS, 5, PARAMS, seed=7) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_answers_of_a_group_differ(expected):
    for own in expected:
        assert len({c.ids for c in own}) == len(own)


def test_equal_prompts_in_one_call_draw_different_answers():
    a, b = engine().generate([PROMPTS[0], PROMPTS[0]], 4, PARAMS, seed=7)
    assert not {c.ids for c in a} & {c.ids for c in b}
    assert [c.ids for c in a] == [c.ids for c in engine().generate([PROMPTS[0]], 4, PARAMS, seed=7)[0]]


def test_given_keys_decide_the_draws():
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0]]
    a, b, c = ids(engine().generate(prompts, 3, PARAMS, seed=7, keys=["x", "y", "x"]))
    assert a == c != b
    assert ids(engine().generate(prompts[:1], 3, PARAMS, seed=7, keys=["y"])) == [b]
