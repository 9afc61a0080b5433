"""`groupline explain`: the method as one HTML page with figures to move, in English and Chinese. No request leaves it.

Its parts lie in `explainer/`: a frame, one script for each section, texts by language, a recorded group; what it shares
with the report in `web/`. This module only puts them into one file. The page's formulas are in `explainer/math.js`; tests
hold them equal to `groupline.objective` and `groupline.metrics`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, get_args

from groupline.report.one_file import joined, literal, read_part, write_page

Language = Literal["en", "zh"]
FOLDER = Path(__file__).parent / "explainer"
SECTIONS = ("advantage", "weights", "clipping", "kl", "passk", "bandit", "group")
STYLES = ("base.css", "controls.css", "chart.css", "parts.css")
SCRIPTS = ("math.js", "ui.js", "chart.js", *(f"{name}.js" for name in SECTIONS), "main.js", "theme.js")
MARK = '<meta name="generator" content="groupline explain">'


def explainer_page(language: Language = "en") -> str:
    """The page as text, opening in the given language. ValueError naming the languages there are for another one."""
    if language not in get_args(Language):
        raise ValueError(f"lang is {language!r}; it must be one of {', '.join(get_args(Language))}")
    texts = {name: json.loads(read_part(FOLDER, f"{name}.json")) for name in get_args(Language)}
    section = read_part(FOLDER, "section.html")
    sections = [
        section.replace("{id}", name).replace("{number}", str(number)) for number, name in enumerate(SECTIONS, 1)
    ]
    contents = [
        f'<li><a href="#{name}"><span class="count" aria-hidden="true">{number}</span>'
        f'<span data-t="{name}.title"></span></a></li>'
        for number, name in enumerate(SECTIONS, 1)
    ]
    page = read_part(FOLDER, "page.html").replace("<!--{contents}-->", "\n".join(contents))
    page = page.replace("<!--{sections}-->", "\n".join(sections))
    page = re.sub(r'data-t="([\w.]+)">', lambda found: found[0] + texts[language][found[1]], page)
    page = page.replace('<html lang="en">', f'<html lang="{"zh-Hans" if language == "zh" else "en"}">')
    page = page.replace("/*{styles}*/", joined(FOLDER, STYLES))
    page = page.replace("/*{strings}*/", literal(texts))
    page = page.replace("/*{group}*/", literal(json.loads(read_part(FOLDER, "group.json"))))
    return page.replace("/*{scripts}*/", joined(FOLDER, SCRIPTS))


def write_explainer(file: Path, language: Language = "en") -> Path:
    """Write the page; folders on the way are made, an earlier explainer is replaced. Returns the absolute path.

    ValueError if `file` is a folder, or holds something else.
    """
    return write_page(file, explainer_page(language), MARK, "an explainer", "explain.html")
