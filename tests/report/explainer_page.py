"""The explainer opened in a browser, and how to read its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report.opened import OpenedPage

from groupline.report.explain import write_explainer


class Opened(OpenedPage):
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
