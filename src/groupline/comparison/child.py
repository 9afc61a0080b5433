"""One part of a comparison, in a process of its own, so that its peak memory is its own.

    python -m groupline.comparison.child JOB.json

The job is {"run": a name of `RUNS`, "settings": what that takes}. The peaks of its memory, and of the CUDA device's where
there is one, are written beside it, to JOB.memory.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupline.comparison.measure import load_only, measure
from groupline.comparison.settings import DPO, PAIRS, PPO, REWARD_MODEL, SFT
from groupline.config import Config
from groupline.models.process import own_peak
from groupline.runlog import read_json, write_json
from groupline.training.dpo import DpoConfig, dpo
from groupline.training.grpo import train
from groupline.training.ppo import PpoConfig, ppo
from groupline.training.reward_model import RewardModelConfig, reward_model
from groupline.training.sampled_pairs import sample_pairs
from groupline.training.sft import SftConfig, sft

RUNS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "train": lambda given: train(Config(**given)),
    PPO: lambda given: ppo(PpoConfig(**given)),
    SFT: lambda given: sft(SftConfig(**given)),
    DPO: lambda given: dpo(DpoConfig(**given)),
    REWARD_MODEL: lambda given: reward_model(RewardModelConfig(**given)),
    PAIRS: lambda given: sample_pairs(Config(**given)),
    "measure": measure,
    "load": lambda given: load_only(Config(**given)),
}


def main(file: Path) -> int:
    """Run the job; 130 if it was interrupted, so that what it wrote is not the whole."""
    import torch

    job = read_json(file)
    RUNS[job["run"]](job["settings"])
    results = Path(str(job["settings"].get("output_dir", ""))) / "results.json"
    if results.is_file() and read_json(results).get("interrupted"):
        return 130
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    write_json(file.with_suffix(".memory.json"), {"peak_rss_bytes": own_peak(), "peak_device_bytes": device})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
