"""`groupline plan`: memory by part, seconds a step and the budgets that fit, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupline.batch import FEWEST
from groupline.config import Config
from groupline.models.floor import Load, floor
from groupline.models.load import Precision, choose_precision, load_tokenizer
from groupline.models.lora import Mirror, add_lora, is_peft
from groupline.models.memory import free_memory
from groupline.models.packing import causal_lm
from groupline.models.products import worth_prepacking
from groupline.models.rates import bandwidth, matrix_rate
from groupline.models.shapes import load_shapes, shape_of_model
from groupline.models.tracing import Passes
from groupline.sampling import Engine
from groupline.tasks.source import held_out_problems, training_problems
from groupline.training.collect import encode_problems
from groupline.training.footprint import Footprint, Static, footprint, passes_of, reference_kind, static_parts
from groupline.training.setup import MOST_PROBLEMS, Setup, objective_of, prompt_limit, row_tokens

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What a plan is made for. memory: bytes free on it; rate: operations a second in matrix products; bandwidth: bytes
    read and written a second; None: measured here.
    """

    precision: Precision
    memory: int
    rate: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class Plan:
    """The choices that fit, what they take, and the least seconds of a step.

    tokens: micro_batch_tokens. cache: cache_gib, as the engine counts it. fits: whether anything does. text: all of it.
    """

    footprint: Footprint
    tokens: int
    cache: float
    fits: bool
    seconds: dict[str, float]
    text: str


VLLM_NOTE = (
    "this is the trainer's memory as with the engine: vLLM's own weights and cache are not in it, nor in the verdict"
)


def device_of(config: Config, memory_gib: float | None = None, gpu: bool = False) -> Device:
    """The device that the settings name, or a GPU that is not here: then its memory must be given."""
    if gpu:
        if memory_gib is None:
            raise ValueError("--gpu plans for a GPU that is not here, so it needs --memory-gib, what is free on it")
        dtypes = {"fp32": torch.float32, "fp16": torch.float16}
        dtype = dtypes.get(config.precision, torch.bfloat16)
        precision = Precision(torch.device("cuda"), dtype, dtype == torch.float16, "a GPU that is not here")
    else:
        precision = choose_precision(config.device, config.precision)
    memory = free_memory(precision.device) if memory_gib is None else int(memory_gib * GIB)
    return Device(precision, memory)


def plan(config: Config, device: Device, say: Callable[[str], None] = print) -> Plan:
    """Plan the run of `config`; says it as it is found. Reads the model's configuration and tokenizer, no weights."""
    policy = shapes_of(config)
    tokenizer = load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    wanted = training_problems(config, min(MOST_PROBLEMS, config.steps * config.prompts_per_step))
    limit = prompt_limit(config, policy)
    prompted, _ = encode_problems(wanted, tokenizer, config, limit)
    held, _ = encode_problems(held_out_problems(config, config.eval_problems), tokenizer, config, limit)
    longest = max(len(p.ids) for p in (*prompted, *held))
    shared = bool(getattr(causal_lm(policy), "_supports_attention_backend", False))
    beta = objective_of(config).beta
    precision, free = device.precision, device.memory
    mirror = Mirror(policy, precision.sampling)
    prepack = precision.sampling is None and worth_prepacking(mirror.model, precision.device, free)
    static = static_parts(policy, mirror, precision, reference_kind(config, policy, beta), prepack)
    passes = passes_of(policy, config, precision, longest, shared)
    left = max(0, free - static.loaded - static.laid_out)
    tokens, why = row_tokens(config, policy, precision, longest, shared, free=left)
    found = footprint(policy, config, precision, static, passes, longest, tokens)
    chosen, tokens = _fitted(policy, config, precision, static, passes, longest, tokens, free)
    if chosen.tokens < found.tokens:
        why += f"; lowered from {found.tokens:,} so that it fits"
    seconds = step_seconds(policy, config, device, beta > 0, sum(len(p.ids) for p in prompted) / len(prompted))
    cache = chosen.pool / GIB
    fits = chosen.needed <= free
    lines = [
        _model_line(policy, config),
        f"{'device':>10}  {precision}; {free / GIB:.2f} GiB free",
        *memory_lines(chosen),
    ]
    lines += _choices(chosen, config, tokens, why, free)
    lines += _time_lines(seconds, device)
    if config.sampler == "vllm":
        lines.append(f"{'note':>10}  {VLLM_NOTE}")
    for line in lines:
        say(line)
    return Plan(chosen, tokens, cache, fits, seconds, "\n".join(lines))


