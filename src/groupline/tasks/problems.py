"""From rows to problems: which column is the prompt, which the gold answer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from groupline.records import Message, Problem
from groupline.tasks.gsm8k import worked_solution
from groupline.tasks.table import Row, table_rows

# Looked for in this order. `reward_model.ground_truth` is where verl's files have it, `solution` is where MATH's have.
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "solution")


R = TypeVar("R")


def read_problems(
    source: str | Path | Iterable[Any],
    *,
    prompt: str | None = None,
    answer: str | None = None,
    columns: Sequence[str] | None = None,
    system: str | None = None,
    split: str = "train",
    count: int | None = None,
) -> list[Problem]:
    """One problem per row, at most `count`. Its id is the source's name without ending, and the row's number.

    source: a file, folder or hub id (see `table_rows`), or an object that gives mappings, such as a list of dicts or a
    `datasets.Dataset`; problems among them stay as they are.
    prompt: the column with the prompt, by default the first there is of `prompt`, `question` and `problem`. Text stays
    a plain prompt, and a list of `{"role", "content"}` messages is a conversation. system: makes a conversation of a
    text, or opens the one there is.
    answer: the column with the gold answer, by default the first there is of `answer`, `reward_model.ground_truth` and
    `solution`; "" where there is none. A dot leads into a column of mappings. An answer whose last line is `#### n` or
    `A: n` is a worked one: n is the gold answer, and column `solution` gets the whole as a completion to learn.
    columns: the further columns that reward functions receive, by default all others of the row.

    Raises:
        ValueError: a row cannot be read, or a column is missing or of the wrong kind; the message names the row and
            the columns there are.
        TypeError: the source gives something that is not a mapping or a problem.
        ImportError: the package that reads the source is absent; the message names the extra.
    """
    rows, stem = rows_of(source, Problem, "problems", split)
    return [
        row if isinstance(row, Problem) else _problem(row, stem, prompt, answer, columns, system)
        for row in islice(rows, count)
    ]


def rows_of(source: str | Path | Iterable[Any], kind: type[R], what: str, split: str) -> tuple[Iterator[Row | R], str]:
    """(rows of the source, and records of this kind among them as they are; the source's name without ending).

    what: what an object passed in is called in messages. Raises as `read_problems`.
    """
    if not isinstance(source, str | Path):
        return _given(source, kind, what), "given"
    name = str(source).removeprefix("hub:").rstrip("/")
    return iter(table_rows(source, split)), Path(name).stem if Path(name).is_file() else Path(name).name


def _given(source: Iterable[Any], kind: type[R], what: str) -> Iterator[Row | R]:
    if isinstance(source, Mapping):
        raise TypeError(f"{what} is a mapping of {', '.join(map(str, source))}; pass the rows of one of them")
    for number, row in enumerate(source, start=1):
        if isinstance(row, kind):
            yield row
        elif isinstance(row, Mapping):
            yield f"row {number} of {what}", number, dict(row)
        else:
            raise TypeError(
                f"row {number} of {what} is a {type(row).__name__}; it must be a mapping or a {kind.__name__}"
            )


def _problem(
    row: Row, stem: str, prompt: str | None, answer: str | None, columns: Sequence[str] | None, system: str | None
) -> Problem:
    where, number, values = row
    asked = prompt or _first(values, PROMPT_COLUMNS)
    gold = answer if answer is not None else _first(values, ANSWER_COLUMNS)
    named = [
        *((asked, "prompt_column" if prompt is None else ""), (gold, "answer_column" if answer is None else "")),
        *((name, "") for name in columns or ()),
    ]
    for name, setting in named:
        if name and not _has(values, name):
            remedy = f"; name the one to take with {setting}" if setting else ""
            raise ValueError(f"{where} has no column {name!r}; its columns are {', '.join(values) or 'none'}{remedy}")
    # Under `solution` a gold answer is also what supervised fine-tuning learns from.
    rest = columns if columns is not None else [n for n in values if n == "solution" or n not in (asked, gold)]
    further = {name: _get(values, name) for name in rest}
    text = _answer(_get(values, gold), f"{where}: {gold!r}") if gold else ""
    worked = worked_solution(text)
    if worked is not None:
        text, solution = worked
        if columns is None:
            further.setdefault("solution", solution)
    return Problem(
        id=f"{stem}-{number}",
        prompt=prompt_of(_get(values, asked), system, f"{where}: {asked!r}"),
        answer=text,
        columns=further,
    )


def _first(row: dict[str, Any], names: Sequence[str]) -> str:
    """The first of the columns that has a value, or else that is there, or else the first of the names."""
    there = [name for name in names if _has(row, name)]
    return next((name for name in there if _get(row, name) is not None), next(iter(there), names[0]))


def _has(row: dict[str, Any], name: str) -> bool:
    head, dot, tail = name.partition(".")
    return name in row or (bool(dot) and isinstance(row.get(head), dict) and _has(row[head], tail))


def _get(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    head, _, tail = name.partition(".")
    return _get(row[head], tail)


def _answer(value: Any, where: str) -> str:
    number = isinstance(value, numbers.Number) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}; it must be text or a finite number")
    if not number and not isinstance(value, str):
        raise ValueError(f"{where} is {type(value).__name__}; it must be text or a number")
    return str(value)


def prompt_of(value: Any, system: str | None, where: str) -> str | tuple[Message, ...]:
    """A text or a conversation, opened by `system` if given. ValueError, that begins with `where`, for anything else."""
    opening = ({"role": "system", "content": system},) if system is not None else ()
    if isinstance(value, str) and value.strip():
        return (*opening, {"role": "user", "content": value}) if opening else value
    if isinstance(value, list | tuple) and value and all(is_message(message) for message in value):
        return (*opening, *({"role": m["role"], "content": m["content"]} for m in value))
    raise ValueError(f"{where} must be text, or a list of messages with a role and a content, and not be empty")


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
