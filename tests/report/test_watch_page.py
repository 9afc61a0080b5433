"""`groupline watch` in a browser: the page follows the files, keeps to its server and breaks no rule of its policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.watch_page import add_step, make_runs

from groupline.report.watch import listening, server, watch_app


class Watching:
    """A server over a folder of runs, and the page in a fresh browser context.

    trouble: console errors, script errors, refusals by the policy, and requests to anywhere but the server.
    """

    def __init__(self, browser: Any, folder: Path) -> None:
        self.folder = folder
        self.listener = listening(0)
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        self.server = server(watch_app(folder))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        self.context = browser.new_context(viewport={"width": 1000, "height": 900}, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.trouble: list[str] = []
        self.page.on("console", lambda m: self.trouble.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", self._requested)
        self.page.goto(self.address)

    def _requested(self, request: Any) -> None:
        if request.url.startswith(self.address):
            self.asked.append(request.url.removeprefix(self.address))
        elif request.url != "data:,":
            self.trouble.append(request.url)

    def shows(self, text: str) -> None:
        """Waits until the page has it; a Playwright error if it does not come."""
        self.page.get_by_text(text).first.wait_for(state="attached", timeout=20_000)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()

    def close(self) -> None:
        self.context.close()
        self.stop()


@pytest.fixture
def watching(browser: Any, tmp_path: Path) -> Iterator[Watching]:
    opened = Watching(browser, make_runs(tmp_path))
    yield opened
    opened.close()


def rewards(page: Any, run: str) -> Any:
    """The reward column that the page holds of a run."""
    return page.evaluate("(id) => view.runs.find((run) => run.id === id)?.columns.reward", run)


def test_a_row_that_is_written_appears(watching: Watching) -> None:
    watching.page.wait_for_function("() => view.runs.length === 2")
    assert rewards(watching.page, "first") == [0.5]
    before = watching.page.inner_text("#verdict")
    drawn = watching.page.inner_html("#rewards .body")
    add_step(watching.folder / "first", 2, 0.875)
    watching.page.wait_for_function("() => view.runs[0].steps === 2", timeout=20_000)
    assert rewards(watching.page, "first") == [0.5, 0.875]
    assert watching.page.inner_html("#rewards .body") != drawn  # the curve, not only what the script holds
    assert watching.page.inner_text("#verdict") != before
    assert watching.trouble == []


def test_only_what_changed_is_asked_for(watching: Watching) -> None:
    watching.page.wait_for_function("() => view.runs.length === 2")
    add_step(watching.folder / "first", 2)
    watching.page.wait_for_function("() => view.runs[0].steps === 2", timeout=20_000)
    with watching.page.expect_request(lambda r: r.url.endswith("runs.json"), timeout=20_000):
        pass  # one more round, in which nothing is new
    asked = [address for address in watching.asked if address.startswith("data.json")]
    assert asked == ["data.json?run=first", "data.json?run=seeds%2F1", "data.json?run=first"]
    assert watching.trouble == []


def test_a_run_that_begins_later(watching: Watching) -> None:
    watching.page.wait_for_function("() => view.runs.length === 2")
    add_step(watching.folder / "third", 1, 0.25)
    watching.page.wait_for_function("() => view.runs.length === 3", timeout=20_000)
    assert rewards(watching.page, "third") == [0.25]
    assert watching.page.locator("label", has_text="third").count() >= 1
    assert watching.trouble == []


def test_when_the_server_ends_the_page_says_so_and_keeps_what_it_has(watching: Watching) -> None:
    watching.page.wait_for_function("() => view.runs.length === 2")
    assert watching.trouble == []
    watching.stop()
    watching.shows("The server does not answer")
    assert rewards(watching.page, "first") == [0.5]
