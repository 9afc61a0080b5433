"""The benchmark's own side still runs on the library as it is: one counted step of the tiny workload."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_the_tiny_workload_runs_and_did_its_work() -> None:
    """`ours.py` itself raises if the tokens sampled or trained on are not the workload's: 16 x 8 answers of 48 tokens."""
    done = subprocess.run(
        [sys.executable, str(BENCH / "ours.py"), "W5", "--steps", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["workload"], found["new_tokens"]) == ("W5", 16 * 8 * 48)
    assert found["trained_tokens"] > 0
