"""The order of problems, prompts that are too long, and the groups that come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import config, run, sums
from torch import nn

from groupline.config import ConfigError
from groupline.records import Problem
from groupline.training.collect import ProblemStream, Prompted, encode_problems


def stream(count: int, seed: int = 0) -> ProblemStream:
    return ProblemStream([Prompted(p, (1,), "") for p in sums(count)], seed)


def taken(stream: ProblemStream, steps: int, size: int) -> list[str]:
    return [p.problem.id for step in range(steps) for p in stream.take(step, size)]


def test_every_problem_once_an_epoch_and_the_rest_opens_the_next_step() -> None:
    """Case D2: 10 problems, 4 a step; the two left over are used, not dropped."""
    ids = taken(stream(10), 5, 4)
    assert sorted(ids[:10]) == sorted(ids[10:]) == sorted(p.id for p in sums(10))
    assert ids[:10] != ids[10:]


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    ids = taken(stream(10), 6, 4)
    assert taken(stream(10), 6, 4) == ids
    assert taken(stream(10, seed=1), 6, 4) != ids
    late = stream(10)  # as after a restart: step 5 without the steps before it
    assert [p.problem.id for p in late.take(5, 4)] == ids[20:24]
    assert [p.problem.id for p in late.take(2, 4)] == ids[8:12]


def test_a_step_larger_than_the_set() -> None:
    assert len(set(taken(stream(3), 1, 7))) == 3


def test_prompts_that_are_too_long(tmp_path: Path, tokenizer: Any) -> None:
    """Case M10: found before training; refused by name, or dropped and counted, never cut."""
    problems = [*sums(5), Problem("long", "1+" * 50 + "1=", "51")]
    with pytest.raises(ConfigError, match=r"'long' has 102 tokens and the limit is 20; raise max_prompt_length .*drop"):
        encode_problems(problems, tokenizer, config(tmp_path), 20)
    kept, dropped = encode_problems(problems, tokenizer, config(tmp_path, long_prompts="drop"), 20)
    assert ([p.problem.id for p in kept], dropped) == ([p.id for p in sums(5)], 1)
    assert all(list(p.ids) == tokenizer(p.problem.prompt)["input_ids"] for p in kept)
    with pytest.raises(ConfigError, match="all 6 prompts are over the limit of 2 tokens"):
        encode_problems(problems, tokenizer, config(tmp_path, long_prompts="drop"), 2)
    kept, dropped = encode_problems(problems, tokenizer, config(tmp_path), None)
    assert (len(kept), dropped) == (6, 0)


def test_the_limit_leaves_room_for_the_answer(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """The model has 1,024 positions; an answer of 1,000 leaves 24, and the plan says how many were dropped."""
    problems = [*sums(5), Problem("long", "1+" * 12 + "1=", "13")]
    with pytest.raises(ConfigError, match="'long' has 26 tokens and the limit is 24"):
        run(config(tmp_path / "a", max_completion_length=1000), model, tokenizer, problems=problems)
    with pytest.raises(ConfigError, match="max_completion_length is 1024 and the model has 1024 positions; leave room"):
        run(config(tmp_path / "b", max_completion_length=1024), model, tokenizer)
    said: list[str] = []
    settings = config(tmp_path / "c", max_prompt_length=20, long_prompts="drop")
    run(settings, model, tokenizer, problems=problems, say=said.append)
    assert "5 to train on, 0 held out, 1 too long" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]  # what was refused left nothing behind


def test_an_empty_prompt_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="problem 'empty' has an empty prompt"):
        encode_problems([Problem("empty", "", "1")], tokenizer, config(tmp_path), None)


def test_what_the_template_opens_belongs_to_the_answer(tmp_path: Path, tokenizer: Any) -> None:
    """Case M8: a template that ends in `<think>` gives judges that beginning."""
    talk = ({"role": "user", "content": "1+1="},)
    plain, _ = encode_problems([Problem("a", talk)], tokenizer, config(tmp_path), None)
    old = tokenizer.chat_template
    try:
        tokenizer.chat_template = old.replace("assistant\\n'", "assistant\\n<think>\\n'")
        opened, _ = encode_problems([Problem("a", talk)], tokenizer, config(tmp_path), None)
    finally:
        tokenizer.chat_template = old
    assert (plain[0].prefill, opened[0].prefill) == ("", "<think>\n")
    assert len(opened[0].ids) > len(plain[0].ids)
