"""`groupline watch`: the runs it shows, and that what is unchanged is not sent again."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report.watch_page import add_step, client, make_runs, names

from groupline.cli import main
from groupline.report.watch import listening
from groupline.report.watched import Watched, stamp


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_runs(tmp_path)


def test_the_runs_of_a_folder(runs: Path) -> None:
    at = client(runs)
    listed = at.get("/runs.json")
    assert listed.headers["content-type"] == "application/json"
    assert [(run["id"], run["label"]) for run in listed.json()["runs"]] == [("first", "first"), ("seeds/1", "1")]
    for name in ("first", "seeds/1"):
        data = at.get("/data.json", params={"run": name}).json()
        assert (data["id"], data["folder"], data["steps"]) == (name, name, 1)
        assert data["columns"]["reward"] == [0.5]
        assert str(runs) not in json.dumps(data)  # where it lies is nobody's business


def test_a_single_run(runs: Path) -> None:
    at = client(runs / "first")
    assert names(at) == ["first"]
    assert at.get("/data.json?run=first").json()["steps"] == 1


def test_a_run_that_comes_and_one_that_goes(runs: Path) -> None:
    at = client(runs)
    add_step(runs / "second", 1)
    assert names(at) == ["first", "second", "seeds/1"]
    shutil.rmtree(runs / "first")
    assert names(at) == ["second", "seeds/1"]
    assert at.get("/data.json?run=first").status_code == 404


def test_a_folder_whose_first_run_is_to_come(tmp_path: Path) -> None:
    at = client(tmp_path)
    assert names(at) == []
    add_step(tmp_path / "a" / "b" / "c", 1)
    add_step(tmp_path / "a" / "b" / "d" / "too deep", 1)
    add_step(tmp_path / ".hidden", 1)
    add_step(tmp_path / "a" / "b" / "c" / "checkpoint", 1)  # what lies in a run is the run's
    assert names(at) == ["a/b/c"]


def test_new_steps_are_seen_and_only_the_run_s_own_mark_changes(runs: Path) -> None:
    at = client(runs)
    before = {run["id"]: run["changed"] for run in at.get("/runs.json").json()["runs"]}
    add_step(runs / "first", 2, 0.75)
    after = {run["id"]: run["changed"] for run in at.get("/runs.json").json()["runs"]}
    assert before["first"] != after["first"]
    assert before["seeds/1"] == after["seeds/1"]
    assert at.get("/data.json?run=first").json()["columns"]["reward"] == [0.5, 0.75]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl", "results.json"])
def test_every_file_that_is_read_counts(name: str, runs: Path) -> None:
    before = stamp(runs / "first")
    with (runs / "first" / name).open("a") as stream:
        stream.write("\n")
    assert stamp(runs / "first") != before


@pytest.mark.parametrize("path", ["/", "/runs.json", "/data.json?run=first"])
def test_what_has_not_changed_is_not_sent_again(path: str, runs: Path) -> None:
    at = client(runs)
    first = at.get(path)
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f'W/{tag}, "other"'):
        again = at.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert at.get(path, headers={"if-none-match": '"other"'}).content == first.content
    add_step(runs / "first", 2)
    changed = at.get(path, headers={"if-none-match": tag})
    assert changed.status_code == (304 if path == "/" else 200)


def test_data_is_made_once_while_the_files_stay(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(runs)
    made = watched.data("first")
    monkeypatch.setattr("groupline.report.watched.RunReader.data", lambda *a: pytest.fail("read again"))
    assert watched.data("first") is made


def test_a_broken_line_is_named_and_the_server_goes_on(runs: Path) -> None:
    at = client(runs)
    good = (runs / "first" / "metrics.jsonl").read_text()
    (runs / "first" / "metrics.jsonl").write_text("{broken\n" + good)
    found = at.get("/data.json?run=first")
    assert found.status_code == 500
    assert "metrics.jsonl, line 1: not JSON" in found.text
    (runs / "first" / "metrics.jsonl").write_text(good)
    assert at.get("/data.json?run=first").status_code == 200


def test_a_port_that_is_taken(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(0) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(runs), "--port", str(port), "--no-open"]) == 2
    assert re.search(rf"groupline watch: port {port} of 127\.0\.0\.1 cannot be used .* --port", capsys.readouterr().err)


def test_what_cannot_be_watched(tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, said in (
        (tmp_path / "nowhere", "is not a folder; name a run's folder, or one that holds runs"),
        (runs / "first" / "metrics.jsonl", "is not a folder"),
    ):
        assert main(["watch", str(folder), "--no-open"]) == 2
        assert f"groupline watch: {folder} {said}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["starlette.applications", "uvicorn"])
def test_without_the_extra_it_is_named(
    module: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["watch", str(runs), "--no-open", "--port", "0"]) == 2
    assert (
        capsys.readouterr().err == "groupline watch: watch needs Starlette and uvicorn: pip install 'groupline[ui]'\n"
    )


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command(ending: signal.Signals, runs: Path) -> None:
    command = [sys.executable, "-u", "-m", "groupline.cli", "watch", str(runs), "--port", "0", "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as going:
        assert going.stdout is not None
        said = going.stdout.readline()
        found: Any = re.fullmatch(
            rf"watching {re.escape(str(runs))} at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", said
        )
        assert found, said
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", "/data.json?run=first")
        assert json.loads(connection.getresponse().read())["steps"] == 1
        connection.close()
        going.send_signal(ending)
        out, err = going.communicate(timeout=20)
    assert (going.returncode, out, err) == (0, "ended\n", "")
