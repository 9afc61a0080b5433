"""Whether an answer thinks first and then answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groupline.rewards.text import THINK_CLOSE, THINK_OPEN, CompletionLike, whole_texts

_NAIVE = re.compile(rf"\s*{THINK_OPEN}.*?{THINK_CLOSE}\s*\S", re.DOTALL)


def think_format(
    *, completions: Sequence[CompletionLike], prefill: str | Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """1.0 for exactly one `<think>...</think>`, at the start, with content in it and after it; otherwise 0.0.

    Content is at least one letter or digit: spaces, zero-width signs and dots alone are nothing.
    prefill: what the chat template had opened already, see `whole_texts`.
    """
    return [float(_thinks_then_answers(text)) for text in whole_texts(completions, prefill)]


def naive_think_format(
    *, completions: Sequence[CompletionLike], prefill: str | Sequence[str] | None = None, **kwargs: Any
) -> list[float]:
    """The judge that reward hacking is shown with: it looks for the tags and does not mind an empty `<think></think>`.

    A policy earns its 1.0 for nothing, by not thinking at all. Train with `think_format` instead.
    """
    return [float(_NAIVE.match(text) is not None) for text in whole_texts(completions, prefill)]


def _thinks_then_answers(text: str) -> bool:
    text = text.strip()
    if not text.startswith(THINK_OPEN) or text.count(THINK_OPEN) != 1 or text.count(THINK_CLOSE) != 1:
        return False
    thought, _, answer = text.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return any(c.isalnum() for c in thought) and any(c.isalnum() for c in answer)
