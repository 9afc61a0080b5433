"""Preference pairs from rows: every accepted form, and refusals that name file, row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import group

from groupline.records import Pair
from groupline.tasks.pairs import pairs_of_groups, read_pairs

ASK = {"role": "user", "content": "2+3?"}
YES, NO = ({"role": "assistant", "content": text} for text in "56")


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_text_ids_and_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "2+3=", "chosen": "5", "rejected": "6", "margin": 0.5},
        {"id": "mine", "prompt": [ASK], "chosen": "5", "rejected": "5", "chosen_ids": [4, 2], "rejected_ids": [4]},
    )
    one, two = read_pairs(path)
    assert one == Pair("2+3=", "5", "6", "pairs-1", columns={"margin": 0.5})
    assert two == Pair((ASK,), "5", "5", "mine", (4, 2), (4,))  # the same text, cut before its end: not the same answer
    assert read_pairs(path, count=1) == [one]
    assert read_pairs([one, {"prompt": "a", "chosen": "b", "rejected": "c"}])[1].id == "given-2"


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('prompt,chosen,rejected\n"1+1=",2,"3, or 4"\n', encoding="utf-8")
    assert read_pairs(tmp_path / "p.csv") == [Pair("1+1=", "2", "3, or 4", "p-1")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"prompt": "2+3?", "chosen": [ASK, YES], "rejected": [ASK, NO]},
    ],
    ids=["explicit", "implicit", "repeated", "text beside"],
)
def test_conversations_as_trl_has_them(row: dict[str, Any]) -> None:
    assert read_pairs([row]) == [Pair((ASK,), "5", "6", "given-1")]
    opening = {"role": "system", "content": "Be brief."}
    assert read_pairs([row], system="Be brief.") == [Pair((opening, ASK), "5", "6", "given-1")]


def test_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": [ASK], "chosen": [YES], "rejected": [NO]}])
    assert read_pairs(rows) == [Pair((ASK,), "5", "6", "given-1")]


def test_json_both_ways(tmp_path: Path) -> None:
    pairs = [
        Pair("a", "b", "c", "x-1", (1, 2), (3,), {"margin": 2.0}),
        Pair((ASK,), "b", "c", "x-2"),
    ]
    assert [Pair.from_json(json.loads(json.dumps(p.to_json()))) for p in pairs] == pairs
    assert read_pairs(write(tmp_path, *(p.to_json() for p in pairs))) == pairs


GOOD = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "5"}, "no column 'rejected'; its columns are prompt, chosen"),
        ({"chosen": "5", "rejected": "6"}, "no column 'prompt'"),
        (GOOD | {"rejected": "5"}, "chosen and rejected are the same answer, '5'"),
        (GOOD | {"chosen_ids": [1], "rejected_ids": [1]}, "are the same answer"),
        (GOOD | {"chosen": 5}, "'chosen' must be text, or a list of messages"),
        (GOOD | {"chosen_ids": "1 2"}, "'chosen_ids' must be a list of token ids"),
        (GOOD | {"rejected_ids": [3, -1]}, "'rejected_ids' holds -1; token ids are 0 or more"),
        (GOOD | {"chosen_ids": []}, "chosen_ids is empty"),
        (GOOD | {"prompt": " "}, "'prompt' must be text, or a list of messages"),
        (GOOD | {"columns": [1]}, "'columns' is list; it must be a mapping"),
        ({"prompt": "x", "chosen": [YES], "rejected": [NO]}, "so 'prompt' must be a list of messages too; it is str"),
        ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "'chosen' must add one message .* adds nothing: the two are"),
        ({"chosen": [ASK, YES, ASK], "rejected": [ASK, NO]}, "'chosen' must add one .* it adds assistant, user"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path, GOOD, row)
    with pytest.raises(ValueError, match=f"pairs.jsonl line 2.*{message}"):
        read_pairs(path)


def test_what_gives_no_rows() -> None:
    with pytest.raises(TypeError, match="pairs is a mapping of chosen"):
        read_pairs({"chosen": ["a"]})
    with pytest.raises(TypeError, match="row 1 of pairs is a str; it must be a mapping or a Pair"):
        read_pairs(["a"])


def test_pairs_of_groups() -> None:
    """Best before worst; equal rewards say nothing; an answer that no reward applies to takes no part."""
    groups = [
        group("a", [1], [[2], [3], [4]], [0.5, 1.5, 0.0]),
        group("b", [1], [[2], [3]], [1.0, 1.0]),
        group("c", [1], [[2], [3], [4]], [None, 1.0, 0.0]),
        group("d", [1], [[2], [3], [4], [5]], [1.0, 0.0, 1.0, 0.0]),
    ]
    made = {p.id: p for p in pairs_of_groups(groups)}
    assert made.keys() == {"a", "c", "d"}
    assert (made["a"].chosen_ids, made["a"].rejected_ids) == ((3,), (4,))
    assert (made["c"].chosen_ids, made["c"].rejected_ids) == ((3,), (4,))
    assert dict(made["a"].columns) == {"answer": groups[0].problem.answer, "chosen_reward": 1.5, "rejected_reward": 0.0}
    drawn = {(p.chosen_ids, p.rejected_ids) for seed in range(20) for p in pairs_of_groups(groups[3:], seed)}
    assert drawn == {((c,), (r,)) for c in (2, 4) for r in (3, 5)}
    assert pairs_of_groups(groups, 3) == pairs_of_groups(groups, 3)
