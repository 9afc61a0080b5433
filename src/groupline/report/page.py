"""The report as one HTML file, and the same page for a server.

    page([run_data(folder)])            a file with its data in it, which asks for nothing
    page(live=True)                     a page without data, which asks its server for it by relative addresses:

        GET runs.json                   {"runs": [{"id", "label", "changed"}, ...]}: `changed` is any value that differs
                                        once there is something new to show of the run (sizes of its files, for example)
        GET data.json?run=ID            `run_data` of that run (groupline.report.data); ID as in runs.json, URI-encoded

A live page asks for runs.json every REFRESH seconds, and for the data of those shown that changed; it goes on showing
what it has while its server is away, and says so. `id` and `label` of runs.json take the place of those in the data.

Parts lie in `run_page/`, and what is shared with the explainer in `web/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from groupline.report.data import ROLLOUTS, labels, run_data
from groupline.report.one_file import joined, literal, read_part, write_page

FOLDER = Path(__file__).parent / "run_page"
STYLES = ("base.css", "controls.css", "chart.css", "report.css", "groups.css")
SCRIPTS = (
    "ui.js", "theme.js", "chart.js", "plot.js", "pager.js", "runs.js", "verdict.js", "curves.js", "passk.js", "lengths.js",
    "compare.js", "groups.js", "answer.js", "tokens.js", "main.js",
)  # fmt: skip
MARK = '<meta name="generator" content="groupline report">'
REFRESH = 3  # seconds


def page(data: Sequence[dict[str, Any]] = (), live: bool = False) -> str:
    """The page as text. data: `run_data` of each run, in the order in which they are shown; none where it is live.

    ValueError: no data, and not live.
    """
    if not data and not live:
        raise ValueError("page: there is no run to show")
    title = " · ".join(escape(one["label"]) for one in data) or "runs"
    whole = read_part(FOLDER, "page.html").replace("{title}", f"{title} – groupline")
    whole = whole.replace("{connect}", "; connect-src 'self'" if live else "")
    whole = whole.replace("/*{styles}*/", joined(FOLDER, STYLES))
    whole = whole.replace("/*{live}*/", literal({"every": REFRESH} if live else None))
    whole = whole.replace("/*{scripts}*/", joined(FOLDER, SCRIPTS))
    return whole.replace("/*{data}*/", literal(list(data)))  # last: nothing in it is taken for a place to fill


def write_report(folders: Sequence[Path], file: Path | None = None, rollouts: int = ROLLOUTS) -> Path:
    """Write the page of these runs; by default report.html in the first one's folder. Returns the absolute path.

    rollouts: most answers of a run whose texts are in the page; the page says how many it leaves out. ValueError if a
    folder holds no run, or `file` is a folder or holds something that is no report.
    """
    if not folders:
        raise ValueError("name a run's folder")
    data = [run_data(folder, rollouts) for folder in folders]
    for one, label in zip(data, labels(folders), strict=True):
        one["label"] = label
    if len({one["id"] for one in data}) < len(data):  # the same folder twice
        for i, one in enumerate(data):
            one["id"] = f"{one['id']}#{i}"
    return write_page(file or folders[0] / "report.html", page(data), MARK, "a report", "report.html")