def shapes_of(config: Config) -> nn.Module:
    """The policy that the settings describe, adapter included, on the meta device."""
    policy: Any = load_shapes(config.model, config.trust_remote_code)
    if config.lora_r:
        with torch.device("meta"):
            policy = add_lora(policy, config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets)
    policy.eval()
    for name, module in policy.named_modules():
        if config.lora_dropout and "lora_dropout" in name:
            module.train()
    found: nn.Module = policy
    return found


def planned_memory(setup: Setup) -> list[str]:
    """Lines on the memory of a run that is set up, as `plan` says them."""
    return memory_lines(planned_footprint(setup))


def planned_footprint(setup: Setup) -> Footprint:
    """The footprint of a run that is set up, from the model that is there."""
    config, policy, engine = setup.config, setup.policy, setup.engine
    longest = max(len(p.ids) for p in (*setup.stream.prompted, *setup.held_out))
    kind = setup.reference.kind if setup.reference else None
    if isinstance(engine, Engine):
        mirror, prepack = engine.mirror, engine.unshared_reason is None and engine.prepack
    else:  # a server's keys and values are counted as if they were here
        mirror, prepack = Mirror(policy, setup.precision.sampling), False
    static = static_parts(policy, mirror, setup.precision, kind, prepack)
    passes = passes_of(policy, config, setup.precision, longest, setup.scorer.shared)
    return footprint(policy, config, setup.precision, static, passes, longest, config.micro_batch_tokens)


