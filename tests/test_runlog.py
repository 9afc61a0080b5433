"""A run's files: whole lines, a torn last line, a broken one elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from groupline.runlog import JsonlWriter, read_jsonl, write_json


def test_rows_come_back(tmp_path: Path) -> None:
    rows = [{"a": 1, "ไทย": "ข้อความ"}, {"b": [1.5, None], "c": {"d": True}}]
    writer = JsonlWriter(tmp_path / "new" / "rows.jsonl")
    for row in rows:
        writer.write(row)
        assert list(read_jsonl(writer.path))[-1] == row  # on disk before the writer is closed
    writer.close()
    assert list(read_jsonl(writer.path)) == rows
    again = JsonlWriter(writer.path)
    again.write({"e": 2})
    again.close()
    assert list(read_jsonl(writer.path)) == [*rows, {"e": 2}]


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path) -> None:
    """Models write U+2028 and U+0085; `str.splitlines` would cut a row there."""
    row = {"text": "a\u2028b\u0085c\u2029d\x0be\r\nf"}
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    writer.write(row)
    writer.write({"next": 1})
    writer.close()
    assert list(read_jsonl(writer.path)) == [row, {"next": 1}]


def test_a_row_torn_at_any_byte_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, last = '{"n": 1}\n', '{"text": "ไทย"}\n'
    whole = (first + last).encode()
    for cut in range(len(first) + 1, len(whole) - 1):  # inside a Thai letter, too
        path.write_bytes(whole[:cut])
        assert list(read_jsonl(path)) == [{"n": 1}], cut
    path.write_bytes(whole[:-1])  # only the newline is lost
    assert list(read_jsonl(path)) == [{"n": 1}, {"text": "ไทย"}]


@pytest.mark.parametrize("rest", ['{"n": 3}\n', ""])
def test_a_broken_line_that_was_ended_is_named(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": \n' + rest, encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not JSON"):
        list(read_jsonl(path))


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == []


def test_not_a_number_becomes_null(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    writer.write({"a": math.nan, "b": [math.inf, (1.0, -math.inf)], "c": {"d": math.nan}})
    writer.close()
    assert writer.path.read_text() == '{"a": null, "b": [null, [1.0, null]], "c": {"d": null}}\n'


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write_json(path, {"a": math.inf, "ไทย": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": None, "ไทย": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": None, "ไทย": 1}
    write_json(path, [2])
    assert json.loads(path.read_text(encoding="utf-8")) == [2]
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]
