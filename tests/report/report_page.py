"""The report opened in a browser, and how to read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report.opened import OpenedPage


class Opened(OpenedPage):
    def __init__(self, browser: Any, file: Path, address: str = "", **context: Any) -> None:
        super().__init__(browser, file, address, width=1100, **context)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def texts(self, selector: str) -> list[str]:
        return [str(text).strip() for text in self.page.locator(selector).all_inner_texts()]

    def column(self, table: str, column: int) -> list[str]:
        """A column of a table's body, its row head being column 0."""
        return self.texts(f"#{table} tbody tr > :nth-child({column + 1})")

    def legend(self, chart: str) -> dict[str, str]:
        """What a chart's legend says at its cursor: name -> value."""
        return dict(
            self.page.evaluate(
                """(id) => [...document.querySelectorAll(`#${id}-plot .legend li`)].filter((x) => x.querySelector(".value"))
                .map((x) => [x.children[1].textContent, x.querySelector(".value").textContent])""",
                chart,
            )
        )
