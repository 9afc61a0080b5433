"""The number a text answers with, and whether it is the right one.

Texts are only ever read by regular expressions and `int`; nothing in them is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from groupline.rewards.text import CompletionLike, after_thinking, last_box, whole_texts

MAX_DIGITS = 4000
_GROUP = r"(?:[,，٬'’\u00a0\u2009\u202f]|\{,\}|\\,)"
_SIGN = r"[-+−－﹣＋]"
_MINUS = "-−－﹣"
_WHOLE = rf"\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)|\d++"
# Possessive quantifiers (`++`, `*+`) never give back what they took, and a run of thousands gives back at most its last
# group, so a search is linear in the text's length.
_NUMBER = re.compile(
    rf"""
    (?:(?P<mixed>\d++)[ ]*+)?+
      \\[dt]?frac\s*+(?:\{{\s*+(?P<top_sign>{_SIGN}?)(?P<top>\d++)\s*+\}}|(?P<top_digit>\d))
                 \s*+(?:\{{\s*+(?P<bottom>\d++)\s*+\}}|(?P<bottom_digit>\d))
    | (?P<mixed_plain>\d++)[ ](?P<over>\d++)/(?P<under>\d++)(?![/\d])
    | (?:(?P<whole>{_WHOLE})(?:[.．٫](?P<decimals>\d++))?+ | (?<![\d.])[.](?P<bare_decimals>\d++))
      (?: [eE](?P<exponent>[-+−]?\d++)(?!\w)
        | \s*+(?:\\times|\\cdot|[×*])\s*+10\^\{{?(?P<power>[-+−]?\d++)\}}?
        | [ ]?/[ ]?(?P<denominator>\d++)(?![/\d.,]\d)
      )?+
    """,
    re.VERBOSE,
)
_MARKED = re.compile(r"####[ \t]*+(?=[^\w\s]{0,4}[ \t]?[^\w\s]?\d)")
_NOT_A_VALUE = re.compile(r"(?:\^|_)\{?[-+−]?$")
_INSIDE = re.compile(r"(?:√|\\sqrt\s?\{?|\\sqrt\[\d+\]\{?|\}\{)$")


def extract_number(text: str) -> Fraction | None:
    """The number that the text answers with, read after its thinking; None if there is none.

    Where it is looked for, first match wins: the last `\\boxed{...}` (the last number inside); the number right after
    the last `####`; the last number of the text. A broken or empty last box means no answer.
    Thinking that was opened and never closed means no answer.

    What counts as a number:

    - decimal digits of any script (`๔๒`, `٤٢`, `４２`), but not superscripts and circled digits;
    - thousands separated by commas (also full-width, Arabic, `{,}` and `\\,` of LaTeX), apostrophes or no-break spaces,
      in groups of three; a decimal point, never a decimal comma;
    - a minus that stands alone before the number or its currency sign; not one that joins it to a digit, a closing
      bracket or a cased letter (`5-3`, `pages 5-10`, `Covid-19`), and not a list dash with a space (`- 7`);
    - `1.5e3` and `1.5 \\times 10^{3}`;
    - fractions of whole numbers, `1/2`, `\\frac{1}{2}`, `\\frac12`, also mixed (`1 1/2`). One that makes a whole
      number, such as `72/4`, is a division left undone, which is no answer; a date such as `1/2/2024` is no fraction.

    A unit, percent or currency sign changes nothing: `18%` and `$18` are 18. Exponents and indices (`cm^2`, `x_2`) are
    not numbers of the answer. A power (`10^2`) or a root as the answer, and more than 4000 digits, give None.
    """
    answer = after_thinking(text)
    if answer is None:
        return None
    box = last_box(answer)
    if box is not None:
        return _last_number(box)
    marks = list(_MARKED.finditer(answer))
    if marks:
        match = _NUMBER.search(answer, marks[-1].end())
        return _value(answer, match) if match else None
    return _last_number(answer)


def same_number(gold: str, number: Fraction | None) -> bool:
    """Whether the number is exactly the one that the gold answer names; no tolerance, and None is never right.

    Raises:
        ValueError: the gold answer has no number.
    """
    expected = _gold_number(gold)
    if expected is None:
        raise ValueError(f"the gold answer {gold[:80]!r} has no number")
    return number == expected


def unreadable_answers(answers: Sequence[Any]) -> list[int]:
    """The rows whose gold answer has no number, so that they can be named before training starts."""
    return [row for row, gold in enumerate(answers) if _gold_number(str(gold)) is None]


def correct_number(
    *,
    completions: Sequence[CompletionLike],
    answer: Sequence[Any],
    prefill: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1.0 where the completion answers with the number of its gold answer, otherwise 0.0.

    answer: gold answers, one per completion, as text or numbers; `1,234`, `18` and a solution ending `#### 18` all do.
    prefill: see `whole_texts`.

    Raises:
        ValueError: a gold answer has no number (the rows are named), or there is not one per completion.
    """
    if len(answer) != len(completions):
        raise ValueError(f"answer has {len(answer)} rows for {len(completions)} completions")
    unreadable = unreadable_answers(answer)
    if unreadable:
        rows = ", ".join(f"row {row} ({str(answer[row])[:40]!r})" for row in unreadable[:5])
        raise ValueError(f"{len(unreadable)} gold answers have no number: {rows}")
    texts = whole_texts(completions, prefill)
    return [float(same_number(str(gold), extract_number(text))) for gold, text in zip(answer, texts, strict=True)]


