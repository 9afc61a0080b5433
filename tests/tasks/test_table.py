"""Problems from CSV, TSV, JSON, Parquet, data sets and lists: each form against the same problems read from JSONL."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from tasks.test_files import shared

from groupline import Config, Problem
from groupline.tasks import read_problems
from groupline.tasks.gsm8k import read_mgsm
from groupline.tasks.source import given_problems, held_out_problems, training_problems

ROWS = [
    {"question": 'She said "2,5"\nand left.', "answer": "7", "level": "easy"},
    {"question": "ไข่กี่ฟอง", "answer": "๑๘", "level": "hard"},
    {"question": "how many?", "answer": "two\n#### 2", "level": "hard"},
]
EXPECTED = [('She said "2,5"\nand left.', "7", "easy"), ("ไข่กี่ฟอง", "๑๘", "hard"), ("how many?", "2", "hard")]


def as_csv(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:  # as spreadsheets save it
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "rows.csv"


def as_json(folder: Path) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return folder / "rows.json"


def as_jsonl(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    return folder / "rows.jsonl"


def as_parquet(folder: Path) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def as_saved_dataset(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "rows"))
    return folder / "rows"


def as_folder_of_files(folder: Path) -> Path:
    (folder / "rows").mkdir()
    as_jsonl(folder).rename(folder / "rows" / "train.jsonl")
    return folder / "rows"


@pytest.fixture(autouse=True)
def _no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    "make", [as_jsonl, as_json, as_csv, as_parquet, as_saved_dataset, as_folder_of_files], ids=lambda f: f.__name__
)
def test_every_form_gives_the_same_problems(make: Any, tmp_path: Path) -> None:
    problems = read_problems(make(tmp_path))
    assert [(p.prompt, p.answer, p.columns["level"]) for p in problems] == EXPECTED
    assert [p.id for p in problems] == ["rows-1", "rows-2", "rows-3"]
    assert problems[2].columns["solution"] == "<think>two</think>\n2"
    assert read_problems(make(fresh(tmp_path)), count=2) == problems[:2]


def fresh(folder: Path) -> Path:
    (folder / "again").mkdir()
    return folder / "again"


def test_objects_that_give_rows(tmp_path: Path) -> None:
    for rows in (ROWS, tuple(ROWS), iter(ROWS), datasets.Dataset.from_list(ROWS)):
        problems = read_problems(rows)
        assert [(p.prompt, p.answer, p.columns["level"]) for p in problems] == EXPECTED
        assert problems[0].id == "given-1"
    own = [Problem("a", "1+1=", "2")]
    assert read_problems(own) == read_problems(iter(own)) == own
    assert [p.answer for p in read_problems([*own, *ROWS], count=2)] == ["2", "7"]
    settings = Config(prompt_column="level", answer_column="question", system_prompt="Be short.")
    (first, *_) = given_problems(settings, ROWS)
    assert first.prompt == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "easy"})
    assert first.answer == ROWS[0]["question"]
    with pytest.raises(TypeError, match="row 2 of problems is a str; it must be a mapping or a Problem"):
        read_problems([ROWS[0], "1+1="])
    with pytest.raises(TypeError, match="problems is a mapping of train, test; pass the rows of one of them"):
        read_problems({"train": ROWS, "test": ROWS})


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "further"),
    [
        ({"question": "q", "answer": 1}, "q", "1", set()),
        ({"prompt": "q", "question": "other", "answer": 1.5}, "q", "1.5", {"question"}),
        ({"problem": "q", "solution": "so \\boxed{3}"}, "q", "so \\boxed{3}", {"solution"}),
        ({"problem": "q", "solution": "work", "answer": "3"}, "q", "3", {"solution"}),
        (
            {"question": "q", "solution": "3", "prompt": None, "answer": None},
            "q",
            "3",
            {"solution", "prompt", "answer"},
        ),
    ],
)
def test_columns_found_by_themselves(row: dict[str, Any], prompt: str, answer: str, further: set[str]) -> None:
    (problem,) = read_problems([row])
    assert (problem.prompt, problem.answer, set(problem.columns)) == (prompt, answer, further)


def verl_rows() -> list[dict[str, Any]]:
    """As verl's examples/data_preprocess/gsm8k.py lays them out."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n, "answer": f"{n} + 1\n#### {n + 1}"},
        }
        for n in range(3)
    ]


