"""The one border between text and token ids: prompts in, completions out, and supervised answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from groupline.records import Completion, Message


def prompt_text(
    tokenizer: Any, prompt: str | Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> str:
    """The text the model continues: plain prompts as they are, conversations through the chat template.

    Raises ValueError when a conversation meets a tokenizer without a template.
    """
    if isinstance(prompt, str):
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(
            f"the tokenizer {name} has no chat template, and the prompt is a conversation; set tokenizer.chat_template "
            "(for instance from the instruct version of the model), or use plain-text prompts"
        )
    text: str = tokenizer.apply_chat_template(
        list(prompt), tokenize=False, add_generation_prompt=True, **(template_kwargs or {})
    )
    return text


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt. A template writes its own special tokens; plain text gets the tokenizer's."""
    text = prompt_text(tokenizer, prompt, template_kwargs)
    ids: list[int] = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    return ids


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a supervised answer, ended by the end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos_token, so a supervised answer could not end; set tokenizer.eos_token"
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


def completion_text(tokenizer: Any, completion: Completion) -> str:
    """What the model wrote, special tokens removed, cut before the stop string that ended it."""
    text: str = tokenizer.decode(list(completion.ids), skip_special_tokens=True)
    if completion.stop_string is None:
        return text
    # The last token completed the stop string, so that is where it is looked for: not at an earlier place that only
    # looks like it once special tokens are removed, nor at a later overlapping one ("\n\n" in "\n\n\n").
    before: str = tokenizer.decode(list(completion.ids[:-1]), skip_special_tokens=True)
    known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
    at = text.find(completion.stop_string, max(0, known - len(completion.stop_string) + 1))
    return text if at < 0 else text[:at]


def template_prefill(text: str) -> str:
    """The part of the answer that the template already wrote: "<think>\\n" when the prompt ends by opening it.

    Judges see it in front of what the model wrote, so a format reward does not blame the model for the template.
    """
    match = re.search(r"<think>\s*\Z", text)
    return match.group(0) if match else ""
