"""Trackers: what they are told, that they never harm a run, and each one's own files read back."""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small import LETTERS, config, rows, run, same, sums, twin, weights
from test_resume import Stopped, stop_after
from torch import nn

from groupline.config import Config, ConfigError
from groupline.training.dry_run import dry_run
from groupline.training.sft import SftConfig, sft
from groupline.training.sinks import RunInfo, Sinks, numbers_of, open_sinks

CLOCK = ("time", "per_second", "seconds", "memory/")


class Kept:
    """A sink of the caller's own that keeps what it is told; fails where it is asked to."""

    def __init__(self, fails: Any = lambda step: False, fails_at_start: bool = False) -> None:
        self.fails, self.fails_at_start = fails, fails_at_start
        self.runs: list[RunInfo] = []
        self.calls = 0
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ends: list[tuple[str, dict[str, float]]] = []

    def start(self, run: RunInfo) -> None:
        if self.fails_at_start:
            raise ConnectionError("no way\nto the server")
        self.runs.append(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        random.random()  # as trackio does for names
        if self.fails(step):
            raise OSError("no space left")
        self.told.append((step, dict(metrics)))

    def finish(self, status: str, results: Mapping[str, float]) -> None:
        self.ends.append((status, dict(results)))


class Other(Kept):
    """One of another name."""


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if k != "step" and type(v) in (int, float)}


