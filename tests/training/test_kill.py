"""The law of checkpoints: N steps = k steps, SIGKILL at any moment, resume, N - k steps, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from small import rows, same, untimed


def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    """Half at chosen calls inside a save, half at random times; LoRA with dropout, a reference, two updates a step."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(here / "kill_and_resume.py"), str(tmp_path), "3"],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *attempts, last = json.loads(done.stdout)
    kills = [a for a in attempts if a["killed"]]
    assert len(kills) == 20
    assert last == {"killed": False}
    assert sum(bool(a["torn"]) for a in kills) >= 5, "kills in the middle of a save leave torn checkpoints"

    before = {"whole": 0, "torn": []}
    for a in attempts:
        if a["steps"]:  # it went on right after the newest whole checkpoint, and lost at most the step it was in
            assert a["steps"][0] == before["whole"] + 1
            assert a["whole"] >= a["steps"][-1] - 1
        assert a["whole"] >= before["whole"]
        for name in before["torn"]:
            assert not a["said"] or any(name in line for line in a["said"])
        before = a if a["killed"] else {"whole": 0, "torn": []}

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert [row["step"] for row in rows(killed / "metrics.jsonl")] == list(range(1, 11))
    assert untimed(killed / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
    assert (killed / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    assert same(torch.load(killed / "ends.pt"), torch.load(whole / "ends.pt"))
    results = [json.loads((run / "results.json").read_text("utf-8")) for run in (killed, whole)]
    assert results[0] == results[1]
    left = {p.name for p in killed.iterdir() if p.name.startswith((".", "checkpoint"))}
    assert left == {"checkpoint-9", "checkpoint-10"}