def test_verl_parquet(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(verl_rows()), tmp_path / "train.parquet")
    problems = read_problems(tmp_path / "train.parquet")
    assert [p.answer for p in problems] == ["1", "2", "3"]
    assert problems[1].prompt == ({"role": "user", "content": "1 + 1?"},)
    assert problems[1].columns["data_source"] == "openai/gsm8k"
    assert problems[1].columns["extra_info"] == {"split": "train", "index": 1, "answer": "1 + 1\n#### 2"}
    (by_name, *_) = read_problems(tmp_path / "train.parquet", answer="extra_info.index", columns=["ability"])
    assert (by_name.answer, dict(by_name.columns)) == ("0", {"ability": "math"})
    with pytest.raises(
        ValueError, match=r"row 1 has no column 'reward_model\.truth'; its columns are data_source, prompt"
    ):
        read_problems(tmp_path / "train.parquet", answer="reward_model.truth")


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    parts = {"train": [{"question": "1+1", "answer": 2}], "test": [{"question": "2+2", "answer": 4}]}
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(str(folder))
    settings = Config(train_file=str(folder), eval_file=str(folder))
    assert [p.answer for p in training_problems(settings, 5)] == ["2"]
    assert [p.answer for p in held_out_problems(settings, 5)] == ["4"]
    assert [p.answer for p in read_problems(f"{folder}@test")] == ["4"]
    with pytest.raises(ValueError, match="has no split 'dev'; its splits are train, test"):
        read_problems(f"{folder}@dev")
    with pytest.raises(ValueError, match="holds one data set without splits; leave out @dev"):
        read_problems(f"{as_saved_dataset(tmp_path)}@dev")


def test_a_hub_id_is_split_into_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: str, split: str) -> Any:
        asked.append((*names, split))
        if split == "dev":
            raise ValueError("Unknown split")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [p.answer for p in read_problems("hub:openai/gsm8k:main@test")] == ["7", "๑๘", "2"]
    assert read_problems("hub:own/sums")[0].columns["level"] == "easy"
    assert len(held_out_problems(Config(eval_file="hub:own/sums"), 2)) == 2
    assert asked == [("openai/gsm8k", "main", "test"), ("own/sums", "train"), ("own/sums", "test")]
    with pytest.raises(ValueError, match="data set hub:own/sums@dev, split 'dev', cannot be loaded: Unknown split"):
        read_problems("hub:own/sums@dev")
    with pytest.raises(ValueError, match="'hub:' names no data set; write hub:owner/name"):
        read_problems("hub:")


def test_tsv_with_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('What is "two" and 2?\t4\n3 + 3?\t1,006\n', encoding="utf-8")
    assert [(p.prompt, p.answer) for p in read_problems(path)] == [('What is "two" and 2?', "4"), ("3 + 3?", "1,006")]
    path.write_text("level\tproblem\tanswer\r\neasy\t3 + 3?\t6\r\n", encoding="utf-8")
    (problem,) = read_problems(path)
    assert (problem.prompt, problem.answer, dict(problem.columns)) == ("3 + 3?", "6", {"level": "easy"})


def test_mgsm_through_the_general_reader() -> None:
    path = shared("mgsm_th.tsv")
    plain = [p.prompt[1]["content"] for p in read_mgsm(path, "th") if not isinstance(p.prompt, str)]
    read = read_problems(path)
    assert [p.prompt for p in read] == plain
    assert [p.answer for p in read] == [p.answer for p in read_mgsm(path, "th")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "question,answer\n1+1,2\n1,5+1,6\n", r"rows\.csv line 3 has 3 fields; the columns are question, answer"),
        ("rows.csv", "question,answer\n1+1\n", r"line 2 has 1 fields; the columns are question, answer"),
        ("rows.csv", 'question,answer\n"1+1,2\n', r"line 2 cannot be read: unexpected end of data"),
        ("rows.csv", "frage,antwort\n1+1,2\n", r"line 2 has no column 'prompt'; .* are frage, antwort; .* prompt_column"),
        ("rows.csv", "question,antwort\n1+1,2\n", r"has no column 'answer'; its columns are question, antwort; .* answer_column"),
        ("rows.json", "[{]", r"rows\.json is not JSON"),
        ("rows.json", "[1]", r"rows\.json row 1 is a JSON int; each row must be an object"),
        ("rows.parquet", "no table", r"rows\.parquet is not a Parquet file"),
        ("rows.txt", "1+1=2", r"rows\.txt ends in '\.txt'; problems are read from \.jsonl, .*\.parquet"),
    ],
)  # fmt: skip
def test_errors_name_the_place(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_problems(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"there is no file or folder openai/gsm8k; a data set of the hub is written hub:"
    ):
        read_problems("openai/gsm8k")
    with pytest.raises(ValueError, match=r"there is no file or folder .*trian\.csv"):
        read_problems(tmp_path / "trian.csv")


@pytest.mark.parametrize(("gold", "message"), [(float("nan"), "'answer' is nan"), (True, "'answer' is bool")])
def test_answers_that_are_none(gold: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"row 1 of problems: {message}; it must be text or a"):
        read_problems([{"question": "q", "answer": gold}])


def test_an_absent_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, folder = as_parquet(tmp_path), as_saved_dataset(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (table, folder, "hub:own/sums"):
        with pytest.raises(ImportError, match=r"needs \w+: pip install 'groupline\[data\]'"):
            read_problems(source)
