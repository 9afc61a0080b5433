"""A judge over adversarial answers."""

from __future__ import annotations

from typing import Any

import pytest

from groupline.cli import main
from groupline.rewards import correct_number, naive_think_format, think_format
from groupline.rewards.audit import audit, cases, table


def wrong(function: Any, **kwargs: Any) -> dict[str, str]:
    found = audit(function, "judge", **kwargs)
    return {f.case.name: f.verdict for f in found if f.verdict.startswith("false")}


def test_the_built_in_judges_pass_and_the_naive_one_does_not() -> None:
    assert wrong(correct_number) == {}
    assert wrong(correct_number, gold=1207) == {}
    assert wrong(think_format, kind="format") == {}
    fooled = {"empty thinking", "blank thinking", "dots for thinking", "thinking closed twice", "two thinkings"}
    assert wrong(naive_think_format, kind="format") == dict.fromkeys(fooled, "false accept")


def test_faults_of_judges_are_found() -> None:
    def inside(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    found = wrong(inside)
    for name in ("denied", "negative", "right digits within a longer number", "as a power", "the prompt again"):
        assert (found.get(name) == "false accept") == (name != "the prompt again")
    assert found["Thai digits"] == "false reject"

    def nothing(completions: Any, **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    assert set(wrong(nothing).values()) == {"false reject"}
    assert len(wrong(nothing)) == sum(c.right is True for c in cases(42, ""))


def test_a_reward_is_judged_by_what_the_plain_right_answer_earns() -> None:
    def scaled(completions: Any, **kwargs: Any) -> list[float | None]:
        return [0.3 * v if v else None for v in correct_number(completions=completions, **kwargs)]

    assert wrong(scaled) == {}


def test_columns_reach_the_function() -> None:
    def wants(completions: Any, answer: Any, unit: Any) -> list[float]:
        assert unit == ["km"] * len(completions)
        return correct_number(completions=completions, answer=answer)

    assert wrong(wants, columns={"unit": "km"}) == {}


def test_the_table_counts() -> None:
    text = table(audit(naive_think_format, "naive", kind="format"))
    assert text.splitlines()[1].startswith("false accept")
    assert text.endswith("false accepts 5 of 13, false rejects 0 of 19")
    assert "\t" not in text


def test_a_gold_answer_of_one_digit_is_refused() -> None:
    with pytest.raises(ValueError, match="two digits or more"):
        audit(correct_number, "correct_number", gold=4)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-reward", "correct_number"]) == 0
    assert "as a judge of correctness" in capsys.readouterr().out
    assert main(["audit-reward", "naive_think_format"]) == 1
    assert "false accepts 5 of 13" in capsys.readouterr().out
    assert main(["audit-reward", "language_share", "--kind", "format", "--column", "language=en"]) == 1
    assert main(["audit-reward", "correct_numbr"]) == 2
    assert "nearest built-in is 'correct_number'" in capsys.readouterr().err
    assert main(["audit-reward", "correct_number", "--column", "km"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
