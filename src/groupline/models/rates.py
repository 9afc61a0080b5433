"""What a device reaches: operations a second in matrix products, bytes a second in copies. Measured in a second or two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from groupline.models.products import linear


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one call, the first two not counted. The work waits for its device itself."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def matrix_rate(
    device: torch.device, dtype: torch.dtype = torch.float32, shape: tuple[int, int, int] = (1024, 1024, 1024)
) -> float:
    """Operations a second of a product of [N, K] and [K, M], shape (N, K, M), by the routine that training takes."""
    rows, inner, outer = shape
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    weight = torch.randn(outer, inner, dtype=dtype, device=device)

    def work() -> None:
        with torch.no_grad():
            linear(x, weight)
        wait(device)

    return 2 * rows * inner * outer / median_seconds(work, _repeats(work))


def bandwidth(device: torch.device | str = "cpu", mebibytes: int = 256, repeats: int = 9) -> float:
    """Bytes read and written a second, of one array copied into another."""
    place = torch.device(device)
    source = torch.ones(mebibytes * 2**20 // 4, device=place)
    target = torch.zeros_like(source)

    def work() -> None:
        target.copy_(source)
        wait(place)

    return 2 * source.numel() * 4 / median_seconds(work, repeats)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeats(work: Callable[[], Any], seconds: float = 0.5) -> int:
    """As many calls as take half a second, 3 to 50."""
    work()
    start = time.perf_counter()
    work()
    return min(50, max(3, int(seconds / max(time.perf_counter() - start, 1e-6))))