def _fitted(
    policy: nn.Module, config: Config, precision: Precision, static: Static, passes: tuple[Passes, str | None],
    longest: int, tokens: int, free: int,
) -> tuple[Footprint, int]:  # fmt: skip
    """The footprint at these row tokens, or at the most that fits in `free`; what is set stays as set."""
    while True:
        found = footprint(policy, config, precision, static, passes, longest, tokens)
        least = max(min(FEWEST, tokens), longest + config.max_completion_length)
        if found.needed <= free or config.micro_batch_tokens is not None or tokens <= least:
            break
        tokens = max(least, tokens * 3 // 4)
    over = found.sampling - static.held
    room = (free - static.held) / 1.25
    if config.cache_gib is None and over > room and found.keys_values:  # fewer answers at once
        share = max(0.0, 1 - (over - room) / found.keys_values)
        smaller = config.model_copy(update={"cache_gib": max(found.pool * share, 1.0) / GIB})
        found = footprint(policy, smaller, precision, static, passes, longest, tokens)
    return found, tokens


def step_seconds(policy: nn.Module, config: Config, device: Device, reference: bool, prompt: float) -> dict[str, float]:
    """The least seconds of a step by phase (`models.floor`) at the longest answers, and the two rates they are from."""
    shape = shape_of_model(policy, (device.precision.sampling or torch.float32).itemsize)
    model: Any = causal_lm(policy)
    inner = model.config.get_text_config()
    width = getattr(inner, "hidden_size", None) or 1024
    sizes = (1024, width, getattr(inner, "intermediate_size", None) or 4 * width)
    here = device.precision.device
    rate = device.rate or matrix_rate(here, device.precision.compute, sizes)
    moved = device.bandwidth or bandwidth(here)
    lengths = [config.max_completion_length] * config.num_generations
    load = Load(prompt, config.prompts_per_step, lengths, config.prompts_per_step, reference)
    found = floor(shape, load, rate, moved)
    passes = config.num_iterations
    found["train"] *= passes
    found["optimiser"] *= passes * config.updates_per_pass
    found["total"] = sum(v for k, v in found.items() if k != "total")
    return found | {"rate": rate, "bandwidth": moved}


def memory_lines(found: Footprint) -> list[str]:
    """The parts of a footprint and its phases, a line each."""
    s = found.static
    acts = f"{found.tokens:,} row tokens at {_size(found.per_token)} each"
    if found.estimate:
        acts += f"; estimated, as the model could not be traced: {found.estimate}"
    parts = [
        ("weights", s.weights, "fp32, buffers and adapter included"),
        ("reference", s.reference, ""),
        ("sampler", s.sampler + s.joined, "its own copies of weights"),
        ("layout", s.laid_out, "weights laid out for decoding, only while sampling"),
        ("optimiser", s.optimiser, "two moments, fp32"),
        ("gradients", s.gradients, "fp32, only while training"),
        ("activations", found.activations, acts),
        ("head chunk", found.head, "logits of a chunk and the head's gradients"),
        ("KV cache", found.keys_values, f"{found.rows} answers at once"),
        ("drawing", found.drawing, "logits of those answers"),
    ]
    lines = [f"{name:>12}  {_size(size):>10}  {why}".rstrip() for name, size, why in parts if size]
    phases = [("sampling", found.sampling), ("training", found.training), ("update", found.update)]
    return [*lines, f"{'peak':>12}  {_size(found.peak):>10}  " + ", ".join(f"{n} {_size(x)}" for n, x in phases)]


def _model_line(policy: nn.Module, config: Config) -> str:
    every = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    how = "LoRA" if is_peft(policy) else "all weights"
    return f"{'model':>10}  {config.model}: {every:,} weights, {trained:,} trained ({how}); nothing was loaded"


def _choices(found: Footprint, config: Config, tokens: int, why: str, free: int) -> list[str]:
    short = found.needed - free
    verdict = "fits" if short <= 0 else f"does NOT fit: {_size(short)} too much"
    lines = [
        f"{'choice':>10}  micro_batch_tokens: {tokens}  ({why}; {found.micro_batches} micro-batches a step at most)",
        f"{'':>10}  cache_gib: {max(found.pool / GIB, 0.01):.2f}  (all {found.rows} answers that decode at once, at full length)",
        f"{'verdict':>10}  {verdict}: {_size(found.needed)} needed with the allocator's holes, {_size(free)} free",
    ]
    if short > 0:
        ways = ["micro_batch_tokens (lower)", "cache_gib or max_rows (lower)"]
        ways += [] if config.lora_r else ["lora_r (an adapter: gradients and moments of it alone)"]
        ways += ["beta: 0 (no copy for the reference)"] if found.static.reference else []
        lines.append(f"{'':>10}  what lowers it: {', '.join(ways)}")
    return lines


def _time_lines(seconds: dict[str, float], device: Device) -> list[str]:
    rates = f"{seconds['rate'] / 1e9:,.0f} GFLOP/s, {seconds['bandwidth'] / 1e9:,.1f} GB/s"
    measured = "measured here" if device.rate is None and device.bandwidth is None else "given"
    phases = ", ".join(f"{k} {v:.3g}" for k, v in seconds.items() if k not in ("total", "rate", "bandwidth") and v)
    return [
        f"{'time':>10}  at least {seconds['total']:.3g} s a step at the longest answers ({phases}) by {rates} ({measured}): a "
        "floor, not a promise"
    ]


def _size(size: float) -> str:
    return (
        f"{size / GIB:.2f} GiB"
        if size >= GIB
        else f"{size / 2**20:.1f} MiB"
        if size >= 2**20
        else f"{size / 1024:.1f} KiB"
    )


def with_rates(device: Device, tflops: float | None, gb_s: float | None) -> Device:
    """The device with rates that were given: 10^12 operations and 10^9 bytes a second."""
    return replace(
        device, rate=None if tflops is None else tflops * 1e12, bandwidth=None if gb_s is None else gb_s * 1e9
    )
