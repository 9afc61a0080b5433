"""The explainer as a file: whole, small, alone, the same in both languages; and the command that writes it."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from groupline.cli import main
from groupline.objective import GRPO, group_advantages
from groupline.report.explain import FOLDER, MARK, SCRIPTS, SECTIONS, STYLES, explainer_page, write_explainer
from groupline.report.one_file import WEB, joined

ROOT = Path(__file__).parents[2]
TEXTS = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh")}
GROUP = json.loads((FOLDER / "group.json").read_text(encoding="utf-8"))


def test_both_languages_say_everything() -> None:
    assert list(TEXTS["en"]) == list(TEXTS["zh"])
    for key, english in TEXTS["en"].items():
        chinese = TEXTS["zh"][key]
        for found in (r"\{\w+\}", r"</?\w+"):  # the values put in, and the markup
            assert sorted(re.findall(found, english)) == sorted(re.findall(found, chinese)), key
        formula = chinese.replace("，", ", ") == english
        assert re.search(r"[一-鿿]", chinese) or formula, f"{key} is not in Chinese: {chinese}"


def test_every_text_is_used_and_every_used_text_is_there() -> None:
    source = joined(FOLDER, (*SCRIPTS, "page.html"))
    source += "".join((FOLDER / "section.html").read_text(encoding="utf-8").replace("{id}", s) for s in SECTIONS)
    named = set(re.findall(r'(?:data-t|data-label)="([\w.]+)"|\bt\("([\w.]+)"', source))
    assert not {a or b for a, b in named} - set(TEXTS["en"])
    prefixes = set(re.findall(r"t\(`([\w.]+)\$\{", source))  # t(`kl.${name}`): any key that begins so
    for key in TEXTS["en"]:
        direct = key in source or f'"{key.split(".")[1]}"' in source
        assert direct or any(key.startswith(p) for p in prefixes), f"{key} is used nowhere"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_one_small_file_that_asks_for_nothing(language: str) -> None:
    page = explainer_page(language)  # type: ignore[arg-type]
    assert len(page.encode()) < 500_000
    assert not re.findall(r"/\*\{\w+\}\*/|<!--\{\w+\}-->", page)  # no place left unfilled
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page)) - {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not addresses
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]*\b(?:src|href)=(?!\"data:)", page)
    assert not re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", page)
    assert "default-src 'none'" in page
    assert f'<title data-t="page.title">{TEXTS[language]["page.title"]}</title>' in page  # readable without scripts
    for name in SECTIONS:
        assert TEXTS[language][f"{name}.lead"] in page
        assert TEXTS[language][f"{name}.notice"] in page


def test_the_parts_are_packaged_short_and_all_used() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"][
        "groupline"
    ]
    used = {*SCRIPTS, *STYLES, "page.html", "section.html", "en.json", "zh.json", "group.json"}
    own = {p.name for p in FOLDER.iterdir() if p.is_file()}
    assert own <= used
    assert used - own <= {p.name for p in WEB.iterdir()}
    for name in own:
        assert any(fnmatch(f"report/explainer/{name}", pattern) for pattern in patterns), name
        lines = len((FOLDER / name).read_text("utf-8").splitlines())
        assert lines <= 300 or name == "group.json", name  # which is a recording


def test_the_recorded_group_is_whole() -> None:
    answers = GROUP["answers"]
    assert len(answers) == 8
    for answer in answers:
        total = sum(weight * answer["rewards"][name] for name, weight in GROUP["reward_weights"].items())
        assert answer["reward"] == pytest.approx(total)
        assert len(answer["tokens"]) == len(answer["logp"]) == len(answer["logp_after"]) > 1
        assert max(answer["logp"] + answer["logp_after"]) <= 0
        assert answer["tokens"][-1] == "<|im_end|>"
        assert answer["finish_reason"] == "stop"
    import torch

    rewards = torch.tensor([a["reward"] for a in answers], dtype=torch.float64)
    assert [a["advantage"] for a in answers] == pytest.approx(group_advantages(rewards, 8).tolist())
    for name, value in GROUP["objective"].items():
        assert value == (0.0 if name == "beta" else getattr(GRPO, name)), name
    assert GROUP["step_answers"] == 16 * len(answers)  # as the page's texts say
    assert {a["text"] for a in (answers[2], answers[5])}.isdisjoint({answers[0]["text"]})
    second = [math_ratio(answers[i], 1) for i in (0, 2, 5)]
    assert all(ratio < 0.8 for ratio in second)  # section 7 points at this token in words
    assert [answers[i]["rewards"]["correct_number"] for i in (0, 2, 5)] == [1, 0, 0]


def math_ratio(answer: dict[str, list[float]], token: int) -> float:
    import math

    return math.exp(answer["logp_after"][token] - answer["logp"][token])


def test_the_command_writes_and_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 2)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--no-open"]) == 0
    assert capsys.readouterr().out == f"saved in {tmp_path / 'explain.html'}\n"
    assert not opened
    chinese = tmp_path / "new" / "page.html"
    assert main(["explain", "--out", str(chinese), "--lang", "zh"]) == 0
    assert opened == [chinese.as_uri()]
    assert chinese.read_text("utf-8") == explainer_page("zh")
    assert '<html lang="zh-Hans">' in explainer_page("zh")
    capsys.readouterr()
    assert main(["explain", "--out", str(chinese)]) == 0  # an explainer is replaced
    assert chinese.read_text("utf-8") == explainer_page("en")
    assert "no browser was found here" in capsys.readouterr().out


def test_it_refuses_what_it_would_spoil(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.html"
    notes.write_text("mine", encoding="utf-8")
    for args, message in (
        (["--lang", "fr"], "lang is 'fr'; it must be one of en, zh"),
        (["--out", str(tmp_path)], f"{tmp_path} is a folder; name a file, {tmp_path / 'explain.html'} for example"),
        (["--out", str(notes)], f"{notes} holds something that is not an explainer, so it is not overwritten"),
    ):
        assert main(["explain", "--no-open", "--out", str(tmp_path / "x.html"), *args]) == 2
        assert message in capsys.readouterr().err
    assert notes.read_text("utf-8") == "mine"
    assert not (tmp_path / "x.html").exists()
    assert MARK in write_explainer(tmp_path / "x.html").read_text("utf-8")
