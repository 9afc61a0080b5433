"""The number an answer gives: cases R8, R9, R11 to R17, and agreement with published labels."""

from __future__ import annotations

import json
import os
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from groupline.rewards import correct_number, extract_number, same_number, unreadable_answers

SHARED = Path(os.environ.get("GROUPLINE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # R9: digits of any script, signs, separators, ends of sentences.
        ("๔๒", 42),
        ("٤٢", 42),
        ("४२", 42),
        ("４２", 42),
        ("-7", -7),
        ("−7", -7),
        ("1,234", 1234),
        ("1,234.00", 1234),
        ("12.0", 12),
        ("She pays $18.", 18),
        ("18%", 18),
        ("The answer is 5.", 5),
        ("1，234", 1234),
        ("١٬٢٣٤", 1234),
        ("٣٫٥", Fraction(7, 2)),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("1'234", 1234),
        ("1\u00a0234", 1234),
        ("1\u202f234", 1234),
        ("1,234,567", 1234567),
        ("฿1,234", 1234),
        ("1,234 บาท", 1234),
        ("USD 1,234", 1234),
        ("+1234", 1234),
        ("1.234e3", 1234),
        (r"1.234\times10^{3}", 1234),
        ("0.25", Fraction(1, 4)),
        ("-.5", Fraction(-1, 2)),
        # Whose minus it is.
        ("5-3", 3),
        ("(5)-3", 3),
        ("pages 5-10", 10),
        ("Covid-19", 19),
        ("x = -7", -7),
        ("x=-7", -7),
        ("x = - 7", -7),
        ("10 - 3", 3),
        ("- 7", 7),
        ("-$3.00", -3),
        ("$-3$", -3),
        ("คำตอบคือ-7", -7),
        ("答案是-7", -7),
        # Fractions.
        ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)),
        ("4/6", Fraction(2, 3)),
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("on 1/2/2024", 2024),
        # R11: boxes.
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"$\boxed{\dfrac{1}{2}}$ as 7 said", Fraction(1, 2)),
        (r"\boxed{3} ... \boxed{4}", 4),
        (r"\boxed{\text{13}}", 13),
        (r"\boxed{x=\frac12} and 9", Fraction(1, 2)),
        # R13: marks and text around and after.
        (r"28\%", 28),
        ("#### 42\nSo 7 of the 9 are left.", 42),
        ("#### $1,234.00 in 3 weeks", 1234),
        ("#### -3", -3),
        ("#### 1\n#### 2 is right", 2),
        ("#### Step three\nThe answer is 8", 8),
        ("$1,234.00", 1234),
        ("**73**", 73),
        ("4 + 4\nA: 8", 8),
        # Exponents and indices belong to units and names.
        ("25 cm^2", 25),
        ("25 m²", 25),
        ("x_2 = 5", 5),
        # After the thinking.
        ("<think>1 + 1 = 2</think>\n3", 3),
        ("so 4</think>5", 5),
    ],
)
def test_reads(text: str, number: int | Fraction) -> None:
    assert extract_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "x²",
        "①",
        "nan",
        "inf",
        "-inf",
        "<think>so 42</think>",
        "<think>so 42",
        "6</think>7<think>8",
        r"\boxed{}",
        r"1 \boxed{3} ... \boxed{",
        "1/0",
        "72/4",
        "10^2",
        "10²",
        "1½",
        r"4\sqrt{2}",
        r"\frac{\pi}{2}",
        "2^{10^{9}}",
        "1e999999999",
        "9" * 5000,
        "(" * 10000,
    ],
)
def test_reads_no_number(text: str) -> None:
    assert extract_number(text) is None


@pytest.mark.parametrize("text", ["234", "12,34", "1,23,4", "-1234", "1235", "", "1234.5", "1234567", "1.234,00"])
def test_is_not_1234(text: str) -> None:
    assert correct_number(completions=[text], answer=["1234"]) == [0.0]


IS_1234 = ["1234", "1,234", "1234.00", "1,234.00", "$1,234.00", "USD 1,234", "฿1,234", "1,234 บาท", "1\u00a0234",
           "1\u202f234", "1'234", "1.234e3", r"1.234\times10^{3}", "1{,}234", "1,234 apples", "+1234"]  # fmt: skip


def test_c33_writings_of_a_number_and_its_sign() -> None:
    assert correct_number(completions=IS_1234, answer=["1234"] * len(IS_1234)) == [1.0] * len(IS_1234)
    minus = ["-3", "−3", r"\boxed{-3}", "#### -3", "$-3$", "-$3.00"]
    assert correct_number(completions=minus, answer=["-3"] * len(minus)) == [1.0] * len(minus)
    assert correct_number(completions=["3", "(3)"], answer=["-3", "-3"]) == [0.0, 0.0]


