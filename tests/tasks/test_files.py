"""Problems from files: JSONL, GSM8K and MGSM."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from groupline.rewards import correct_number, extract_number, think_format
from groupline.tasks.arithmetic_templates import Language
from groupline.tasks.gsm8k import read_gsm8k, read_mgsm, worked_solution
from groupline.tasks.problems import read_problems

SHARED = Path(os.environ.get("GROUPLINE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_jsonl_columns_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "1 + 1?", "answer": 2, "level": "easy"}, "", {"prompt": "2?", "answer": "2"})
    first, second = read_problems(path)
    assert (first.id, first.prompt, first.answer, dict(first.columns)) == ("rows-1", "1 + 1?", "2", {"level": "easy"})
    assert (second.id, second.prompt) == ("rows-3", "2?")


def test_jsonl_mapping_and_conversations(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1 + 1?"}]
    path = write(tmp_path, {"q": talk, "gold": 2.5, "a": 1, "b": 2}, {"q": "1?", "gold": "1", "a": 3, "b": 4})
    problems = read_problems(path, prompt="q", answer="gold", columns=["b"], system="Be short.")
    opening = {"role": "system", "content": "Be short."}
    assert [p.prompt for p in problems] == [(opening, *talk), (opening, {"role": "user", "content": "1?"})]
    assert [p.answer for p in problems] == ["2.5", "1"]
    assert [dict(p.columns) for p in problems] == [{"b": 2}, {"b": 4}]
    assert read_problems(path, prompt="q", answer="")[0].answer == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "rows.jsonl line 2 is not JSON"),
        ("[1]", "line 2 is a JSON list; each line must be an object"),
        ({"prompt": "x", "gold": 1}, "line 2 has no column 'answer'; its columns are prompt, gold"),
        ({"text": "x", "answer": 1}, "line 2 has no column 'prompt'; its columns are text, answer"),
        ({}, "line 2 has no column 'prompt'; its columns are none"),
        ({"prompt": "x", "answer": None}, "line 2: 'answer' is NoneType; it must be text or a number"),
        ({"prompt": " ", "answer": 1}, "line 2: 'prompt' must be text, or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "line 2: 'prompt' must be text, or a list of messages"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_problems(write(tmp_path, {"prompt": "fine", "answer": 1}, row))


def test_gsm8k_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "How many? ", "answer": "1000 + 1 = <<1000+1=1001>>1001 eggs\n#### 1,001"})
    (problem,) = read_gsm8k(path)
    assert not isinstance(problem.prompt, str)
    assert problem.prompt[1] == {"role": "user", "content": "How many?"}
    assert problem.answer == "1,001"
    assert problem.columns["solution"] == "<think>1000 + 1 = 1001 eggs</think>\n1001"


def test_gsm8k_answers_in_the_other_form(tmp_path: Path) -> None:
    """The form in which openai/grade-school-math publishes its models' solutions."""
    path = write(tmp_path, {"question": "q", "answer": "She has 16 - 3 = <<16-3=13>>13 eggs\nA: 13\n"})
    (problem,) = read_gsm8k(path)
    assert (problem.answer, problem.columns["solution"]) == ("13", "<think>She has 16 - 3 = 13 eggs</think>\n13")


@pytest.mark.parametrize(
    ("text", "answer", "solution"),
    [
        ("2 + 2 = <<2+2=4>>4\n#### 1,004", "1,004", "<think>2 + 2 = 4</think>\n1004"),
        ("two\nA: $-3", "$-3", "<think>two</think>\n$-3"),
        ("#### 7", "7", "7"),
        ("A: 7 apples", "7 apples", "7 apples"),
        ("A: 3\nB: 4", "A: 3\nB: 4", None),  # not the last line
        ("A: Paris", "A: Paris", None),
        ("so 4 #### 5", "so 4 #### 5", None),  # within a line
        ("18", "18", None),
    ],
)
def test_worked_answers(text: str, answer: str, solution: str | None) -> None:
    (problem,) = read_problems([{"question": "q", "answer": text}])
    assert (problem.answer, problem.columns.get("solution")) == (answer, solution)


def test_worked_answers_of_gsm8k_through_the_general_reader() -> None:
    path = shared("gsm8k_test.jsonl")
    read = read_problems(path)
    assert [(p.answer, p.columns["solution"]) for p in read] == [
        (p.answer, p.columns["solution"]) for p in read_gsm8k(path)
    ]


def test_the_published_solutions_of_models_are_read_as_they_were_judged() -> None:
    """`A: n` of 660 problems with four models each, against the labels published with them."""
    path = shared("gsm8k_solutions.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [(s["text"], row["gold"], s["correct"]) for row in rows for s in row["solutions"]]
    marked = [(worked_solution(text), gold, right) for text, gold, right in answers]
    read = [(found[0], gold, right) for found, gold, right in marked if found is not None]
    assert len(read) > 0.9 * len(answers)
    wrong = [(said, gold) for said, gold, right in read if (extract_number(said) == extract_number(gold)) != right]
    assert len(wrong) <= 0.01 * len(read), wrong


def test_gsm8k_and_mgsm_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1 has no text column 'answer'; its columns are question"):
        read_gsm8k(write(tmp_path, {"question": "q"}))
    with pytest.raises(ValueError, match="line 1: the answer has no last line '#### n' or 'A: n'"):
        read_gsm8k(write(tmp_path, {"question": "q", "answer": "42"}))
    with pytest.raises(ValueError, match="line 2 has 1 fields; it must be a question, a tab, an answer"):
        read_mgsm(write(tmp_path, "q\t1", "no tab"), "en")


def test_every_gsm8k_answer_is_read_as_published() -> None:
    problems = read_gsm8k(shared("gsm8k_test.jsonl"))
    assert len(problems) == 1319
    assert [extract_number(p.answer) for p in problems] == [Fraction(p.answer.replace(",", "")) for p in problems]
    solutions = [p.columns["solution"] for p in problems]
    assert set(correct_number(completions=solutions, answer=[p.answer for p in problems])) == {1.0}
    assert set(think_format(completions=solutions)) == {1.0}


@pytest.mark.parametrize("language", ["th", "zh", "en"])
def test_every_mgsm_answer_is_read_as_published(language: Language) -> None:
    problems = read_mgsm(shared(f"mgsm_{language}.tsv"), language)
    assert len(problems) == 250
    assert [extract_number(p.answer) for p in problems] == [Fraction(p.answer.replace(",", "")) for p in problems]
