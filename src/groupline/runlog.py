"""A run's files: append-only JSON lines, and a reader that survives a torn last line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


class JsonlWriter:
    """Appends one JSON object a line and flushes it, so a killed run loses at most the line being written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> int:
        """Wait until every row is on the disk; returns the file's size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. A torn last line (a killed writer) is left out; a broken line elsewhere is an error."""
    return (row for _, _, row in read_jsonl_at(path))


def read_jsonl_at(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(first byte, byte after it, row) of each row from byte `start` on, where a row begins or ended; as `read_jsonl`.

    So a reader can go on where it stopped, and come back to a row. A row at a time is in memory.
    """
    # Read as bytes: a torn line may end inside a character, and str.splitlines also splits at U+2028 and the like.
    with path.open("rb") as lines:
        end = lines.seek(start)
        for number, line in enumerate(lines, 1):
            begin, end = end, end + len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                if not line.endswith(b"\n"):  # every whole line ends in a newline, so this one is torn
                    return
                place = f"line {number}" if start == 0 else f"byte {begin}"
                raise ValueError(f"{path}, {place}: not JSON ({error})") from error
            yield begin, end, row


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as None, which JSON can carry."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    write_text(path, json.dumps(finite(value), ensure_ascii=False, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all, even if the machine dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows syncs names by itself and opens no folder
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
