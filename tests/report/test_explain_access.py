"""The explainer by keyboard, by screen reader, in the dark, on a phone, and without motion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.explainer_page import Opened, written
from report.page_checks import CONTRAST, ON_A_PHONE, UNNAMED, walk_by_tab


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    one = Opened(browser, file)
    yield one
    assert not one.trouble
    one.context.close()


def test_every_control_is_reached_by_tab_in_the_order_of_the_page(opened: Opened) -> None:
    """A step of Tab at a time, with the focus seen at each; a group of radio buttons and the tokens are one stop each."""
    page = opened.page
    stops = page.evaluate("""() => [...document.querySelectorAll("a, button, input, summary, [tabindex]")]
        .filter((x) => x.tabIndex >= 0 && x.getClientRects().length && (x.type !== "radio" || x.checked)
            && (x.closest("details[open]") || !x.closest("details") || x.matches("summary"))).length""")
    assert stops > 100
    seen, hidden = walk_by_tab(page, stops)
    assert not hidden
    assert len(set(seen)) == stops
    assert seen == sorted(seen)


def test_sliders_choices_and_tokens_obey_the_arrow_keys(opened: Opened) -> None:
    page = opened.page
    page.focus("#p-right")
    page.keyboard.press("ArrowRight")
    assert opened.text("#p-right-value") == "0.31"
    assert page.get_attribute("#p-right", "aria-valuetext") == "0.31"
    page.focus("#scale-group")
    page.keyboard.press("ArrowDown")
    assert page.is_checked("#scale-batch")
    page.click("#answer-0")
    page.focus("#token-0")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "token-1"
    assert page.get_attribute("#token-1", "aria-pressed") == "true"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.id") == "token-11"
    page.keyboard.press("Shift+Tab")  # the strip is one stop
    assert page.evaluate("document.activeElement.name") == "token-colour"
    page.focus("#group button.number")
    page.keyboard.press("Enter")
    assert "Mean of the group" in opened.text("#formula")
    page.focus("summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#advantages-data")


def test_everything_has_a_name_and_every_picture_a_text(opened: Opened) -> None:
    page = opened.page
    page.click("#bandit-step")
    assert page.evaluate(UNNAMED) == []
    pictures = page.locator("svg[role=img]")
    assert pictures.count() == 14
    for i in range(pictures.count()):
        assert len(pictures.nth(i).get_attribute("aria-label")) > 30
    assert page.locator("svg:not([role=img]):not([aria-hidden=true])").count() == 0
    assert page.locator("table").count() == 9
    assert page.locator("th:not([scope])").count() == 0
    doubles = page.evaluate("""() => { const ids = [...document.querySelectorAll("[id]")].map((x) => x.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i); }""")
    assert doubles == []
    levels = page.evaluate("""() => [...document.querySelectorAll("h1, h2, h3")].map((x) => Number(x.tagName[1]))""")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    tree = page.locator("#clipping").aria_snapshot()
    for part in ("slider", "Clip low", "table", "rowheader", "img"):
        assert part in tree


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(scheme: str, browser: Any, file: Path) -> None:
    """At least 4.5 to 1 (WCAG 2.2, 1.4.3), text in charts included; the button changes to the other scheme."""
    one = Opened(browser, file, color_scheme=scheme)
    page = one.page
    page.click("#bandit-step")

    def darkness() -> bool:
        return bool(page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(20"))

    assert darkness() == (scheme == "dark")
    assert page.evaluate(CONTRAST) == []
    page.click("#theme")
    assert darkness() == (scheme != "dark")
    assert not one.trouble
    one.context.close()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_phone_shows_everything_at_a_readable_size(language: str, browser: Any, file: Path) -> None:
    """390 px: nothing is wider than the page (tables scroll inside it), no text is tiny, no labels of a chart overlap."""
    one = Opened(browser, file, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = one.page
    page.click(f"[data-language={language}]")
    page.click("#bandit-step")
    page.click("#preset-parts")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for check in ON_A_PHONE:
        assert page.evaluate(check) == []
    assert not one.trouble
    one.context.close()


def test_motion_is_left_out_for_those_who_want_none(browser: Any, file: Path) -> None:
    still = Opened(browser, file, reduced_motion="reduce")
    still.page.click("#bandit-twenty")
    assert still.text("#bandit-steps") == "20"  # at once
    assert still.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    still.context.close()
    moving = Opened(browser, file, reduced_motion="no-preference")
    moving.page.click("#bandit-twenty")
    assert int(moving.text("#bandit-steps")) < 20
    moving.page.locator("#bandit-steps", has_text="20").wait_for()
    assert not still.trouble + moving.trouble
    moving.context.close()
