"""`groupline explain`: the method as one HTML page with figures to move, in English and Chinese. No request leaves it.

Its parts lie in `explainer/`: a frame, styles, one script for each section, texts by language, a recorded group. This
module only puts them into one file. The page's formulas are in `explainer/math.js`; tests hold them equal to
`groupline.objective` and `groupline.metrics`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

Language = Literal["en", "zh"]
FOLDER = Path(__file__).parent / "explainer"
SECTIONS = ("advantage", "weights", "clipping", "kl", "passk", "bandit", "group")
STYLES = ("base.css", "controls.css", "figures.css")
SCRIPTS = ("math.js", "ui.js", "chart.js", *(f"{name}.js" for name in SECTIONS), "main.js")
MARK = '<meta name="generator" content="groupline explain">'


def explainer_page(language: Language = "en") -> str:
    """The page as text, opening in the given language. ValueError naming the languages there are for another one."""
    if language not in get_args(Language):
        raise ValueError(f"lang is {language!r}; it must be one of {', '.join(get_args(Language))}")
    texts = {name: json.loads(_read(f"{name}.json")) for name in get_args(Language)}
    section = _read("section.html")
    sections = [
        section.replace("{id}", name).replace("{number}", str(number)) for number, name in enumerate(SECTIONS, 1)
    ]
    contents = [
        f'<li><a href="#{name}"><span class="count" aria-hidden="true">{number}</span>'
        f'<span data-t="{name}.title"></span></a></li>'
        for number, name in enumerate(SECTIONS, 1)
    ]
    page = _read("page.html").replace("<!--{contents}-->", "\n".join(contents))
    page = page.replace("<!--{sections}-->", "\n".join(sections))
    page = re.sub(r'data-t="([\w.]+)">', lambda found: found[0] + texts[language][found[1]], page)
    page = page.replace('<html lang="en">', f'<html lang="{"zh-Hans" if language == "zh" else "en"}">')
    page = page.replace("/*{styles}*/", "".join(map(_read, STYLES)))
    page = page.replace("/*{strings}*/", _literal(texts))
    page = page.replace("/*{group}*/", _literal(json.loads(_read("group.json"))))
    return page.replace("/*{scripts}*/", "".join(map(_read, SCRIPTS)))


def write_explainer(file: Path, language: Language = "en") -> Path:
    """Write the page; folders on the way are made, an earlier explainer is replaced. Returns the absolute path.

    ValueError if `file` is a folder, or holds something else.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file, {file / 'explain.html'} for example")
    if file.exists() and MARK.encode() not in file.read_bytes():
        raise ValueError(
            f"{file} holds something that is not an explainer, so it is not overwritten; name another file"
        )
    page = explainer_page(language)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    return file.absolute()


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _literal(value: Any) -> str:
    """JSON that may stand in a script: no text in it can end the script."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")
