"""The report by keyboard, by screen reader, in the dark and on a phone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from report.page_checks import CONTRAST, ON_A_PHONE, UNNAMED, walk_by_tab
from report.report_page import Opened
from report.run_files import metrics, write_lines, write_run

from groupline.report.page import write_report


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with an alarm."""
    folder = tmp_path_factory.mktemp("access")
    other = write_run(folder / "a-run-with-a-rather-long-name-that-has-to-break", steps=3, finished=False, beta=0.1)
    rows = [metrics(1 + i % 3) | {"step": i + 1, "completions/clipped_ratio": 0.9} for i in range(8)]
    write_lines(other / "metrics.jsonl", rows)
    return write_report([write_run(folder / "run"), other], folder / "report.html")


def open_all(one: Opened) -> None:
    """Every drawer, and an answer's tokens."""
    one.page.locator("summary").evaluate_all("(all) => all.forEach((x) => (x.parentElement.open = true))")
    one.page.wait_for_selector("#loss-curve-data")
    one.page.select_option("#source", "train")
    one.page.locator(".row-open").first.click()
    one.page.click("#open-0")


def test_every_control_is_reached_by_tab_in_the_order_of_the_page(browser: Any, file: Path) -> None:
    one = Opened(browser, file)
    page = one.page
    open_all(one)
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    stops = page.evaluate("""() => [...document.querySelectorAll("a, button, input, select, summary, [tabindex]")]
        .filter((x) => x.tabIndex >= 0 && !x.disabled && x.getClientRects().length)
        .filter((x) => x.type !== "radio" || x.checked).length""")
    assert stops > 90
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    seen, hidden = walk_by_tab(page, stops)
    assert not hidden
    assert len(set(seen)) == stops
    assert seen == sorted(seen)
    assert not one.trouble
    one.context.close()


def test_everything_has_a_name_and_every_picture_a_text(browser: Any, file: Path) -> None:
    one = Opened(browser, file)
    page = one.page
    open_all(one)
    assert page.evaluate(UNNAMED) == []
    assert page.locator("svg:not([role]):not([aria-hidden=true])").count() == 0
    named = page.locator("svg[role]").evaluate_all(
        "(all) => all.map((x) => [x.getAttribute('role'), x.getAttribute('aria-label'), x.getAttribute('aria-valuetext')])"
    )
    assert len(named) > 15
    assert all(len(label) > 30 for _, label, _ in named)
    assert all(value and ": " in value for role, _, value in named if role == "slider")
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("select").evaluate_all("(all) => all.filter((x) => !x.labels.length).length") == 0
    doubles = page.evaluate("""() => { const ids = [...document.querySelectorAll("[id]")].map((x) => x.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i); }""")
    assert doubles == []
    levels = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, h3, h4")].map((x) => Number(x.tagName[1]))"""
    )
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert not one.trouble
    one.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(scheme: str, browser: Any, file: Path) -> None:
    one = Opened(browser, file, color_scheme=scheme)
    page = one.page
    open_all(one)

    def darkness() -> bool:
        return bool(page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(20"))

    assert darkness() == (scheme == "dark")
    assert page.evaluate(CONTRAST) == []
    page.click("#theme")
    assert darkness() != (scheme == "dark")
    assert not one.trouble
    one.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_at_a_readable_size(scheme: str, browser: Any, file: Path) -> None:
    one = Opened(
        browser, file, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, color_scheme=scheme
    )
    open_all(one)
    assert one.page.evaluate("document.documentElement.scrollWidth") == 390
    for check in ON_A_PHONE:
        assert one.page.evaluate(check) == []
    assert not one.trouble
    one.context.close()
