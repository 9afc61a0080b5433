"""From a completion, in either of its shapes, to the text that a judge reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")
_BRACE = re.compile(r"[{}]")

CompletionLike = str | Sequence[Mapping[str, Any]]


def completion_text(completion: CompletionLike) -> str:
    """The text of a completion: itself, or the content of its last assistant message ("" if it has none)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return ""


def whole_texts(completions: Sequence[CompletionLike], prefill: str | Sequence[str] | None = None) -> list[str]:
    """Each completion's text with what the chat template had already opened in its place put in front.

    prefill: one text for all, or one per completion; a template that ends the prompt with `<think>` opens it.

    Raises:
        ValueError: as many prefills as completions are needed, and their numbers differ.
    """
    if prefill is None or isinstance(prefill, str):
        prefill = [prefill or ""] * len(completions)
    if len(prefill) != len(completions):
        raise ValueError(f"prefill has {len(prefill)} rows for {len(completions)} completions")
    return [(opened or "") + completion_text(c) for opened, c in zip(prefill, completions, strict=True)]


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`; the whole text if it never thinks; None if a `<think>` stays open."""
    _, closed, rest = text.rpartition(THINK_CLOSE)
    answer = rest if closed else text
    return None if THINK_OPEN in answer else answer


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{}` (or `\\fbox{}`); "" if it is never closed, None if there is none."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return ""
