"""The report as a file: whole, small, alone, safe with any text; and the command that writes it."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from report.run_files import TEXTS, answer, metrics, rollouts, write_lines, write_run

from groupline.cli import main
from groupline.report.data import run_data
from groupline.report.one_file import WEB, literal
from groupline.report.page import FOLDER, MARK, SCRIPTS, STYLES, page, write_report

ROOT = Path(__file__).parents[2]


def data_in(text: str) -> list[dict[str, object]]:
    """The data as a browser finds it: up to the first end of the script element."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script', text, re.DOTALL)
    assert found
    return list(json.loads(found[1]))


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path / "run"))
    text = page([data])
    assert data_in(text) == [json.loads(json.dumps(data))]
    frame = text.replace(literal([data]), "")
    assert not re.findall(r"/\*\{\w+\}\*/|<!--\{\w+\}-->", frame)
    assert "{" not in frame[: frame.index("<style>")]
    assert not set(re.findall(r"https?://[^\s\"'<]+", frame)) - {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]*\b(?:src|href)=(?!\"data:)", frame)
    assert not re.findall(r"@import|url\(|XMLHttpRequest|WebSocket|sendBeacon", frame)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert "connect-src" not in policy[1]
    assert "connect-src 'self'" in page(live=True)
    assert data_in(page(live=True)) == []
    with pytest.raises(ValueError, match="no run to show"):
        page()


def test_no_text_of_a_model_ends_the_script(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run<script>alert(1)<b>")
    text = write_report([run]).read_text("utf-8")
    groups = data_in(text)[0]["groups"]
    assert isinstance(groups, dict)
    assert groups["list"][0]["texts"][0].startswith(TEXTS[0])
    assert "<!--" not in literal([TEXTS[0]])
    assert "<title>run&lt;script&gt;alert(1)&lt;b&gt; – groupline</title>" in text
    assert text.count("</script>") == 3  # the data, the constants, the code


def test_the_size_has_a_limit_whatever_the_run(tmp_path: Path) -> None:
    """A run of 9,600 answers of 400 characters and 120 tokens, 1200 steps: below 3 MB."""
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [metrics(1 + i % 4) | {"step": i + 1} for i in range(1200)])
    rows = [
        answer(step, g, i, i % 2, 120, f"p{step}-{g}", text="ทดสอบ" * 80)
        for step in range(1, 1201) for g in range(2) for i in range(4)
    ]  # fmt: skip
    write_lines(run / "rollouts.jsonl", rows)
    file = write_report([run])
    data = data_in(file.read_text("utf-8"))[0]
    groups = data["groups"]
    assert isinstance(groups, dict)
    assert file.stat().st_size < 3_000_000
    assert 300 < groups["shown_answers"] <= 1600
    assert groups["answers"] == 9_600 + 16
    assert len({g["step"] for g in groups["list"] if g["source"] == "train"}) > 50  # spread
    assert data["averaged"] == 2
    write_report([run], rollouts=200)
    assert file.stat().st_size < 1_000_000


def test_the_parts_are_packaged_short_and_all_used() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = told["tool"]["setuptools"]["package-data"]["groupline"]
    used = {*SCRIPTS, *STYLES, "page.html"}
    own, common = ({p.name for p in folder.iterdir() if p.is_file()} for folder in (FOLDER, WEB))
    assert own <= used
    assert used - own <= common
    for folder in (FOLDER, WEB):
        for file in folder.iterdir():
            assert any(fnmatch(f"report/{folder.name}/{file.name}", pattern) for pattern in patterns), file
            assert len(file.read_text("utf-8").splitlines()) <= 300, file


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 2)
    run, other = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", steps=2, finished=False)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"saved in {run / 'report.html'} (0.")
    assert not opened
    out = tmp_path / "new" / "both.html"
    assert main(["report", str(run), str(other), str(run), "--out", str(out), "--rollouts", "8", "--open"]) == 0
    assert opened == [out.as_uri()]
    data = data_in(out.read_text("utf-8"))
    assert [one["label"] for one in data] == ["a/run", "b/run", "a/run (2)"]
    assert len({str(one["id"]) for one in data}) == 3
    capsys.readouterr()
    assert main(["report", str(run), "--open"]) == 0  # a report is replaced
    assert "no browser was found here" in capsys.readouterr().out
    assert MARK in (run / "report.html").read_text("utf-8")


def test_it_refuses_what_it_cannot_read_or_would_spoil(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    notes = tmp_path / "notes.html"
    notes.write_text("mine", encoding="utf-8")
    for args, message in (
        ([str(tmp_path)], f"{tmp_path} is not a run: it holds no metrics.jsonl"),
        ([str(tmp_path / "none")], "none is not a run: it holds no metrics.jsonl"),
        ([str(run), "--out", str(tmp_path)], f"{tmp_path} is a folder; name a file, {tmp_path / 'report.html'}"),
        ([str(run), "--out", str(notes)], f"{notes} holds something that is not a report, so it is not overwritten"),
        ([str(run), "--rollouts", "-5"], "rollouts is -5; it must be 0 (no answers) or positive"),
    ):
        assert main(["report", *args]) == 2
        assert message in capsys.readouterr().err
    assert notes.read_text("utf-8") == "mine"
    assert not (run / "report.html").exists()


def test_rollouts_may_be_absent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("rollouts.jsonl", "held_out.jsonl", "config.yaml", "plan.txt"):
        (run / name).unlink()
    groups = data_in(write_report([run]).read_text("utf-8"))[0]["groups"]
    assert isinstance(groups, dict)
    assert (groups["answers"], groups["list"]) == (0, [])
    assert len(rollouts()) == 32
