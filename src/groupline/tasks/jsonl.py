"""Problems from a JSONL file: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from groupline.records import Message, Problem

PROMPT_COLUMNS = ("prompt", "question")


def read_jsonl(
    path: str | Path,
    *,
    prompt: str | None = None,
    answer: str | None = "answer",
    columns: Sequence[str] | None = None,
    system: str | None = None,
) -> list[Problem]:
    """One problem per line; blank lines are passed over. Its id is `<file name without ending>-<line number>`.

    prompt: the column with the prompt, by default `prompt` or else `question`. Text stays a plain prompt, and a list of
    `{"role", "content"}` messages is a conversation. system: makes a conversation of a text, or opens the one there is.
    answer: the column with the gold answer; None where there is none. columns: the further columns that reward
    functions receive, by default all others of the row.

    Raises:
        ValueError: a line is not a JSON object, or a column is missing or of the wrong kind; the message names the
            file, the line and the columns there are.
    """
    path = Path(path)
    problems = []
    for where, number, row in read_rows(path):
        prompt_column = prompt or next((name for name in PROMPT_COLUMNS if name in row), PROMPT_COLUMNS[0])
        named = [prompt_column, *([answer] if answer else []), *(columns or ())]
        for name in named:
            if name not in row:
                raise ValueError(f"{where} has no column {name!r}; its columns are {', '.join(row) or 'none'}")
        rest = columns if columns is not None else [name for name in row if name not in (prompt_column, answer)]
        gold = row[answer] if answer else ""
        if isinstance(gold, dict | list | bool | None):
            raise ValueError(f"{where}: {answer!r} is {type(gold).__name__}; it must be text or a number")
        problems.append(
            Problem(
                id=f"{path.stem}-{number}",
                prompt=_prompt(row[prompt_column], system, f"{where}: {prompt_column!r}"),
                answer=str(gold),
                columns={name: row[name] for name in rest},
            )
        )
    return problems


def read_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Each JSON object of the file with its place in words (`file line n`) and its line number, counted from 1."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is a JSON {type(row).__name__}; each line must be an object")
            yield where, number, row


def _prompt(value: Any, system: str | None, where: str) -> str | tuple[Message, ...]:
    opening = ({"role": "system", "content": system},) if system is not None else ()
    if isinstance(value, str) and value.strip():
        return (*opening, {"role": "user", "content": value}) if opening else value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return (*opening, *({"role": m["role"], "content": m["content"]} for m in value))
    raise ValueError(f"{where} must be text, or a list of messages with a role and a content, and not be empty")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
