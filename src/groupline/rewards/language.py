"""Whether an answer is written in the language that was asked for, judged by its script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groupline.rewards.text import CompletionLike, whole_texts

# Code point ranges, ends included; of these only letters are counted. Source: Unicode character database, Blocks.txt.
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "th": ((0x0E00, 0x0E7F),),
    "zh": ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
    "en": ((0x0041, 0x024F), (0x1E00, 0x1EFF), (0xFF21, 0xFF5A)),
}
_MARKUP = re.compile(r"</?[A-Za-z][A-Za-z0-9_]{0,19}>|\\[A-Za-z]++")


def language_share(
    *,
    completions: Sequence[CompletionLike],
    language: str | Sequence[str | None] | None = None,
    prefill: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where more than half of the letters belong to the language's script, otherwise 0.0.

    language: `th` (Thai, the default), `zh` (Chinese: Han) or `en` (Latin), for all or one per completion; a row with
    None is not judged. A text without letters gets 0.0.
    Letters are the characters of Unicode category L. Thai vowels and tone marks that combine with a consonant are
    marks (Mn), not letters, so a word counts the same however it is marked. Tags such as `<think>` and LaTeX commands
    such as `\\boxed` are taken out first.

    Raises:
        ValueError: a language is unknown, or there is not one per completion.
    """
    if language is None or isinstance(language, str):
        language = [language or "th"] * len(completions)
    if len(language) != len(completions):
        raise ValueError(f"language has {len(language)} rows for {len(completions)} completions")
    for row, code in enumerate(language):
        if code is not None and code not in SCRIPTS:
            raise ValueError(f"language of row {row} is {code!r}; it must be one of {', '.join(sorted(SCRIPTS))}")
    texts = whole_texts(completions, prefill)
    return [
        None if code is None else float(share(text, code) > 0.5) for code, text in zip(language, texts, strict=True)
    ]


def share(text: str, language: str) -> float:
    """The part of the text's letters, from 0 to 1, that belong to the language's script; 0 if it has no letters."""
    letters = [ord(c) for c in _MARKUP.sub("", text) if c.isalpha()]
    own = sum(any(low <= letter <= high for low, high in SCRIPTS[language]) for letter in letters)
    return own / len(letters) if letters else 0.0
