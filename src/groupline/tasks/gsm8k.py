"""Grade-school word problems from files: GSM8K and its translations, MGSM.

Formats: https://github.com/openai/grade-school-math (JSONL with `question` and `answer`, which ends `#### n`) and
https://github.com/google-research/url-nlp/tree/main/mgsm (one problem a line, question TAB answer).
"""

from __future__ import annotations

import re
from pathlib import Path

from groupline.records import Message, Problem
from groupline.tasks.arithmetic import SYSTEM_PROMPT
from groupline.tasks.arithmetic_templates import Language
from groupline.tasks.jsonl import read_rows

_CALCULATION = re.compile(r"<<[^<>]*>>")
_LAST_LINE = re.compile(r"(?:\A|\n)[ \t]*(?:####|A:(?=[^\w\n]{0,4}\d))[ \t]*(?P<gold>[^\n]*\S)\s*\Z")


def read_gsm8k(path: str | Path, language: Language = "en") -> list[Problem]:
    """The problems of a GSM8K file; `answer` is what its last line has after `####` (or `A:`), as published.

    Columns: `language`, and `solution`: the published solution without its `<<...>>` notes, as a completion to learn.

    Raises:
        ValueError: a line is not a JSON object, lacks a column, or its answer does not end so; the line is named.
    """
    path = Path(path)
    problems = []
    for where, number, row in read_rows(path):
        for name in ("question", "answer"):
            if not isinstance(row.get(name), str):
                raise ValueError(f"{where} has no text column {name!r}; its columns are {', '.join(row) or 'none'}")
        worked = worked_solution(row["answer"])
        if worked is None:
            raise ValueError(f"{where}: the answer has no last line '#### n' or 'A: n' with its number")
        gold, solution = worked
        columns = {"language": language, "solution": solution}
        problems.append(Problem(f"{path.stem}-{number}", _ask(row["question"], language), gold, columns))
    return problems


def read_mgsm(path: str | Path, language: Language) -> list[Problem]:
    """The problems of one MGSM file, which must be in the language named; `answer` is as published.

    Raises:
        ValueError: a line is not a question, a tab and an answer; the file and the line are named.
    """
    path = Path(path)
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) != 2 or not fields[0].strip() or not fields[1].strip():
            raise ValueError(f"{path} line {number} has {len(fields)} fields; it must be a question, a tab, an answer")
        question, gold = fields
        columns = {"language": language}
        problems.append(Problem(f"{path.stem}-{number}", _ask(question, language), gold.strip(), columns))
    return problems


def worked_solution(text: str) -> tuple[str, str] | None:
    """(gold answer, completion to learn) of a worked answer whose last line is `#### n` or `A: n`; None for any other.

    After `A:` there must be a number, so that text which only begins like it stays as it is.
    The completion has the steps, without their `<<...>>` notes, as thinking, and then the answer without thousands
    separators.
    """
    last = _LAST_LINE.search(text)
    if last is None:
        return None
    thought, gold = _CALCULATION.sub("", text[: last.start()]).strip(), last["gold"].strip()
    number = gold.replace(",", "")
    return gold, f"<think>{thought}</think>\n{number}" if thought else number


def _ask(question: str, language: Language) -> tuple[Message, ...]:
    return (
        {"role": "system", "content": SYSTEM_PROMPT[language]},
        {"role": "user", "content": question.strip()},
    )
