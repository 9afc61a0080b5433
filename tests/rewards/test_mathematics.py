"""math-verify in worker processes: what it says, its deadline, and what is counted."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from groupline import Problem, Reward
from groupline.rewards import MathVerify, call_rewards, math_verify

ENDLESS = "$9999999^{99999999}-1$"  # SymPy writes it out, digit by digit


@pytest.fixture(scope="module")
def judge() -> Iterator[MathVerify]:
    judge = MathVerify(seconds=20.0, workers=2)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("\\frac12", "The answer is 0.5", 1.0),
        ("$\\frac{1}{2}$", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("x^2+1", "$x^2$", 0.0),
        ("2x", "$2$", 0.0),  # a bare gold answer is taken whole, not only its first number
        ("\\{1,2\\}", "$\\{2,1\\}$", 1.0),
        ("(1,2)", "$(2,1)$", 0.0),
        ("5 + 13 = 18\n#### 18", "so 18", 1.0),
        ("1,234 dollars", "\\boxed{1234}", 1.0),
        ("3", "\\boxed{3}, not $4$", 1.0),
        ("18", "<think>17</think>18", 1.0),
        ("18", "<think>17</think>", 0.0),
        ("18", "<think>18", 0.0),
        ("18", "I do not know", 0.0),
    ],
)
def test_what_is_equal(judge: MathVerify, gold: str, text: str, value: float) -> None:
    assert judge(completions=[text], answer=[gold]) == [value]


def test_rows_keep_their_order(judge: MathVerify) -> None:
    golds = [str(n) for n in range(40)]
    texts = [f"\\boxed{{{n if n % 3 else n + 1}}}" for n in range(40)]
    assert judge(completions=texts, answer=golds) == [float(n % 3 > 0) for n in range(40)]


def test_conversations_and_prefill(judge: MathVerify) -> None:
    talk = [[{"role": "assistant", "content": "x = 3</think>\n3"}], [{"role": "assistant", "content": "3"}]]
    assert judge(completions=talk, answer=["3", "3"], prefill=["<think>", "<think>"]) == [1.0, 0.0]


def test_a_comparison_over_the_deadline_is_killed_counted_and_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """Called in a thread, where math-verify's own limit cannot work; what comes after finds a new worker."""
    judge = MathVerify(seconds=1.0, workers=1)
    told: dict[str, float] = {}
    values: list[float | None] = []

    def call() -> None:
        values.extend(
            judge(completions=["7", ENDLESS, "8"], answer=["7", "3", "7"], log_metric=lambda k, v: told.update({k: v}))
        )

    try:
        assert judge(completions=["1"], answer=["1"]) == [1.0]
        (before,) = judge._pool.pids()
        with caplog.at_level(logging.WARNING, "groupline.rewards"):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        (after,) = judge._pool.pids()
    finally:
        judge.close()
    assert values == [1.0, None, 0.0]
    assert after != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert (judge.judged, judge.timeouts, judge.died) == (3, 1, 0)
    assert told == {"math_verify/timeouts": 1.0, "math_verify/died": 0.0}
    assert "of 3 answers 1 took longer than the deadline and 0 ended their worker" in caplog.text


def test_gold_answers_that_cannot_be_read_are_named(judge: MathVerify) -> None:
    answers = ["1", "", "1", "#### "]
    assert judge.unreadable_answers(answers) == [1, 3]
    with pytest.raises(
        ValueError, match=r"2 gold answers cannot be read as mathematics: row 1 \(''\), row 3 \('#### '\)"
    ):
        judge(completions=["1"] * 4, answer=answers)
    with pytest.raises(ValueError, match="answer has 1 rows for 2 completions"):
        judge(completions=["1", "2"], answer=["1"])


def test_by_the_contract() -> None:
    problems = [Problem("a", "1/2 + 1/2?", "1"), Problem("b", "x + x?", "2x")]
    try:
        scores = call_rewards([Reward("math_verify", math_verify)], problems=problems, completions=["$1$", "$x$"])
    finally:
        math_verify.close()
    assert scores.totals == (1.0, 0.0)


