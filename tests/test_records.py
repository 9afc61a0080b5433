"""Records go to JSON and back without loss, and refuse what has no meaning."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupline.records import Completion, Group, Problem, Rollout, SamplingParams

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 4),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    max_new_tokens=st.integers(1, 512),
    stop=st.lists(texts.filter(bool), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": texts})
problems = st.builds(
    Problem,
    id=texts,
    prompt=texts | st.lists(messages, min_size=1, max_size=2).map(tuple),
    answer=texts,
    columns=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts, max_size=3),
)
tokens = st.lists(st.tuples(st.integers(0, 9999), st.floats(-50, 0), st.floats(-50, 0)), min_size=1, max_size=5)
completions = st.builds(
    lambda rows, **rest: Completion(
        ids=tuple(r[0] for r in rows),
        logprobs=tuple(r[1] for r in rows),
        plain_logprobs=tuple(r[2] for r in rows),
        **rest,
    ),
    rows=tokens,
    prompt_ids=st.lists(st.integers(0, 9999), min_size=1, max_size=3).map(tuple),
    finish_reason=st.sampled_from(["stop", "length"]),
    params=params,
    policy_version=st.integers(0, 99),
    stop_string=st.none() | texts,
)
rollouts = st.builds(
    Rollout,
    completion=completions,
    text=texts,
    rewards=st.dictionaries(texts, st.none() | st.floats(-9, 9), max_size=3),
    reward=st.none() | st.floats(-9, 9),
)
groups = st.builds(Group, problem=problems, rollouts=st.lists(rollouts, max_size=3).map(tuple))


@given(st.one_of(params, problems, completions, rollouts, groups))
def test_json_and_back(record: Any) -> None:
    assert type(record).from_json(json.loads(json.dumps(record.to_json()))) == record


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Problem("p", "q").answer = "3"  # type: ignore[misc]


def test_a_completion_needs_a_log_prob_a_token() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 logprobs and 2 plain_logprobs"):
        Completion((1,), (2, 3), (-1.0,), (-1.0, -2.0), "stop", SamplingParams())


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.5), ("max_new_tokens", 0),
     ("stop", ("",))],
)  # fmt: skip
def test_sampling_settings_out_of_range_are_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{setting} "):
        SamplingParams(**{setting: value})


def group_of(*rewards: float | None) -> Group:
    completion = Completion((1,), (2,), (-1.0,), (-1.0,), "stop", SamplingParams())
    return Group(Problem("p", "q"), tuple(Rollout(completion, "", {}, r) for r in rewards))


def test_signal_is_decided_on_the_rewards_themselves() -> None:
    """Case N1: eight times 0.1 + 0.2 has a standard deviation above 0 in floating point."""
    assert not group_of(*[0.1 + 0.2] * 8).has_signal
    assert not group_of(0.0, 0.0).has_signal
    assert group_of(0.1, 0.0).has_signal
    assert not group_of(1.0, None, None).has_signal
    assert not group_of(None, None).has_signal
    assert group_of(1.0, None, 0.0).has_signal
