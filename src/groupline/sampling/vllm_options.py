"""What a sampler over vLLM is told, and the command line that follows from it for vLLM itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from groupline.parallel.mesh import launched

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "half"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank
CPU_CACHE_GIB = 1.0
COLOCATED_SHARE = "0.3"  # of a GPU's memory, for vLLM's weights and cache beside a trainer; TRL's default too
SIDE_MODULE = "groupline_vllm_weights"


@dataclass(frozen=True)
class VllmOptions:
    """python: of the environment that has vLLM. url: of a server that runs already, in place of one that is started.
    folder: for the weights that are handed over, which the server must see, and its log; a temporary one by default.
    base: what the server loads where only the adapter is handed over; None: whole weights are. rank: the adapter's.
    arguments: further ones of `vllm serve`. cache_gib, max_rows: as of the engine. dtype: the server's, the policy's
    own by default. tolerance: most that a probe token's log-prob may differ from the policy's own, in nats.
    start_timeout, timeout: most seconds until a server is ready, and for one request. restarts: how often a server that
    died is started again. mode: a server, or vLLM in this process (`colocate`), which must then have it installed.
    sleep: it gives its memory back in `release`, which takes a GPU; None: where it is in this process and on a GPU.
    follows: another rank's sampler starts the server and hands weights over; this one is told of it by `follow`.
    """

    python: str = "python"
    url: str | None = None
    folder: Path | None = None
    base: str | None = None
    rank: int = 0
    arguments: tuple[str, ...] = ()
    cache_gib: float | None = None
    max_rows: int = 256
    dtype: torch.dtype | None = None
    tolerance: float = 1e-3
    start_timeout: float = 600.0
    timeout: float = 1800.0
    restarts: int = 1
    mode: Literal["server", "colocate"] = "server"
    sleep: bool | None = None
    follows: bool = False

    @property
    def colocated(self) -> bool:
        return self.mode == "colocate"

    def sleeps(self, device: torch.device) -> bool:
        """Whether vLLM sleeps between a rollout and the next weights; device: the policy's."""
        return self.colocated and device.type != "cpu" if self.sleep is None else self.sleep

    def sleep_level(self) -> int:
        """2 drops weights and cache, where all weights come anew; 1 keeps the weights, in the host's memory."""
        return 1 if self.base is not None else 2

    def command_line(self, model: Any) -> list[str]:
        """Arguments of vLLM for what the sampler needs, and then those that were given. model: the policy as it draws."""
        parameter = next(model.parameters())
        on_cpu = parameter.device.type == "cpu"
        gib = self.cache_gib or (CPU_CACHE_GIB if on_cpu else None)
        needed = ["--dtype", DTYPES[parameter.dtype], "--max-num-seqs", str(self.max_rows), "--seed", "0"]
        needed += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching"]
        if gib is not None:
            needed += ["--kv-cache-memory-bytes", str(int(gib * 2**30))]
        elif self.colocated:
            needed += ["--gpu-memory-utilization", COLOCATED_SHARE]
        if self.colocated:
            needed.append("--no-use-tqdm-on-load")
            if self.base is None:  # the trainer's weights are handed over before anything is drawn
                needed += ["--load-format", "dummy"]
            if launched() > 1:  # each rank has an engine, and the process group is there already
                needed += ["--distributed-executor-backend", "external_launcher"]
        if on_cpu:
            # A prompt that is encoded in parts has vLLM rewind its generator, which a CPU's cannot: the engine would die.
            needed += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if self.base is not None:
            rank = next((r for r in RANKS if r >= self.rank), RANKS[-1])
            needed += ["--enable-lora", "--max-lora-rank", str(rank)]
        if self.sleeps(parameter.device):
            needed.append("--enable-sleep-mode")
        side = f"groupline.sampling.vllm_side.{SIDE_MODULE}" if self.colocated else SIDE_MODULE
        needed += ["--worker-extension-cls", f"{side}.WeightFiles"]
        backend = "groupline_tensors" if self.colocated else "groupline_files"
        needed += ["--weight-transfer-config", json.dumps({"backend": backend})]
        if not self.colocated:
            needed.append("--enable-scale-out")  # the routes for token ids
        return [*needed, *self.arguments]
