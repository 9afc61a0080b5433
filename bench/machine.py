"""This machine's matrix rate and memory bandwidth as torch reaches them with all its threads: one JSON line.

    python bench/machine.py

matrix_gflops: fp32 product of two 1024 x 1024 matrices, 2 * 1024^3 floating-point operations, by the faster of BLAS
(blas_gflops, what `torch.mm` takes) and oneDNN.
bandwidth_gb_s: copy of a 256 MiB array into another; the bytes read and the bytes written both count, GB = 10^9.
Both are medians of several runs after a warm-up. Other work on the machine lowers them, as it lowers what they are
compared with: measure them in the same run.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from groupline.models.rates import bandwidth, median_seconds

PACKAGES = ("groupline", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


def matrix_rates(size: int = 1024, repeats: int = 15) -> dict[str, float]:
    """fp32 floating-point operations a second by library."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    rates = {"blas": 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), repeats)}
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # private: absent in some builds
    if onednn is not None:
        rates["onednn"] = 2 * size**3 / median_seconds(lambda: onednn(a, b, None, "none", [], ""), repeats)
    return rates


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python and the packages that are installed beside it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    load, rates = os.getloadavg()[0], matrix_rates()
    print(json.dumps({
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "matrix_gflops": round(max(rates.values()) / 1e9, 1),
        "blas_gflops": round(rates["blas"] / 1e9, 1),
        "bandwidth_gb_s": round(bandwidth() / 1e9, 2),
        "load_before": round(load, 2),
        "versions": versions(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
