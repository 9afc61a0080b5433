"""A headless Chromium for the pages that reports write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")  # while it lives, this thread has a running event loop, which others cannot have
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright. Where either is missing its tests are skipped, with the reason.

    With GROUPLINE_BROWSER=required in the environment they fail instead.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "playwright is not installed: pip install 'groupline[dev]'"
    else:
        reason = "" if chromium else "no Chromium on this machine: apt-get install chromium"
    if reason:
        if os.environ.get("GROUPLINE_BROWSER") == "required":
            pytest.fail(f"GROUPLINE_BROWSER=required, but {reason}")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()