def test_the_extra_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs math-verify: pip install 'groupline\[math\]'"):
        MathVerify()(completions=["1"], answer=["1"])


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        # C35: one value in several writings.
        ("2/3", r"\dfrac{2}{3}", 1.0),
        ("2/3", r"\frac23", 1.0),
        ("2/3", "4/6", 1.0),
        ("-1/2", r"\frac{-1}{2}", 1.0),
        ("3/2", r"1\frac{1}{2}", 1.0),
        ("3/2", "1½", 1.0),
        ("0.5", "½", 1.0),
        ("0.5", r"50\%", 1.0),
        ("28%", "28 percent", 1.0),
        ("100", "10²", 1.0),
        ("100", "10^{2}", 1.0),
        ("1200", r"1.2\times10^{3}", 1.0),
        ("pi/2", r"\frac{\pi}{2}", 1.0),
        ("e^{16}-1", "-1+exp(16)", 1.0),
        ("sqrt(8)", r"2\sqrt{2}", 1.0),
        # What only looks like it.
        ("2/3", "2", 0.0),
        ("4", r"4\sqrt{2}", 0.0),
        ("4", r"The answer is 4\sqrt{2}", 0.0),
        ("1/3", "0.333", 0.0),
        ("1½", "5.5", 0.0),
        ("10²", "102", 0.0),
        ("1", "1/0", 0.0),
        ("1/2004", "0", 0.0),  # R12
        ("0", "nan", 0.0),  # R16
        ("0", "inf", 0.0),
        # C31
        ("1", "1e999999999", 0.0),
        ("1", "9" * 5000, 0.0),
        ("1", "(" * 10000, 0.0),
        ("1e400", "1e500", 0.0),
        # R11 and C36: the last box alone, however it ends.
        ("1/2", r"\boxed{3} ... \boxed{\frac12}", 1.0),
        ("1/2", r"\boxed{ \frac{1}{2} }.", 1.0),
        ("1/2", r"\boxed{x=\frac12}", 1.0),
        ("1/2", r"\boxed{\frac12} ... \boxed{3}", 0.0),
        ("1/2", r"\boxed{\frac12} ... \boxed{", 0.0),
        ("1/2", r"\boxed{\frac12} ... \boxed{}", 0.0),
        ("73", "**73**", 1.0),
        ("73", "`73`", 1.0),
        ("73", r"\boxed{\text{73}}", 1.0),
        ("E", r"\boxed{\text{E}}", 1.0),
        ("E", r"\boxed{E: some text}", 1.0),
        ("E", r"\boxed{C}", 0.0),
        ("E", r"\boxed{A, B, C, D, E}", 0.0),
        ("E", r"\boxed{Every}", 0.0),
        # Words around an answer change nothing.
        ("8", "A: 8", 1.0),
        ("8", "The answer is 8 cm^2", 1.0),
        ("42", "๔๒", 1.0),
    ],
)
def test_writings_of_one_value_and_what_only_looks_like_it(
    judge: MathVerify, gold: str, text: str, value: float
) -> None:
    assert judge(completions=[text], answer=[gold]) == [value]


def test_an_answer_is_never_run(judge: MathVerify, tmp_path: Path) -> None:
    """Cases R15 and C66, in every place that is parsed."""
    code = f"__import__('os').system('touch {tmp_path / 'ran'}')"
    texts = [code, f"${code}$", f"\\boxed{{{code}}}", f"#### {code}", f"\\boxed{{().__class__.__mro__; {code}}}"]
    assert judge(completions=texts, answer=["1"] * 5) == [0.0] * 5
    assert not (tmp_path / "ran").exists()


def third() -> list[float | None]:
    judge = MathVerify(seconds=20.0, workers=1)
    try:
        return judge(completions=["\\boxed{\\frac{1}{3}}"], answer=["1/3"])
    finally:
        judge.close()


def test_verdicts_are_the_same_wherever_it_is_called_from() -> None:
    """Cases R5 and C30: main thread, worker thread, event loop, another process."""
    found = [third()]
    thread = threading.Thread(target=lambda: found.append(third()))
    thread.start()
    thread.join()

    async def inside() -> list[float | None]:
        return third()

    found.append(asyncio.run(inside()))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found.append(pool.submit(third).result())
    assert found == [[1.0]] * 4
