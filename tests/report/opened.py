"""A page opened in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class OpenedPage:
    """The page in a fresh browser context. trouble: console errors, script errors and requests other than its own file."""

    def __init__(self, browser: Any, file: Path, address: str = "", width: int = 1000, **context: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": width, "height": 900}, "reduced_motion": "reduce"} | context
        )
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        own = file.as_uri()
        self.page.on("console", lambda m: self.trouble.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on(
            "request", lambda r: self.trouble.append(r.url) if r.url.split("#")[0] not in (own, "data:,") else None
        )
        self.page.goto(own + address)
