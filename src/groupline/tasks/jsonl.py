"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Each JSON object of the file with its place in words (`file line n`) and its line number, counted from 1.

    Blank lines are passed over.

    Raises:
        ValueError: a line is not a JSON object; the file and the line are named.
    """
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
