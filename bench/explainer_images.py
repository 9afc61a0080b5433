"""Takes the pictures of docs/explainer.md: python bench/explainer_images.py. Needs the extra `dev` and Chromium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from groupline.report.explain import write_explainer

OUT = Path("docs/images")
DESK = {"viewport": {"width": 1000, "height": 1040}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 1.5}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write_explainer(Path(folder) / "explain.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, context, language, place in (
            ("explainer_light.png", DESK, "en", "#advantage-title"),
            ("explainer_phone_dark_zh.png", PHONE, "zh", "#bandit-step"),
        ):
            page = browser.new_page(**context, reduced_motion="reduce")
            page.goto(page_file.as_uri())
            page.click(f"[data-language={language}]")
            page.click("#bandit-step")
            page.locator(place).evaluate("(x) => x.scrollIntoView({block: 'start'})")
            page.mouse.move(0, 0)
            page.screenshot(path=OUT / name)
        browser.close()


if __name__ == "__main__":
    main()
