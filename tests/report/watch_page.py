"""Runs to watch, and a client of their server."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.testclient import TestClient

from groupline.report.watch import watch_app

SECRET = "the-secret-of-another-folder"


def add_step(run: Path, step: int, reward: float = 0.5) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "reward": reward, "accuracy": reward, "step_time": 1.0}) + "\n")


def make_runs(tmp_path: Path) -> Path:
    """Two runs in a folder, beside a third one outside it whose files hold the secret."""
    folder = tmp_path / "runs"
    add_step(folder / "first", 1)
    add_step(folder / "seeds" / "1", 1)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 1.0, "note": SECRET}) + "\n")
    (tmp_path / "outside" / "config.yaml").write_text(f"model: {SECRET}\n")
    return folder


def client(folder: Path) -> TestClient:
    return TestClient(watch_app(folder), base_url="http://127.0.0.1:8501", raise_server_exceptions=False)


def names(at: TestClient) -> list[str]:
    return [run["id"] for run in at.get("/runs.json").json()["runs"]]
