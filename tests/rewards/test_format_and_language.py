"""Format and language: cases R6, R7 and R10."""

from __future__ import annotations

import pytest

from groupline.rewards import language_share, naive_think_format, think_format

GOOD = "<think>5 + 3 = 8</think>\n8"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (GOOD, 1.0),
        ("  \n" + GOOD, 1.0),
        # R6: earned by nothing.
        ("<think></think>42", 0.0),
        ("<think>  \n </think>42", 0.0),
        ("<think></think> 1 </think>42", 0.0),
        ("<think>\u200b</think>42", 0.0),
        ("<think>...</think>42", 0.0),
        # R7: several, never closed, closed twice, turned round, nested.
        ("<think>1</think><think>2</think>3", 0.0),
        ("<think>1 2 3", 0.0),
        ("<think>1</think>2</think>3", 0.0),
        ("</think>1<think>2", 0.0),
        ("<think><think>1</think>2", 0.0),
        # Nothing after it, or something before it.
        ("<think>1</think>", 0.0),
        ("<think>1</think> \n.", 0.0),
        ("So <think>1</think>2", 0.0),
        ("8", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text: str, value: float) -> None:
    assert think_format(completions=[text, [{"role": "assistant", "content": text}]]) == [value, value]


def test_think_format_with_what_the_template_opened() -> None:
    text = "2+2 is 4\n</think>\nThe answer is 4."
    assert think_format(completions=[text]) == [0.0]
    assert think_format(completions=[text, "2+2 is 4"], prefill="<think>\n") == [1.0, 0.0]
    assert think_format(completions=[text, GOOD], prefill=["<think>\n", ""]) == [1.0, 1.0]


def test_the_naive_judge_pays_for_empty_thinking() -> None:
    texts = ["<think></think>42", "<think> </think> 42", GOOD, "42", "<think>1"]
    assert naive_think_format(completions=texts) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert think_format(completions=texts) == [0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "language", "value"),
    [
        ("<think>มีแอปเปิล 5 + 3 = 8 ผล</think>\n8", "th", 1.0),
        ("<think>apples: 5 + 3 = 8</think>\n8", "th", 0.0),
        ("<think>apples: 5 + 3 = 8</think>\n8", "en", 1.0),
        ("<think>苹果有 5 + 3 = 8 个</think>\n8", "zh", 1.0),
        ("<think>苹果有 5 + 3 = 8 个</think>\n8", "th", 0.0),
        # R10: no letters.
        ("1 + 1 = 2", "th", 0.0),
        ("", "th", 0.0),
        # Two letters each: not more than half. One more decides.
        ("กข ab", "th", 0.0),
        ("กขค ab", "th", 1.0),
        # Four combining signs are no letters: 1 Thai letter against 2 Latin ones.
        ("ก\u0e34\u0e48\u0e38\u0e49 ab", "th", 0.0),
        # Tags and commands are no letters; words in them are.
        (r"<think>ก</think>\boxed{8}", "th", 1.0),
        (r"ก \text{two words}", "th", 0.0),
        ("Größe", "en", 1.0),
        ("ひらがな", "zh", 0.0),
    ],
)
def test_language_share(text: str, language: str, value: float) -> None:
    assert language_share(completions=[text], language=language) == [value]


def test_language_share_reads_thai_by_default_and_a_column() -> None:
    texts = ["กขค", "abc", "中文字", "abc"]
    assert language_share(completions=texts) == [1.0, 0.0, 0.0, 0.0]
    assert language_share(completions=texts, language=["th", "en", "zh", None]) == [1.0, 1.0, 1.0, None]


def test_language_share_refuses_what_it_cannot_judge() -> None:
    with pytest.raises(ValueError, match="row 1 is 'fr'; it must be one of en, th, zh"):
        language_share(completions=["a", "b"], language=["en", "fr"])
    with pytest.raises(ValueError, match="language has 1 rows for 2"):
        language_share(completions=["a", "b"], language=["en"])