@lru_cache(maxsize=4096)
def _gold_number(gold: str) -> Fraction | None:
    return extract_number(gold)


def _last_number(text: str) -> Fraction | None:
    last = None
    for match in _NUMBER.finditer(text):
        if not _NOT_A_VALUE.search(text, max(0, match.start() - 3), match.start()):
            last = match
    return _value(text, last) if last else None


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    if _INSIDE.search(text, max(0, match.start() - 12), match.start()) or _goes_on(text[match.end() : match.end() + 6]):
        return None
    number = _magnitude(match, in_date=text[max(0, match.start() - 1) : match.start()] == "/")
    if number is None:
        return None
    return -number if _is_negative(text, match.start()) else number


def _goes_on(rest: str) -> bool:
    """Whether a power or a root follows, which makes the number part of an expression."""
    return rest.startswith(("^", "√", "\\sqrt")) or (bool(rest) and unicodedata.category(rest[0]) == "No")


def _magnitude(match: re.Match[str], in_date: bool) -> Fraction | None:
    part = match.groupdict()
    if max((len(digits) for digits in part.values() if digits), default=0) > MAX_DIGITS:
        return None
    bottom = part["bottom"] or part["bottom_digit"] or part["under"] or part["denominator"]
    if bottom is not None and in_date:
        return Fraction(int(bottom))
    if bottom is not None and part["decimals"] is None and part["bare_decimals"] is None:
        top = part["top"] or part["top_digit"] or part["over"] or _digits(part["whole"])
        if int(bottom) == 0 or int(top) % int(bottom) == 0:
            return None
        fraction = Fraction(int(top), int(bottom))
        if part["top_sign"] and part["top_sign"] in _MINUS:
            fraction = -fraction
        return fraction + int(part["mixed"] or part["mixed_plain"] or 0)
    if bottom is not None:
        return None
    decimals = part["decimals"] or part["bare_decimals"] or ""
    exponent = (part["exponent"] or part["power"] or "0").replace("−", "-")
    shift = int(exponent) - len(decimals)
    if abs(shift) > MAX_DIGITS:
        return None
    return Fraction(int(_digits(part["whole"]) + decimals)) * Fraction(10) ** shift


def _digits(whole: str | None) -> str:
    return "".join(c for c in whole or "" if c.isdecimal())


def _is_negative(text: str, start: int) -> bool:
    """Whether the number that begins at `start` has a minus sign of its own."""
    i = start - 1
    while i >= 0 and (text[i] == "\\" or unicodedata.category(text[i]) == "Sc"):
        i -= 1
    spaced = i >= 1 and text[i] == " "
    if spaced:
        i -= 1
    if i < 0 or text[i] not in _MINUS:
        return False
    before = text[:i].rstrip(" ")[-1:] if spaced else text[i - 1 : i]
    if spaced:
        return before != "" and before in "=:：＝≈(（"
    return not (
        before.isdecimal() or before.lower() != before.upper() or (before != "" and before in ")]}%）" + _MINUS)
    )
