"""Where a step's time goes on this machine: medians over a short run of the quickstart's recipe.

    python bench/step.py [--steps 8]

Prints seconds for generate, reward, reference and train, tokens a second, and this machine's matrix rate, measured in
the same process. Timings on shared machines are noisy: compare ratios taken in one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from groupline import Config, train
from groupline.runlog import read_jsonl


def matrix_rate(size: int = 1024, repeats: int = 9) -> float:
    """fp32 GFLOP/s of one square product, median."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(Config.load("recipes/quickstart.yaml", steps=steps + 1, eval_problems=0, output_dir=str(run)), say=str)
        rows = list(read_jsonl(run / "metrics.jsonl"))[1:]  # the first step warms up
    print(f"{torch.get_num_threads()} threads, {matrix_rate():.0f} GFLOP/s in fp32 matrix products")
    for name in ("time/generate", "time/reward", "time/reference", "time/train", "step_time"):
        print(f"{name:<28}{statistics.median(r[name] for r in rows):8.3f} s")
    for name in ("generated_tokens_per_second", "tokens_per_second"):
        print(f"{name:<28}{statistics.median(r[name] for r in rows):8.0f}")


if __name__ == "__main__":
    main()
