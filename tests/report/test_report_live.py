"""The page as a server gives it: it asks for its data, takes in what is new, and says when nobody answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from report.report_page import Opened
from report.run_files import metrics, write_lines, write_run

from groupline.report.data import run_data
from groupline.report.page import page


class Server(ThreadingHTTPServer):
    """Serves page(live=True) and the data of runs by their label; `away` lets it fail."""

    runs: dict[str, Path]
    away = False
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        at = urlsplit(self.path)
        server.asked.append(self.path)
        if at.path == "/":
            body, kind = page(live=True), "text/html; charset=utf-8"
        elif at.path == "/runs.json":
            listed = [
                {"id": name, "label": name, "changed": (run / "metrics.jsonl").stat().st_size}
                for name, run in server.runs.items()
            ]
            body, kind = json.dumps({"runs": listed}), "application/json"
        else:
            body, kind = json.dumps(run_data(server.runs[parse_qs(at.query)["run"][0]])), "application/json"
        self.send_response(503 if server.away and at.path != "/" else 200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(("127.0.0.1", 0), Handler)
    one.runs, one.asked = {"a & b/1": write_run(tmp_path / "run", steps=2, finished=False)}, []
    thread = threading.Thread(target=one.serve_forever)
    thread.start()
    yield one
    one.shutdown()
    thread.join()
    one.server_close()


def test_a_live_page_follows_its_runs(browser: Any, server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("groupline.report.page.REFRESH", 0.1)
    context = browser.new_context(viewport={"width": 1100, "height": 900}, reduced_motion="reduce")
    tab = context.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    tab.get_by_text("2 of 4 steps").wait_for()
    assert tab.inner_text("#title") == "a & b/1"

    write_lines(server.runs["a & b/1"] / "metrics.jsonl", [metrics(step) for step in (1, 2, 3)])
    tab.get_by_text("3 of 4 steps").wait_for()
    server.runs["new"] = write_run(tmp_path / "new")
    tab.get_by_text("a & b/1 · new").wait_for()

    tab.locator("#search").fill("p2")  # who reads is not disturbed
    write_lines(server.runs["a & b/1"] / "metrics.jsonl", [metrics(step) for step in (1, 2, 3, 4)])
    tab.get_by_text("4 of 4 steps in 20 s").first.wait_for()
    assert tab.evaluate("document.activeElement.id") == "search"
    assert tab.input_value("#search") == "p2"

    server.away = True
    tab.get_by_text("The server does not answer").wait_for()
    assert tab.locator("article.run").count() == 2
    server.away = False
    tab.locator("#away:empty").wait_for(state="attached")
    assert not errors
    assert {urlsplit(path).path for path in server.asked} <= {"/", "/runs.json", "/data.json"}
    context.close()


def test_the_file_asks_for_nothing_when_it_is_not_live(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page([run_data(write_run(tmp_path / "run"))]), encoding="utf-8")
    one = Opened(browser, file)
    assert one.text("#away") == ""
    assert not one.trouble
    one.context.close()
