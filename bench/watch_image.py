"""Takes the picture of docs/watch.md: python bench/watch_image.py RUN. Needs the extra `dev` and Chromium.

The run's files are copied as they stood when it was half done, so that the page shows a run that is going.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from groupline.report.watch import listening, server, watch_app
from groupline.runlog import read_jsonl

FILE = Path("docs/images/watch.png")


def half_done(run: Path, folder: Path) -> None:
    """The run's files as they stood at half of its steps."""
    folder.mkdir(parents=True)
    shutil.copy(run / "config.yaml", folder)
    last = sum(1 for _ in read_jsonl(run / "metrics.jsonl")) // 2
    for name in ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl"):
        lines = (run / name).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line, row in zip(lines, read_jsonl(run / name), strict=True) if row["step"] <= last]
        (folder / name).write_text("".join(kept), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, listening(0) as listener, sync_playwright() as playwright:
        half_done(given.run, Path(folder) / given.run.name)
        serving = server(watch_app(Path(folder)))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
        thread.start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 960}, color_scheme="light", reduced_motion="reduce")
        page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        page.wait_for_function("() => view.runs.length === 1")
        page.locator("#bar").evaluate("(x) => x.scrollIntoView({block: 'start'})")
        page.screenshot(path=FILE)
        browser.close()
        serving.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
