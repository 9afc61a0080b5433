"""Rows from wherever they stand: JSONL, JSON, CSV, TSV and Parquet files, data sets of the Hugging Face library."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from groupline.tasks.jsonl import read_rows

HUB = "hub:"
_NUMBER = re.compile(r"\s*[-+]?\d[\d,]*(\.\d+)?\s*")
Row = tuple[str, int, dict[str, Any]]  # its place in words, its number in the source counted from 1, its columns


def table_rows(source: str | Path, split: str = "train") -> Iterator[Row]:
    """The rows of a source, read as they are taken.

    source: a file that ends in .jsonl, .ndjson, .json (a list of objects), .csv, .tsv or .parquet; a folder with a
    `datasets` data set, saved by `save_to_disk` or made of data files; or `hub:owner/name` or `hub:owner/name:config`.
    A folder or hub id may end in `@split`; without it `split` is meant.

    A .csv has its column names in the first line, and so has a .tsv, unless that line is a text and a number: then it
    is MGSM's form, question TAB answer.

    Raises:
        ValueError: there is no such source, or it cannot be read; file and line are named where there is one.
        ImportError: the package that reads it is absent; the message names the extra.
    """
    text = str(source)
    if text.startswith(HUB):
        return _hub(text, split)
    path = Path(text)
    folder, mark, named = text.rpartition("@")
    if path.is_dir() or (mark and Path(folder).is_dir()):
        return _folder(path, split, None) if path.is_dir() else _folder(Path(folder), named, named)
    readers = {
        ".jsonl": read_rows, ".ndjson": read_rows, ".json": _json, ".csv": _csv, ".tsv": _tsv, ".parquet": _parquet,
    }  # fmt: skip
    if not path.is_file():
        raise ValueError(
            f"there is no file or folder {text}; a data set of the hub is written {HUB}owner/name"
            if path.suffix in readers or "/" in text
            else f"there is no file or folder {text}"
        )
    if path.suffix.lower() not in readers:
        raise ValueError(f"{text} ends in {path.suffix or 'nothing'!r}; problems are read from {', '.join(readers)}")
    return readers[path.suffix.lower()](path)


def _json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        yield from read_rows(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path} row {number} is a JSON {type(row).__name__}; each row must be an object")
        yield f"{path} row {number}", number, row


def _csv(path: Path) -> Iterator[Row]:
    return _separated(path, ",", None)


def _tsv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline().rstrip("\r\n").split("\t")
    mgsm = len(first) == 2 and _NUMBER.fullmatch(first[1]) is not None
    return _separated(path, "\t", ["question", "answer"] if mgsm else None)


def _separated(path: Path, separator: str, names: list[str] | None) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # worked answers can be long
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        number = 0
        try:
            for fields in reader:
                if not any(fields):  # a blank line
                    continue
                if names is None:
                    names = fields
                    continue
                number += 1
                where = f"{path} line {reader.line_num}"
                if len(fields) != len(names):
                    raise ValueError(f"{where} has {len(fields)} fields; the columns are {', '.join(names)}")
                yield where, number, dict(zip(names, fields, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path} line {reader.line_num} cannot be read: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise ImportError(f"reading {path} needs pyarrow: pip install 'groupline[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", number, row
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None


def _folder(path: Path, split: str, named: str | None) -> Iterator[Row]:
    datasets = _datasets(str(path))
    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(path))
        if split not in splits:
            raise ValueError(f"{path} has no split {split!r}; its splits are {', '.join(splits)}: write {path}@SPLIT")
        return _numbered(splits[split], f"{path}@{split}")
    if (path / "state.json").is_file():
        if named is not None:
            raise ValueError(f"{path} holds one data set without splits; leave out @{named}")
        return _numbered(datasets.load_from_disk(str(path)), str(path))
    return _numbered(_load(datasets, (str(path),), split, str(path)), f"{path}@{split}")


def _hub(text: str, split: str) -> Iterator[Row]:
    body, _, named = text.removeprefix(HUB).partition("@")
    name, _, config = body.partition(":")
    if not name:
        raise ValueError(f"{text!r} names no data set; write {HUB}owner/name, {HUB}owner/name:config, and @split")
    split = named or split
    return _numbered(_load(_datasets(text), (name, config) if config else (name,), split, text), f"{name}@{split}")


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[Row]:
    return ((f"row {number} of {name}", number, row) for number, row in enumerate(rows, start=1))


def _load(datasets: Any, arguments: tuple[str, ...], split: str, what: str) -> Any:
    try:
        return datasets.load_dataset(*arguments, split=split)
    except (ValueError, OSError) as error:  # no such split, name or configuration; no connection
        raise ValueError(f"the data set {what}, split {split!r}, cannot be loaded: {error}") from error


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ImportError(f"loading {what} needs datasets: pip install 'groupline[data]'") from None
    datasets.disable_progress_bars()
    return datasets
