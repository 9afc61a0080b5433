"""When an answer ends, with which reason, and what text it then has."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import chain_model, tiny_model, tiny_tokenizer

from groupline.chat import completion_text
from groupline.models.load import end_ids
from groupline.records import SamplingParams
from groupline.sampling import Engine
from groupline.sampling.draft import Drafts


def counting(ends, *, pad=None):
    """A model that counts upwards, whose generation config has these ends."""
    model = chain_model({i: i + 1 for i in range(40)}, 41)
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = pad
    return model


def one(engine, prompt, **settings):
    [[c]] = engine.generate([prompt], 1, SamplingParams(**{"temperature": 0, "max_new_tokens": 8, **settings}))
    assert len(c.ids) == len(c.logprobs) == len(c.plain_logprobs)
    return c


def test_every_end_id_of_the_generation_config_ends_an_answer():
    engine = Engine(counting([7, 23]))
    assert engine.eos_ids == {7, 23}
    [[a], [b], [c]] = engine.generate([[4], [20], [30]], 1, SamplingParams(temperature=0, max_new_tokens=6))
    assert (a.ids, a.finish_reason) == ((5, 6, 7), "stop")
    assert (b.ids, b.finish_reason) == ((21, 22, 23), "stop")
    assert (c.ids, c.finish_reason) == ((31, 32, 33, 34, 35, 36), "length")


def test_ends_are_gathered_from_generation_config_config_and_tokenizer():
    model = tiny_model("llama", eos_token_id=9)
    model.generation_config.eos_token_id = [7, 23]
    tokenizer = tiny_tokenizer()
    assert end_ids(model, tokenizer) == {7, 23, 9, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = torch.tensor(5).item()
    assert end_ids(model) == {5, 9}
    assert end_ids(tiny_model("llama")) == frozenset()


def test_an_end_that_is_also_the_padding_token_is_kept_and_counts():
    """Five tokens and the end: six trained tokens, reason stop."""
    c = one(Engine(counting(9, pad=9)), [3])
    assert (c.ids, c.finish_reason, c.stop_string) == ((4, 5, 6, 7, 8, 9), "stop", None)


def test_an_end_token_in_the_prompt_ends_nothing():
    assert one(Engine(counting(9)), [9, 9, 3]).ids == (4, 5, 6, 7, 8, 9)


def test_an_answer_may_be_the_end_alone():
    model = chain_model({5: 9}, 16)
    model.generation_config.eos_token_id = 9
    engine = Engine(model, tiny_tokenizer())
    answers = engine.generate([[5], [1, 5]], 3, SamplingParams(max_new_tokens=8))
    for c in (c for own in answers for c in own):
        assert (c.ids, c.finish_reason) == ((9,), "stop")
        assert np.isfinite(c.logprobs).all()


def test_an_end_on_the_last_permitted_token_is_a_stop():
    assert one(Engine(counting(9)), [5], max_new_tokens=4).finish_reason == "stop"
    assert one(Engine(counting(9)), [5], max_new_tokens=3).finish_reason == "length"
    assert one(Engine(counting(6)), [5], max_new_tokens=1).finish_reason == "stop"
    assert one(Engine(counting(9)), [5], max_new_tokens=1).ids == (6,)


def test_answers_of_a_group_end_on_their_own():
    """A model of two habits: token 1 is followed by 2 or by the end, evenly."""
    model = chain_model({1: 2, 2: 1}, 8)
    with torch.no_grad():
        model.lm_head.weight[3] = model.lm_head.weight[2]
    model.generation_config.eos_token_id = 3
    [own] = Engine(model, max_rows=5).generate([[1]], 40, SamplingParams(max_new_tokens=12))
    lengths = {len(c.ids) for c in own}
    assert len(lengths) > 3
    for c in own:
        body = c.ids[:-1] if c.finish_reason == "stop" else c.ids
        assert body == tuple([2, 1] * 6)[: len(body)]
        assert (c.ids[-1] == 3) == (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(c.ids) == 12


# Stop strings. The tokenizer has whole tokens for "there", "answer", "the", "\n\n".


def pieces(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, [tokenizer.decode([i]) for i in ids]


def feed(ids, *stop, ends=(), most=64, tokenizer=None):
    """What becomes of an answer whose model writes `ids`."""
    params = SamplingParams(stop=stop, max_new_tokens=most)
    drafts = Drafts([[0]], 1, params, 0, ["key"], ends, tokenizer or tiny_tokenizer())
    for number, token in enumerate(ids):
        row = np.array([0])
        if drafts.record(row, np.array([token]), np.array([-float(number)]), np.array([-2.0 * number]))[0]:
            break
    [[c]] = drafts.completions()
    assert c.ids == tuple(ids[: len(c.ids)])
    assert c.logprobs == tuple(-float(i) for i in range(len(c.ids)))
    assert c.plain_logprobs == tuple(-2.0 * i for i in range(len(c.ids)))
    return c


@pytest.mark.parametrize(
    ("text", "stop", "left", "last"),
    [
        ("one\n\ntwo", "\n\n", "one", "\n\n"),  # a token of its own
        ("is there more", "her", "is t", "there"),  # in the middle of a token
        ("is there more", "s th", "i", "there"),  # over three tokens
        ("the answer is", "answer", "the ", "answer"),
        ("the answer is", "t", "", "the"),  # at once
        ("12345", "34", "12", "4"),  # digits are tokens of their own
        ("ข้อ ๔๒ ครับ", "๒", "ข้อ ๔", None),  # several bytes, several tokens
    ],
)
def test_a_stop_string_ends_the_answer_and_is_cut_from_its_text(text, stop, left, last):
    ids, parts = pieces(text)
    c = feed(ids, stop)
    assert (c.finish_reason, c.stop_string) == ("stop", stop)
    assert completion_text(tiny_tokenizer(), c) == left
    if last is not None:
        assert parts[len(c.ids) - 1] == last  # the ids keep the token that completed the stop string
    assert stop not in tiny_tokenizer().decode(list(c.ids[:-1]))  # and the answer ended with the first that did


def test_the_text_is_cut_at_the_first_place_where_the_stop_string_stands():
    """The token "\\n\\n" after "\\n" makes three line ends: the first two are the stop string."""
    tokenizer = tiny_tokenizer()
    [newline], [double] = (pieces(t)[0] for t in ("\n", "\n\n"))
    [a], _ = pieces("a")
    c = feed([a, newline, double, a], "\n\n")
    assert tokenizer.decode(list(c.ids)) == "a\n\n\n"
    assert completion_text(tokenizer, c) == "a"


def test_the_stop_string_that_stands_first_is_the_one_that_ended_it():
    ids, _ = pieces("is there")
    c = feed(ids, "re", "he")
    assert c.stop_string == "he"
    assert completion_text(tiny_tokenizer(), c) == "is t"


def test_no_stop_string_is_no_stop():
    ids, _ = pieces("one two three")
    c = feed(ids, "four", most=len(ids))
    assert (c.finish_reason, c.stop_string, len(c.ids)) == ("length", None, len(ids))
    assert completion_text(tiny_tokenizer(), c) == "one two three"


def test_a_stop_string_on_the_last_permitted_token_is_a_stop():
    ids, _ = pieces("one two")
    assert feed(ids, "wo", most=len(ids)).finish_reason == "stop"


def test_an_end_token_before_any_stop_string():
    tokenizer = tiny_tokenizer()
    ids, _ = pieces("one")
    c = feed([*ids, tokenizer.eos_token_id, *ids], "two", ends=[tokenizer.eos_token_id])
    assert (c.ids, c.finish_reason, c.stop_string) == ((*ids, tokenizer.eos_token_id), "stop", None)
    assert completion_text(tokenizer, c) == "one"


def test_a_special_token_can_be_a_stop_string():
    """It is no text, so there is nothing to cut."""
    tokenizer = tiny_tokenizer()
    ids, _ = pieces("one")
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    c = feed([*ids, special, *ids], "<|im_start|>")
    assert (c.ids, c.stop_string) == ((*ids, special), "<|im_start|>")
    assert completion_text(tokenizer, c) == "one"


def test_removing_special_tokens_does_not_move_the_cut():
    """Without the special token between them, "1" and "2" look like the stop string that came only later."""
    tokenizer = tiny_tokenizer()
    [one_], [two] = (pieces(t)[0] for t in "12")
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    c = feed([one_, special, two, one_, two], "12")
    assert len(c.ids) == 5
    assert completion_text(tokenizer, c) == "12"


@pytest.mark.parametrize("text", ["a long answer " * 6 + "END", "ๆ" * 20 + "END"])
def test_a_stop_string_far_into_an_answer(text):
    ids, _ = pieces(text)
    c = feed([*ids, *ids], "END", most=500)
    assert c.ids == tuple(ids)
    assert completion_text(tiny_tokenizer(), c) == text.removesuffix("END")


def test_stop_strings_through_the_engine():
    tokenizer = tiny_tokenizer()
    ids, _ = pieces("so 1 is\n\n")
    assert len(set(ids) - {ids[1]}) == len(ids) - 2  # " " stands twice, so the chain below starts after the first
    tail = ids[2:]
    model = chain_model(dict(pairwise(tail)), len(tokenizer))
    engine = Engine(model, tokenizer, max_rows=1)
    [own] = engine.generate([[tail[0]]], 2, SamplingParams(stop=("s\n",), max_new_tokens=9))
    for c in own:
        assert (c.ids, c.finish_reason, c.stop_string) == (tuple(tail[1:]), "stop", "s\n")
        assert completion_text(tokenizer, c) == " i"
        assert np.isfinite(c.logprobs).all()


def test_an_answer_that_starts_again_forgets_what_it_had():
    drafts = Drafts([[0]], 2, SamplingParams(max_new_tokens=5), 0, ["key"], [9], None)
    first = drafts.uniform([0, 1])
    drafts.record([0, 1], np.array([4, 5]), np.zeros(2), np.zeros(2))
    second = drafts.uniform([1])
    drafts.record([1], np.array([6]), np.zeros(1), np.zeros(1))
    drafts.restart([1])
    assert drafts.lengths.tolist() == [1, 0]
    assert drafts.uniform([1])[0] == first[1]
    drafts.record([1], np.array([5]), np.zeros(1), np.zeros(1))
    assert drafts.uniform([1])[0] == second[0]
    assert drafts.last([0, 1]).tolist() == [4, 5]
