"""How much memory a device can still give, and how much of it models hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor, nn

from groupline.models.process import own_peak
from groupline.parallel.mesh import own_share


def free_memory(device: torch.device) -> int:
    """Bytes that the device can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as table:  # free pages alone would leave out what caches hold
            rows = dict(line.split(":") for line in table)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Weights(TypedDict):
    """Size of a model's weights in memory."""

    parameters: int
    bytes: int


def weights_of(models: Mapping[str, nn.Module | Mapping[str, Tensor]]) -> dict[str, Weights]:
    """The weights of each model, by name, that no model before it holds already: what having it costs.

    A reference that is the policy with its adapter off adds nothing, a value model on its own copy adds a whole one.
    Of a model in shares it is this process's. Buffers, gradients, optimiser state and the sampler's copies are not in it.
    """
    seen: set[tuple[str, int]] = set()
    found: dict[str, Weights] = {}
    for name, model in models.items():
        own: Weights = {"parameters": 0, "bytes": 0}
        for tensor in map(own_share, model.parameters() if isinstance(model, nn.Module) else model.values()):
            key = (str(tensor.device), tensor.data_ptr())
            if key not in seen:
                seen.add(key)
                own["parameters"] += tensor.numel()
                own["bytes"] += tensor.numel() * tensor.element_size()
        found[name] = own
    return found


def peaks(device: torch.device) -> dict[str, float]:
    """Names and values for the log, in GiB: the most memory that the process has held since it began, where the system
    says, and the most that tensors took on a CUDA device."""
    found = {}
    process = own_peak()
    if process is not None:
        found["memory/process_peak_gib"] = process / 2**30
    if device.type == "cuda":
        found["memory/peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found
