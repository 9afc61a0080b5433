"""A run's files to the value that pages draw from. Expected values are worked out from `run_files` by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from report.run_files import TEXTS, metrics, rollouts, write_lines, write_run

from groupline.report.answers import Answers, number, sample, spread
from groupline.report.data import RunReader, labels, run_data
from groupline.report.series import thinned
from groupline.report.vocabulary import pieces


def test_a_whole_run(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "first"))
    assert (data["format"], data["name"], data["kind"], data["status"]) == (1, "first", "grpo", "finished")
    assert (data["steps"], data["steps_planned"], data["verdict"], data["alarms"]) == (4, 4, "healthy", [])
    assert data["plan"]["reference"] == "frozen copy, beta 0.04 on k3"
    columns = data["columns"]
    assert {len(values) for values in columns.values()} == {4}
    assert columns["step"] == [1, 2, 3, 4]
    assert columns["accuracy"] == [0.125, 0.75, 0.5, 0.875]
    assert columns["seconds"] == [2, 6, 12, 20]
    assert columns["tokens"] == [100, 200, 300, 400]
    # 8 answers a step; shares of groups with signal 1/2, 1/2, 1, 1/2; seconds 2, 4, 6, 8
    assert columns["derived/effective_per_s"] == pytest.approx([2, 1, 4 / 3, 0.5], rel=1e-4)
    # The 8th of 8 answers is the nearest rank to 95%
    assert columns["derived/length_p95"] == [16, 6, 9, 8]
    json.dumps(data, allow_nan=False)


def test_evaluations_and_where_they_stand(tmp_path: Path) -> None:
    before, after = run_data(write_run(tmp_path / "run"))["evals"]
    # 4 answers; before 1 and 0 right, after 4 and 2: pass@2 of 1 in 4 is 1 - C(3,2)/C(4,2) = 1/2, of 2 in 4 it is 5/6
    assert {k: v[0] for k, v in before["pass"].items()} == pytest.approx({"1": 0.125, "2": 0.25, "4": 0.5})
    assert {k: v[0] for k, v in after["pass"].items()} == pytest.approx({"1": 0.75, "2": 11 / 12, "4": 1})
    # Wilson's interval for 1 of 2, from its formula
    z2 = 1.959963984540054**2
    half = math.sqrt(z2 * 0.25 / 2 + z2**2 / 16) / (1 + z2 / 2)
    assert before["pass"]["4"][1:] == pytest.approx([0.5 - half, 0.5 + half])
    assert [(e["step"], e["seconds"], e["tokens"]) for e in (before, after)] == [(0, 0, 0), (4, 20, 400)]
    assert (after["problems"], after["samples"], after["length"], after["truncated"]) == (2, 4, 5, 0)
    assert (before["reward"], after["reward"]) == (0.625, 1.25)


def test_evaluations_from_results_where_no_answers_are_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "held_out.jsonl").unlink()
    measured = {
        "pass@1": {"value": 0.6, "wilson": [0.5, 0.7]},
        "reward": 1.0,
        "completion_length": 8.0,
        "truncated": 0.1,
    }
    history = [{"step": 0, "pass@1": 0.4}, {"step": 2, "pass@1": 0.5}, {"step": 4, "pass@1": 0.6}]
    held = {"problems": 100, "samples_per_problem": 8, "before": None, "after": measured, "history": history}
    (run / "results.json").write_text(json.dumps({"interrupted": True, "held_out": held}))
    data = run_data(run)
    assert data["status"] == "interrupted"
    assert [(e["step"], e["pass"]["1"][0]) for e in data["evals"]] == [(0, 0.4), (2, 0.5), (4, 0.6)]
    assert data["evals"][0]["pass"]["1"][1:] == pytest.approx([0.3094, 0.4980], abs=5e-5)  # 40 of 100
    assert (data["evals"][2]["length"], data["evals"][2]["truncated"], data["evals"][2]["samples"]) == (8.0, 0.1, 8)


def test_a_run_that_is_going(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "run", steps=3, finished=False))
    assert (data["status"], data["steps"], len(data["evals"])) == ("going", 3, 1)
    assert data["groups"]["answers"] == 3 * 8 + 8


def test_a_run_that_has_just_begun_and_one_that_crashed(tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    for name in ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl"):
        (run / name).write_text("")
    data = run_data(run)
    assert (data["steps"], data["columns"]["step"], data["kind"], data["evals"]) == (0, [], "run", [])
    crashed = write_run(tmp_path / "crashed")
    (crashed / "results.json").write_text(
        json.dumps({"interrupted": False, "error": "loss", "held_out": {"history": []}})
    )
    assert (run_data(crashed)["status"], run_data(crashed)["error"]) == ("failed", "loss")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a run: it holds no metrics.jsonl"):
        run_data(tmp_path)
    run = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="rollouts is -1; it must be 0"):
        run_data(run, -1)
    lines = (run / "rollouts.jsonl").read_text().split("\n")
    (run / "rollouts.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2: not JSON"):
        run_data(run)


def test_alarms_make_the_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [metrics(4) | {"step": i, "completions/clipped_ratio": 0.9} for i in range(1, 31)]
    write_lines(run / "metrics.jsonl", rows)
    data = run_data(run)
    assert data["verdict"] == "broken"
    assert (data["alarms"][0]["step"], data["alarms"][0]["name"]) == (5, "answers cut off")


def test_numbers_that_are_not_finite_are_none_and_json_stays_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    bad = metrics(2) | {"reward": math.nan, "kl": math.inf, "note": "text", "entropy": None}
    write_lines(run / "metrics.jsonl", [metrics(1), bad, metrics(3)])  # Python's json writes NaN and Infinity
    data = run_data(run)
    assert data["columns"]["reward"] == [0.625, None, 1.0]
    assert data["columns"]["kl"] == [0.001, None, 0.003]
    assert data["columns"]["entropy"] == [0.5, None, 0.5]
    assert "note" not in data["columns"]
    json.dumps(data, allow_nan=False)
    assert [number(x, 3) for x in (1234.5, 0.00012345, True, "7", -0.0)] == [1230, 0.000123, None, None, 0]


def test_length_and_correctness_of_every_answer(tmp_path: Path) -> None:
    lengths = run_data(write_run(tmp_path / "run"))["lengths"]
    assert sum(n for _, _, n, _ in lengths["bins"]) == 32
    assert sum(r for _, _, _, r in lengths["bins"]) == 1 + 6 + 4 + 7
    for low, high, count, right in lengths["bins"]:
        own = [row for row in rollouts() if low <= len(row["ids"]) < high]
        assert (count, right) == (len(own), sum(row["rewards"]["right"] == 1 for row in own))
    assert [[len(r["ids"]), int(r["rewards"]["right"]), r["step"]] for r in rollouts()] == lengths["points"]


def test_groups_are_whole_and_their_numbers_are_those_written(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "run"))
    groups = data["groups"]
    assert (groups["answers"], groups["groups"], groups["shown_answers"]) == (32 + 16, 8 + 4, 48)
    first = groups["list"][0]
    assert (first["source"], first["step"], first["group"]) == ("train", 1, 0)
    assert data["problems"][first["problem"]] == {
        "id": "again", "prompt": [{"role": "user", "content": "Problem again <i>?"}], "gold": "7",
    }  # fmt: skip
    assert first["texts"] == [f"{text} s1g0" for text in TEXTS]
    assert data["reward_names"] == ["right", "form"]
    assert first["rewards"][0] == [1, 1]
    assert first["reward"] == [1.5, 0.5, 0.5, 0.5]
    assert first["advantage"] == [0.5, -0.5, -0.5, -0.5]
    assert first["stop"] == ["stop", "stop", "stop", "length"]
    assert first["right"] == [True, False, False, False]
    assert first["tokens"][0]["ratio"] == [1, 0.7, 1.5]
    assert first["tokens"][1:] == [{"trained": False}, None, None]
    assert data["vocabulary"] == {"0": "<think>", "1": " one", "2": [0xE0], "3": [0xB8, 0x81], "4": "\n"}


@pytest.mark.parametrize(("limit", "most"), [(0, 0), (3, 0), (4, 4), (20, 20), (48, 48)])
def test_the_sample_keeps_within_its_limit(limit: int, most: int, tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "run"), limit)
    assert data["groups"]["shown_answers"] == most
    assert {g["problem"] for g in data["groups"]["list"]} == set(range(len(data["problems"])))
    assert data["groups"]["answers"] == (16 if limit == 0 else 48)  # 0: rollouts.jsonl is not opened
    assert ("derived/length_p95" in data["columns"]) == (limit > 0)


def test_the_sample_is_spread_and_takes_every_kind(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "run"), 32)
    taken = [(g["source"], g["step"], g["group"]) for g in data["groups"]["list"]]
    assert {("train", 1, 0), ("train", 4, 0)} <= set(taken)  # the first and the last step
    assert {source for source, _, _ in taken} == {"train", "held_out"}
    held = [
        (step, data["problems"][g["problem"]]["id"]) for g in data["groups"]["list"] if (step := g["step"]) in (0, 4)
    ]
    assert {(0, "h0"), (4, "h0")} <= set(held)  # the same held-out problem at both evaluations


def test_long_answers_are_fewer_and_a_named_step_comes_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [row | {"text": "x" * 5000} for row in rollouts()]
    write_lines(run / "rollouts.jsonl", rows)
    train, none = Answers(run, "train"), Answers(tmp_path, "held_out")
    train.read()
    groups, problems = sample(train, none, 40, first=[3])
    assert [(g["step"], g["group"]) for g in groups] == [(3, 0)]  # 20,000 characters each, and 40 answers mean 40 kB
    assert [p["id"] for p in problems] == ["again"]


def test_spread() -> None:
    assert spread(range(9)) == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    for n in range(12):
        assert sorted(spread(range(n))) == list(range(n))


def test_a_reader_goes_on_where_it_stopped_and_back_if_the_run_did(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, finished=False)
    reader = RunReader(run)
    assert reader.data()["groups"]["answers"] == 2 * 8 + 8
    write_lines(run / "rollouts.jsonl", rollouts())  # the torn line was finished, and more came
    assert reader.data()["groups"]["answers"] == 4 * 8 + 8
    assert reader.data() == run_data(run)
    write_lines(run / "rollouts.jsonl", rollouts()[:8])  # a resumed run cut its files
    assert reader.data()["groups"]["answers"] == 8 + 8


def test_runs_that_learn_from_given_answers(tmp_path: Path) -> None:
    for kind, settings in {
        "sft": {"solution_columns": ["solution"]}, "dpo": {"label_smoothing": 0.0, "beta": 0.1},
        "reward_model": {"center_rewards_coefficient": None}, "ppo": {"value_clip": 0.2, "num_generations": 1},
    }.items():  # fmt: skip
        run = tmp_path / kind
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        write_lines(
            run / "metrics.jsonl", [{"step": i, "loss": 0.7, "tokens": 10, "seconds": 3.0 * i} for i in (1, 2, 3)]
        )
        data = run_data(run)
        assert (data["kind"], data["verdict"], data["groups"]["list"]) == (kind, "healthy", [])
        assert (data["columns"]["tokens"], data["columns"]["seconds"]) == ([10, 20, 30], [3, 6, 9])
        held: dict[str, Any] = {"held_out": {"problems": 5, "before": {"loss": 1.0}, "after": {"loss": 0.5}}}
        (run / "results.json").write_text(json.dumps({"method": kind, "interrupted": False, **held}))
        assert (run_data(run)["status"], run_data(run)["evals"]) == ("finished", [])


def test_long_runs_are_thinned_to_means(tmp_path: Path) -> None:
    n = 2500
    columns: dict[str, list[Any]] = {"step": list(range(1, n + 1)), "reward": [float(i % 3) for i in range(n)]}
    columns["kl"] = [None] * n
    found, size = thinned(columns)
    assert size == 3
    assert found["step"][:2] == [3, 6]
    assert found["step"][-1] == n
    assert found["reward"][0] == 1
    assert set(found["kl"]) == {None}
    assert {len(values) for values in found.values()} == {834}
    assert thinned({"step": [1, 2]}) == ({"step": [1, 2]}, 1)


def test_labels_tell_runs_apart() -> None:
    paths = [Path("/a/x/run"), Path("/a/y/run"), Path("/b/other"), Path("/a/x/run")]
    assert labels(paths) == ["x/run", "y/run", "other", "x/run (2)"]


def test_pieces_of_other_vocabularies(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps({"model": {"vocab": [["▁one", -1.0], ["<0xE0>", -2.0], ["สวัสดี", -3.0]]}, "decoder": None})
    )
    assert pieces([tmp_path / "none.json", file], {0, 1, 2, 9}) == {0: " one", 1: [0xE0], 2: "สวัสดี"}
    assert pieces([tmp_path / "none.json"], {0}) == {}
