"""The explainer opened in a browser, and how to read its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupline.report.explain import write_explainer


class Opened:
    """The page in a fresh browser context. trouble: console errors, script errors and requests other than its own file."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1000, "height": 900}, "reduced_motion": "reduce"} | context
        )
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        own = file.as_uri()
        self.page.on("console", lambda m: self.trouble.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on(
            "request", lambda r: self.trouble.append(r.url) if r.url.split("#")[0] not in (own, "data:,") else None
        )
        self.page.goto(own)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def number(self, selector: str) -> float:
        """The number that an element shows: a real minus sign is a minus, a percentage a share."""
        return read(self.text(selector))

    def numbers(self, table: str, column: int) -> list[float]:
        """A column of a table's body, its row head being column 0; a table in a closed drawer is read too."""
        cells = f"#{table} tbody tr > :nth-child({column + 1})"
        return [read(x) for x in self.page.locator(cells).all_text_contents()]

    def slide(self, slider: str, value: float) -> None:
        """Set a slider as a hand would: the page hears of it."""
        self.page.locator(f"#{slider}").fill(str(value))


def read(text: str) -> float:
    plain = text.replace("−", "-").strip()
    return float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)


def written(folder: Path, language: Any = "en") -> Path:
    return write_explainer(folder / "explain.html", language)
