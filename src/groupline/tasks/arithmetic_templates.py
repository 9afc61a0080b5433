"""How a template of the arithmetic task is built and how its numbers are drawn.

A template is one situation: the steps of its calculation and its wording in each language, side by side.
The wordings of one template ask for the same numbers, so a problem is the same problem in every language.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Language = Literal["th", "zh", "en"]
Split = Literal["train", "held_out"]
Wording = tuple[str, ...]

RESULT_NAMES = "pqr"
SMALL_NAMES = "mn"
LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Template:
    """One situation in three languages.

    steps: one "x op y" per step, written without spaces. x and y are a number that the question names (`a b c d`,
    or `m n` for a number that is always small), the result of an earlier step (`p q r`), or a constant such as 100.
    th, zh, en: the question, then one clause per step in which `{}` stands for the step's equation.
    The question may use `{name}` for a person.
    """

    key: str
    steps: tuple[str, ...]
    th: Wording
    zh: Wording
    en: Wording

    def wording(self, language: Language) -> Wording:
        return {"th": self.th, "zh": self.zh, "en": self.en}[language]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A template with its numbers: `values` by name, the equation of each step, and the final result."""

    template: Template
    values: Mapping[str, int]
    equations: tuple[str, ...]
    result: int

    @property
    def key(self) -> str:
        """Names the problem whatever its language: the template and its numbers by name."""
        return f"{self.template.key}:" + ",".join(f"{name}={value}" for name, value in sorted(self.values.items()))

    @property
    def split(self) -> Split:
        """One problem in five is held out, decided by the template and the set of its numbers alone.

        The order of the numbers does not count, so `3 + 5` is on the same side as `5 + 3`, and neither does the
        language or the seed, so a translation of a training problem is never held out.
        """
        text = f"{self.template.key}:{sorted(self.values.values())}"
        return "held_out" if hashlib.sha256(text.encode()).digest()[0] % 5 == 0 else "train"


def draw_int(rng: random.Random, low: int, high: int) -> int:
    """A whole number from low to high, both included, from `random()` alone: the one stream Python promises to keep."""
    return low + int(rng.random() * (high - low + 1))


def draw_numbers(template: Template, rng: random.Random, max_number: int, max_factor: int) -> Drawn | None:
    """Draw the numbers of one problem; None when this draw breaks a rule and another must be tried.

    Rules: every result is a positive whole number below 1000, division is exact, nothing is smaller than 2.
    """
    values: dict[str, int] = {}
    results: dict[str, int] = {}
    equations = []
    for name, step in zip(RESULT_NAMES, template.steps, strict=False):
        operator = next(sign for sign in "+-*/" if sign in step)
        left, right = step.split(operator)
        known = {**values, **results}
        x = int(left) if left.isdecimal() else known.get(left)
        y = int(right) if right.isdecimal() else known.get(right)
        if operator == "*":
            x = x if x is not None else draw_int(rng, 2, max_factor)
            y = y if y is not None else draw_int(rng, 2, max_factor)
            result = x * y
        elif operator == "/":
            if x is None:
                y = draw_int(rng, 2, max_factor)
                x = y * draw_int(rng, 2, max_factor)
            if y is None:
                divisors = [n for n in range(2, min(max_factor, x // 2) + 1) if x % n == 0]
                if not divisors:
                    return None
                y = divisors[draw_int(rng, 0, len(divisors) - 1)]
            if x % y:
                return None
            result = x // y
        else:
            x = x if x is not None else draw_int(rng, 2, max_factor if left in SMALL_NAMES else max_number)
            if y is None:
                high = max_factor if right in SMALL_NAMES else max_number
                high = min(high, x - 1) if operator == "-" else high
                if high < 2:
                    return None
                y = draw_int(rng, 2, high)
            result = x + y if operator == "+" else x - y
        if not 0 < result < LIMIT:
            return None
        for letter, number in ((left, x), (right, y)):
            if not letter.isdecimal() and letter not in results:
                values[letter] = number
        results[name] = result
        equations.append(f"{x} {operator} {y} = {result}")
    return Drawn(template, values, tuple(equations), results[RESULT_NAMES[len(template.steps) - 1]])
