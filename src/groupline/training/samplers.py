"""The sampler that a configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupline.config import Config, ConfigError
from groupline.models.load import Precision, choose_precision, load_model, load_tokenizer, resolve_model
from groupline.models.lora import is_peft
from groupline.models.packing import causal_lm
from groupline.parallel.mesh import is_main, launched
from groupline.records import SamplingParams
from groupline.sampling import Engine, Sampler

Say = Callable[[str], None]
VLLM_FOLDER = "vllm"  # in the run's folder: the server's log, and the weights on their way
TOLERANCE = {torch.float32: 1e-3}  # nats; rounding gives 1e-5 on a CPU
HALF_TOLERANCE = 0.3


def make_sampler(
    config: Config,
    policy: nn.Module,
    tokenizer: Any,
    precision: Precision,
    say: Say,
    folder: str | None = None,
    named: bool = True,
) -> Sampler:
    """The engine, or a sampler over a vLLM server, which starts when it is first asked for answers.

    folder: the run's, for what the server writes; a temporary one otherwise. named: whether `config.model` leads to the
    policy's base, so that a server can load it and be handed the adapter alone.
    """
    if config.sampler == "engine":
        return Engine(
            policy,
            tokenizer,
            cache_gib=config.cache_gib,
            max_rows=config.max_rows,
            dtype=precision.sampling,
            notify=say,
        )
    from groupline.sampling.vllm import VllmSampler
    from groupline.sampling.vllm_options import VllmOptions

    base = _base(config, policy, named)
    dtype = precision.sampling or torch.float32
    if config.vllm_sleep and precision.device.type == "cpu":
        raise ConfigError("vllm_sleep is set, and vLLM sleeps on GPUs only; leave it out")
    follows = config.vllm_mode == "server" and not is_main()
    own = f"rank-{os.environ['RANK']}" if config.vllm_mode == "colocate" and launched() > 1 else ""
    usual = TOLERANCE.get(dtype, HALF_TOLERANCE)
    options = VllmOptions(
        python=config.vllm_python or "python",
        url=config.vllm_url,
        folder=None if folder is None or follows else Path(folder) / VLLM_FOLDER / own,
        base=base,
        rank=config.lora_r,
        arguments=(*(("--trust-remote-code",) if config.trust_remote_code else ()), *config.vllm_args),
        cache_gib=config.cache_gib,
        max_rows=max(config.max_rows, config.num_generations, config.eval_samples),
        dtype=precision.sampling,
        tolerance=usual if config.vllm_tolerance is None else config.vllm_tolerance,
        start_timeout=config.vllm_start_timeout,
        timeout=config.vllm_timeout,
        # a server that starts again is handed the policy as it is, which with staleness may be training meanwhile, and
        # has an address that other ranks do not know
        restarts=0 if config.staleness or launched() > 1 else config.vllm_restarts,
        mode=config.vllm_mode,
        sleep=config.vllm_sleep,
        follows=follows,
    )
    return VllmSampler(policy, tokenizer, options, say)


@dataclass(frozen=True)
class Start:
    """The configuration's model on its device, for commands that train nothing."""

    model: Any
    tokenizer: Any
    precision: Precision


def load_start(config: Config) -> Start:
    precision = choose_precision(config.device, config.precision)
    model = load_model(config.model, precision.device, config.trust_remote_code)
    return Start(model, load_tokenizer(config.tokenizer or config.model, config.trust_remote_code), precision)


@contextmanager
def sampler_of(config: Config, start: Start, say: Say) -> Iterator[Sampler]:
    """For commands that train nothing: the sampler, closed at the end."""
    sampler = make_sampler(config, start.model, start.tokenizer, start.precision, say)
    try:
        yield sampler
    finally:
        sampler.close()


def _base(config: Config, policy: nn.Module, named: bool) -> str | None:
    """What the server loads where the adapter alone is handed over."""
    source = resolve_model(config.model) if named else ""
    fit = named and config.lora_r > 0 and is_peft(policy) and not (Path(source) / "adapter_config.json").exists()
    if fit and _scores_on_cpu(config, policy):
        if config.vllm_sync == "adapter":
            raise ConfigError(
                "vllm_sync is adapter, and answers are drawn at a temperature other than 1, or filtered: vLLM cannot give "
                "the plain log-probs of several answers with an adapter on a CPU; use vllm_sync: weights"
            )
        return None
    if config.vllm_sync == "adapter" and not fit:
        raise ConfigError(
            "vllm_sync is adapter, and there is no fresh adapter on a model that a server could load by name; set lora_r "
            "and a model that is a folder or hub id without an adapter, or vllm_sync: weights"
        )
    return source if fit and config.vllm_sync != "weights" else None


def _scores_on_cpu(config: Config, policy: nn.Module) -> bool:
    """Whether answers have plain log-probs of their own, which vLLM 0.32 on a CPU fails to compute with an adapter."""
    plain = config.temperature == 1 and config.eval_temperature in (0, 1) and not config.filters
    return not plain and next(policy.parameters()).device.type == "cpu"


def differing_defaults(policy: nn.Module, p: SamplingParams) -> list[str]:
    """Sampling settings in the model's own generation config that this run does not follow, said aloud."""
    own = getattr(causal_lm(policy), "generation_config", None)
    ours = {"temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p, "repetition_penalty": 1}
    differ = [
        f"{k} {v:g} (here {ours[k]:g})"
        for k in ours
        if isinstance(v := getattr(own, k, None), (int, float)) and v != ours[k] and not (k == "top_k" and v == 50)
    ]
    note = f"      note  the model's generation config says {', '.join(differ)}; the run's settings hold"
    return [note] if differ else []