def test_c31_numbers_beyond_a_float_are_told_apart() -> None:
    """As floats both would be infinite, hence equal."""
    assert float("1e400") == float("1e500")
    assert correct_number(completions=["1e500", "1e400", "nan"], answer=["1e400"] * 3) == [0.0, 1.0, 0.0]


def test_r8_number_only_inside_the_thinking() -> None:
    assert correct_number(completions=["<think>so 42</think>"], answer=["42"]) == [0.0]


def test_r12_comparison_is_exact() -> None:
    assert not same_number("1/2004", extract_number("0"))
    assert not same_number("1/3", extract_number("0.333333333333333333"))
    assert same_number("1/2004", extract_number("2/4008"))


def test_r14_long_numbers_are_wrong_and_raise_nothing() -> None:
    assert sys.get_int_max_str_digits() == 4300
    assert correct_number(completions=["9" * 5000, "9" * 4200], answer=["99", "99"]) == [0.0, 0.0]
    assert same_number("9" * 3999, extract_number("9" * 3999))


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "1,234" * 200_000,
        "1," + "111," * 250_000 + "1111",
        "1 " * 500_000,
        "1" + " " * 1_000_000,
        "1/" * 500_000,
        r"\frac{" * 160_000,
        r"\boxed{" * 140_000,
        "#### " * 200_000,
        "<think>" * 140_000,
        "$" * 1_000_000 + "5",
        "-" * 1_000_000 + "5",
        "๙" * 1_000_000,
    ],
    ids=lambda text: text[:8],
)
def test_time_is_linear(text: str) -> None:
    start = time.perf_counter()
    extract_number(text)
    assert time.perf_counter() - start < 5


def test_r15_nothing_is_evaluated(tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    attacks = [
        f"__import__('os').system('touch {marker}')",
        f"\\boxed{{__import__('os').system('touch {marker}')}}",
        f"#### 1 if open({str(marker)!r}, 'w') else 2",
        "9**9**9**9",
    ]
    correct_number(completions=attacks, answer=["1"] * len(attacks))
    assert not marker.exists()


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN", "Infinity"])
def test_r16_not_a_number_is_wrong(text: str) -> None:
    assert correct_number(completions=[text], answer=["0"]) == [0.0]


def test_r17_gold_without_a_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"2 gold answers have no number: row 1 \('see figure'\), row 3 \(''\)"):
        correct_number(completions=["1"] * 4, answer=["1", "see figure", "2", ""])
    assert unreadable_answers(["1", "see figure", 2, None]) == [1, 3]


def test_gold_may_be_text_or_a_number() -> None:
    gold = ["1,234", "#### 18", 42, 42.0, "Half of it.\n#### 1,000"]
    assert correct_number(completions=["1234", "18", "42", "42.0", "1000"], answer=gold) == [1.0] * 5
    same = [42, 42.0, "42", np.int64(42), np.float32(42), Decimal("42"), Fraction(42)]  # C41
    assert correct_number(completions=["42"] * 7, answer=same) == [1.0] * 7


def test_completions_may_be_conversations() -> None:
    talk = [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "<think>5</think>2"},
        {"role": "user", "content": "4"},
    ]
    assert correct_number(completions=[talk, []], answer=["2", "2"]) == [1.0, 0.0]


def test_prefill_tells_thinking_that_the_template_opened() -> None:
    texts = ["2 + 2 = 4", "2 + 2 = 4</think>4"]
    assert correct_number(completions=texts, answer=["4", "4"], prefill="<think>\n") == [0.0, 1.0]
    with pytest.raises(ValueError, match="prefill has 1 rows for 2"):
        correct_number(completions=texts, answer=["4", "4"], prefill=[""])


def test_a_gold_answer_is_needed_for_each() -> None:
    with pytest.raises(ValueError, match="answer has 1 rows for 2"):
        correct_number(completions=["1", "2"], answer=["1"])


def test_agrees_with_every_published_label() -> None:
    rows = [json.loads(line) for line in shared("gsm8k_solutions.jsonl").read_text("utf-8").splitlines()]
    texts = [solution["text"] for row in rows for solution in row["solutions"]]
    gold = [row["gold"] for row in rows for _ in row["solutions"]]
    labels = [float(solution["correct"]) for row in rows for solution in row["solutions"]]
    assert len(labels) == 2640
    assert correct_number(completions=texts, answer=gold) == labels