def test_a_sink_is_told_what_the_files_are_told(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    sink = Kept()
    settings = config(tmp_path / "my-run", steps=3, eval_problems=2, eval_samples=2, eval_every=2)
    results = run(settings, model, tokenizer, held_out=sums(14)[12:], sinks=[sink])
    (info,) = sink.runs
    assert (info.name, info.folder, info.project, info.resumed) == ("my-run", tmp_path / "my-run", None, False)
    assert info.settings == json.loads(json.dumps(settings.model_dump(mode="json")))
    steps = [(s, m) for s, m in sink.told if "held_out/reward" not in m]
    assert [(row["step"], numbers(row)) for row in rows(tmp_path / "my-run" / "metrics.jsonl")] == steps
    held = {s: m for s, m in sink.told if "held_out/reward" in m}
    assert {s: m["held_out/pass@1"] for s, m in held.items()} == {
        h["step"]: h["pass@1"] for h in results["held_out"]["history"]
    }
    assert set(held) == {0, 2, 3}
    ((status, ends),) = sink.ends
    assert status == "finished"
    assert ends["before/pass@2"] == results["held_out"]["before"]["pass@2"]["value"]
    assert ends["after/reward"] == results["held_out"]["after"]["reward"]
    on_disk = json.loads((tmp_path / "my-run" / "results.json").read_text())
    assert on_disk["sinks"] == {"Kept": {"told": 6, "lost": 0}}


def test_numbers_only() -> None:
    given = {"step": 1, "a": 2, "b": math.nan, "c": None, "d": True, "e": "x", "f": {"value": 0.5}, "g": [1], "h": 1e9}
    assert numbers_of(given) == {"a": 2.0, "f": 0.5, "h": 1e9}


def test_a_failing_sink_changes_nothing_and_is_counted(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    """It fails from the second step on: of the calls after a failure 1, then 3 are left out."""
    quiet, said = twin(model), []
    run(config(tmp_path / "quiet", steps=9), quiet, tokenizer)
    sink, other = Kept(fails=lambda step: 2 <= step <= 4), Other()
    random.seed(5)
    noisy = twin(model)
    results = run(config(tmp_path / "noisy", steps=9), noisy, tokenizer, sinks=[sink, other], say=said.append)
    drawn = random.random()
    random.seed(5)
    assert drawn == random.random()
    assert same(weights(quiet), weights(noisy))
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        one, two = ([{k: v for k, v in row.items() if not any(c in k for c in CLOCK)} for row in rows(tmp_path / f / name)]
                    for f in ("quiet", "noisy"))  # fmt: skip
        assert one == two
    assert [s for s, _ in sink.told] == [1, 8, 9]  # told 2 and 4, which failed; 3 and 5 to 7 left out
    assert sink.calls == 5
    assert [s for s, _ in other.told] == [*range(1, 10)]
    assert results["sinks"] == {"Kept": {"told": 3, "lost": 6}, "Other": {"told": 9, "lost": 0}}
    lines = [line for line in said if "Kept" in line]
    assert lines == [
        "Kept failed, the run goes on and its files are whole: OSError: no space left",
        "Kept missed 6 of 9 reports; the run's files have all",
    ]


def test_calls_left_out_never_exceed_63() -> None:
    said: list[str] = []
    sink = Kept(fails=lambda step: True)
    sinks = Sinks([("mine", sink)], said.append)
    sinks.start(RunInfo("x", Path()))
    for step in range(1, 1001):
        sinks.log(step, {"a": 1})
    assert sink.calls == 5 + math.ceil((1000 - (2 + 4 + 8 + 16 + 32)) / 64)  # each with those left out after it
    assert sinks.counts() == {"mine": {"told": 0, "lost": 1000}}
    assert len(said) == 1


def test_a_sink_that_cannot_start_is_refused_before_training(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    first = Kept()
    with pytest.raises(ConfigError, match=r"Kept cannot start: ConnectionError: no way to the server\. Nothing was"):
        run(config(tmp_path / "run"), model, tokenizer, sinks=[first, Kept(fails_at_start=True)])
    assert not (tmp_path / "run").exists()
    assert first.ends == [("failed", {})]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, ValueError])
def test_the_status_of_a_run_that_does_not_finish(
    ending: type[BaseException], tmp_path: Path, model: nn.Module, tokenizer: Any
) -> None:
    def say(line: str) -> None:
        if line.startswith("step 1/"):
            raise ending("enough")

    sink = Kept()
    if ending is KeyboardInterrupt:
        run(config(tmp_path / "run"), model, tokenizer, sinks=[sink], say=say)
    else:
        with pytest.raises(ending):
            run(config(tmp_path / "run"), model, tokenizer, sinks=[sink], say=say)
    assert [e[0] for e in sink.ends] == ["interrupted" if ending is KeyboardInterrupt else "failed"]


def stopped_and_resumed(folder: Path, model: nn.Module, tokenizer: Any, sinks: Any = (), **changes: Any) -> None:
    """Killed after step 3 of 5, with a checkpoint at step 2: the run does step 3 again."""
    settings = config(folder, steps=5, save_steps=2, **changes)
    with pytest.raises(Stopped):
        run(settings, twin(model), tokenizer, say=stop_after(3), sinks=sinks)
    run(settings.model_copy(update={"resume": True}), twin(model), tokenizer, sinks=sinks)


def test_on_resume_steps_never_fall(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    sink = Kept()
    stopped_and_resumed(tmp_path / "run", model, tokenizer, [sink])
    assert [s for s, _ in sink.told] == [1, 2, 3, 3, 4, 5]
    assert [r.resumed for r in sink.runs] == [False, True]
    again = [m for s, m in sink.told if s == 3]
    one, two = ({k: v for k, v in m.items() if not any(c in k for c in CLOCK)} for m in again)
    assert one == two


def test_on_resume_a_sink_that_cannot_start_is_left_out(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    said: list[str] = []
    settings = config(tmp_path / "run", steps=3, save_steps=1)
    with pytest.raises(Stopped):
        run(settings, twin(model), tokenizer, say=stop_after(2))
    changed = settings.model_copy(update={"resume": True, "run_name": "another", "project": "p"})
    run(changed, twin(model), tokenizer, say=said.append, sinks=[Kept(fails_at_start=True)])
    assert [line for line in said if "Kept" in line] == [
        "Kept cannot go on and is left out, the run goes on: ConnectionError: no way to the server",
        "Kept missed 2 of 2 reports; the run's files have all",
    ]


def test_sft_reports_too(tmp_path: Path, start: Path) -> None:
    sink = Kept()
    problems = tmp_path / "p.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1), "solution": str(i + 1)}) + "\n"
                                for i in range(4)))  # fmt: skip
    settings = SftConfig(
        model=str(start), train_file=str(problems), steps=2, batch_size=2, output_dir=str(tmp_path / "s"), problems=4,
        run_name="mine",
    )  # fmt: skip
    sft(settings, lambda line: None, sinks=[sink])
    assert [(s, m["loss"]) for s, m in sink.told] == [
        (r["step"], r["loss"]) for r in rows(tmp_path / "s" / "metrics.jsonl")
    ]
    assert (sink.runs[0].name, sink.ends) == ("mine", [("finished", {})])


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, ()), ("none", ()), (["none"], ()), ([], ()), ("wandb", ("wandb",)), (["mlflow", "all"], ("mlflow", "all"))],
)
def test_report_to_as_hugging_face_takes_it(given: Any, found: tuple[str, ...]) -> None:
    assert Config(report_to=given).report_to == found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tensorbord", "report_to is 'tensorbord': there is no tracker 'tensorbord'; the nearest is 'tensorboard'"),
        (["wandb", "none"], "report_to is wandb, none; none stands alone"),
    ],
)
def test_names_that_are_not_trackers(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        Config(report_to=given)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_is_refused_by_its_extra(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"report_to: {name} needs its package: pip install 'groupline\[{name}\]'"):
        dry_run(config(tmp_path / "run", report_to=name), lambda line: None)
    assert not (tmp_path / "run").exists()


def test_an_object_that_is_no_sink() -> None:
    with pytest.raises(ConfigError, match=r"sinks: dict has no method start\(\)"):
        open_sinks((), [{}])  # type: ignore[list-item]


# Each tracker itself: a run killed at step 3, resumed from step 2, read back with the tracker's own reader


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_", "TRACKIO_S"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def rewards_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["reward"] for row in rows(folder / "metrics.jsonl")}


def test_tensorboard(tmp_path: Path, model: nn.Module, tokenizer: Any) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    stopped_and_resumed(tmp_path / "run", model, tokenizer, report_to="tensorboard")
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert {e.step: e.value for e in found.Scalars("reward")} == pytest.approx(rewards_of(tmp_path / "run"), abs=1e-6)
    assert [e.step for e in found.Scalars("grad_norm")] == [1, 2, 3, 3, 4, 5]
    assert "settings/text_summary" in found.Tags()["tensors"]
    names = {name for row in rows(tmp_path / "run" / "metrics.jsonl") for name in numbers(row)}
    assert set(found.Tags()["scalars"]) == names


def test_wandb_offline(tmp_path: Path, model: nn.Module, tokenizer: Any, quiet: Any) -> None:
    wandb = pytest.importorskip("wandb")
    quiet.setenv("WANDB_MODE", "offline")
    quiet.setenv("WANDB_SILENT", "true")
    kept = []
    real = wandb.sdk.wandb_run.Run.log
    quiet.setattr(
        wandb.sdk.wandb_run.Run, "log",
        lambda self, data, step=None, **k: (kept.append((self.id, step, data["reward"])), real(self, data, step=step))[1],
    )  # fmt: skip
    stopped_and_resumed(tmp_path / "run", model, tokenizer, report_to="wandb", project="p", run_name="n")
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    run_id = json.loads((tmp_path / "run" / "sinks.json").read_text())["wandb"]
    assert {i for i, _, _ in kept} == {run_id}
    assert {s: r for _, s, r in kept} == rewards_of(tmp_path / "run")
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert files
    assert dict(read_wandb(files)) == pytest.approx(rewards_of(tmp_path / "run"))
    assert wandb.run is None


def wandb_records(data: bytes) -> Iterator[bytes]:
    """A file of wandb's: 7 bytes of its own, then blocks of 32 KiB as in LevelDB's log: checksum, length, kind, bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # no room for a header
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def read_wandb(files: list[Path]) -> list[tuple[int, float]]:
    """(step, reward) of every row."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "reward" in row:
                    found.append((int(row["_step"]), float(row["reward"])))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_in_local_files(tmp_path: Path, model: nn.Module, tokenizer: Any, quiet: Any) -> None:
    pytest.importorskip("mlflow.tracking")
    from mlflow.tracking import MlflowClient

    quiet.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    quiet.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    more = {"eval_problems": 1, "eval_samples": 2, "stop": LETTERS}
    settings = config(tmp_path / "run", report_to="mlflow", run_name="n", project="p", **more)
    run(settings, model, tokenizer, held_out=sums(13)[12:])
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "n")
    assert found.data.params["num_generations"] == "4"
    points = client.get_metric_history(found.info.run_id, "reward")
    assert {p.step: p.value for p in points} == pytest.approx(rewards_of(tmp_path / "run"))
    assert {"held_out/pass_at_1", "before/pass_at_2", "after/reward"} <= set(found.data.metrics)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"

    stopped_and_resumed(tmp_path / "two", model, tokenizer, report_to="mlflow", project="q")
    (found,) = client.search_runs([client.get_experiment_by_name("q").experiment_id])
    assert found.info.status == "FINISHED"
    assert [p.step for p in client.get_metric_history(found.info.run_id, "reward")] == [1, 2, 3, 3, 4, 5]


def test_trackio_local(tmp_path: Path, model: nn.Module, tokenizer: Any, quiet: Any) -> None:
    trackio = pytest.importorskip("trackio")
    stopped_and_resumed(tmp_path / "run", model, tokenizer, report_to="trackio", project="p", run_name="n")
    (found,) = trackio.Api().runs("p")
    assert (found.name, found.config["num_generations"]) == ("n", 4)
    from trackio.sqlite_storage import SQLiteStorage

    told = [(row["step"], row["reward"]) for row in SQLiteStorage.get_logs("p", "n") if "reward" in row]
    assert [step for step, _ in told] == [1, 2, 3, 3, 4, 5]
    assert dict(told) == pytest.approx(rewards_of(tmp_path / "run"))
