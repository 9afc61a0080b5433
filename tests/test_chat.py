"""Text to token ids and back. Cutting text at stop strings is tested with the sampler, in sampling/test_stops.py."""

import copy

import pytest
from tiny import completion, tiny_tokenizer

from groupline.chat import completion_text, encode_answer, encode_prompt, prompt_text, template_prefill

TALK = ({"role": "system", "content": "the end."}, {"role": "user", "content": "one and two"})
WRITTEN = "<|im_start|>system\nthe end.<|im_end|>\n<|im_start|>user\none and two<|im_end|>\n<|im_start|>assistant\n"
# As Qwen 3's: thinking can be switched off, and when it is on the prompt opens it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def tokenizer(**changes):
    own = copy.deepcopy(tiny_tokenizer())
    for key, value in changes.items():
        setattr(own, key, value)
    return own


def with_start(base):
    """A tokenizer that puts a start token before plain text, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    start = base.convert_tokens_to_ids("<|im_start|>")
    base.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    return base, start


def test_a_conversation_goes_through_the_template():
    own = tokenizer()
    assert prompt_text(own, TALK) == WRITTEN
    ids = encode_prompt(own, TALK)
    assert own.decode(ids) == WRITTEN
    assert ids[0] == own.convert_tokens_to_ids("<|im_start|>")  # one id, not the characters of its name
    assert ids.count(own.eos_token_id) == 2
    assert encode_prompt(own, list(TALK)) == ids


def test_plain_text_stays_as_it_is():
    own = tokenizer()
    assert prompt_text(own, "one and two") == "one and two"
    assert own.decode(encode_prompt(own, "one and two")) == "one and two"
    assert prompt_text(tokenizer(chat_template=None), "one") == "one"  # needs no template


def test_the_template_writes_its_own_start_and_plain_text_gets_the_tokenizers():
    own, start = with_start(tokenizer())
    plain = own("one", add_special_tokens=False)["input_ids"]
    assert encode_prompt(own, "one") == [start, *plain]
    ids = encode_prompt(own, TALK)
    assert ids[:2] != [start, start]
    assert ids == encode_prompt(tokenizer(), TALK)
    assert encode_answer(own, "one") == [*plain, own.eos_token_id]


def test_a_conversation_without_a_template_names_tokenizer_and_both_remedies():
    own = tokenizer(chat_template=None, name_or_path="EleutherAI/pythia-70m")
    expected = (
        r"the tokenizer EleutherAI/pythia-70m has no chat template.*"
        r"set tokenizer\.chat_template.*or use plain-text prompts"
    )
    for call in (prompt_text, encode_prompt):
        with pytest.raises(ValueError, match=expected):
            call(own, TALK)
    with pytest.raises(ValueError, match=rf"the tokenizer {type(tiny_tokenizer()).__name__} has no"):
        prompt_text(tokenizer(chat_template=None, name_or_path=""), TALK)


def test_settings_pass_through_to_the_template():
    own = tokenizer(chat_template=THINKING)
    opened = prompt_text(own, TALK)
    closed = prompt_text(own, TALK, {"enable_thinking": False})
    assert opened.endswith("<|im_start|>assistant\n<think>\n")
    assert closed.endswith("<think>\n\n</think>\n\n")
    assert own.decode(encode_prompt(own, TALK, {"enable_thinking": False})) == closed


def test_thinking_that_the_prompt_opened_is_part_of_the_answer():
    own = tokenizer(chat_template=THINKING)
    assert template_prefill(prompt_text(own, TALK)) == "<think>\n"
    assert template_prefill(prompt_text(own, TALK, {"enable_thinking": False})) == ""


@pytest.mark.parametrize(
    ("text", "prefill"),
    [
        ("", ""),
        ("a question", ""),
        ("<think>", "<think>"),
        ("user: hi\nassistant: <think>\n\n", "<think>\n\n"),
        ("<think>one</think>", ""),
        ("<think> half a thought", ""),
        ("what does <think> mean?", ""),
        ("<think>\n</think>\n<think>\n", "<think>\n"),
        ("<thinking>\n", ""),
    ],
)
def test_prefill_is_what_stands_at_the_end_of_the_prompt(text, prefill):
    assert template_prefill(text) == prefill


def test_a_supervised_answer_ends():
    own = tokenizer()
    ids = encode_answer(own, "one and two")
    assert own.decode(ids[:-1]) == "one and two"
    assert ids[-1] == own.eos_token_id
    assert encode_answer(own, "") == [own.eos_token_id]


def test_an_answer_that_could_not_end_is_refused():
    with pytest.raises(ValueError, match=r"has no eos_token.*set tokenizer\.eos_token"):
        encode_answer(tokenizer(eos_token=None), "one")


def test_completions_are_read_without_special_tokens():
    own = tokenizer()
    ids = [*own("one and two", add_special_tokens=False)["input_ids"], own.eos_token_id]
    assert completion_text(own, completion([1], ids)) == "one and two"
    assert completion_text(own, completion([1], [own.eos_token_id])) == ""
    think = own("<think>one</think>two", add_special_tokens=False)["input_ids"]
    assert completion_text(own, completion([1], think)) == "<think>one</think>two"  # judges need these


def test_ids_that_would_be_tokenised_otherwise_keep_their_text():
    own = tokenizer()
    letters = [own.convert_tokens_to_ids(c) for c in "the"]
    assert own("the")["input_ids"] != letters
    assert completion_text(own, completion([1], letters)) == "the"


def test_half_a_character_is_no_error():
    own = tokenizer()
    ids = own("๔", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    assert completion_text(own, completion([1], ids)) == "๔"
    assert completion_text(own, completion([1], ids[:2])).strip("\ufffd") == ""
