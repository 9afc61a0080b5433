"""What a run will hold in memory, part by part, at its longest answers.

From a policy whose weights need not be there (`load_shapes`) or are (`train --dry-run`), so that both say the same.
Sizes follow from what is built: weights, adapters and optimiser state in fp32, the sampler's copies in the compute
format, a page-rounded cache; activations from `trace`, or where that cannot be from `activation_bytes`.

Legend: N row tokens of a micro-batch, M scored tokens of it, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from groupline.batch import activation_bytes
from groupline.config import Config
from groupline.models.load import Precision
from groupline.models.logprobs import chunk_bytes, find_head
from groupline.models.lora import Mirror, is_peft
from groupline.models.packing import causal_lm, decoder
from groupline.models.shapes import shape_of_model
from groupline.models.tracing import Group, Line, Passes, Untraceable, trace
from groupline.sampling.direct import other_shape
from groupline.sampling.scheduler import PREFILL_TOKENS
from groupline.sampling.static import LEAST, round_up

PAGE = 32  # tokens a cache page, the engine's default
SLACK = 1.25  # resident memory of what comes and goes, over its tensors: the allocator's holes, measured on a CPU


@dataclass(frozen=True)
class Static:
    """Bytes that a run holds whatever it does, and those that come with phases.

    weights: policy and adapter. reference: its own. sampler: folded and cast weights. laid_out: weights in a layout for
    decoding, held while sampling; joined: the same where they stay. gradients, optimiser: of what trains.
    """

    weights: int
    reference: int
    sampler: int
    laid_out: int
    joined: int
    gradients: int
    optimiser: int
    update: int

    @property
    def loaded(self) -> int:
        """Before the first step."""
        return self.weights + self.reference + self.sampler + self.joined

    @property
    def held(self) -> int:
        """In every phase, from the second step on."""
        return self.loaded + self.optimiser


def static_parts(
    policy: nn.Module, mirror: Mirror, precision: Precision, reference: str | None, prepack: bool
) -> Static:
    """mirror: the sampler's view of the policy. reference: the kind of `Reference`, None without a KL penalty. prepack:
    whether decoding lays its weights out anew (`worth_prepacking`).
    """
    weights = _size(chain(policy.parameters(), policy.buffers()))
    trained = [p for p in policy.parameters() if p.requires_grad]
    training = _size(trained)
    body = decoder(mirror.model)
    products = [] if other_shape(body) else [m.weight for m in body.layers.modules() if isinstance(m, nn.Linear)]
    laid_out = _size([*products, find_head(mirror.model).weight]) if prepack else 0
    largest = max((_size([p]) for p in trained), default=0)
    return Static(
        weights=weights,
        reference={"frozen copy": weights, "starting adapter": training}.get(reference or "", 0),
        sampler=_size(p for p in mirror.model.parameters() if id(p) not in mirror.borrowed),
        laid_out=laid_out,
        joined=0 if prepack else _size(p for p in products if id(p) in mirror.borrowed),
        gradients=training,
        optimiser=2 * training,
        update=2 * largest if precision.device.type == "cpu" else training,  # AdamW, weight by weight or all at once
    )


def reference_kind(config: Config, policy: nn.Module, beta: float) -> str | None:
    """What `Reference` would be; None without a KL penalty."""
    if beta <= 0:
        return None
    return "frozen copy" if not is_peft(policy) else "adapter off" if config.lora_r else "starting adapter"


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


@dataclass(frozen=True)
class Footprint:
    """A run's memory at its longest answers. Sizes in bytes; tokens and micro_batches are those of a step."""

    static: Static
    tokens: int  # of the fullest micro-batch
    micro_batches: int
    per_token: float  # activations, by row token
    activations: int
    head: int
    training: int
    keys_values: int
    drawing: int
    sampling: int
    rows: int
    pool: int  # keys and values as the engine's budget counts them
    estimate: str | None  # why activations are estimated, where they could not be traced

    @property
    def update(self) -> int:
        """While the optimiser steps."""
        return self.static.held + self.static.gradients + self.static.update

    @property
    def peak(self) -> int:
        """Tensors at the worst moment."""
        return max(self.training, self.sampling, self.update)

    @property
    def needed(self) -> int:
        """What the device must be able to give: the peak, with room for the allocator's holes in what comes and goes."""
        held = self.static.held
        return held + round(SLACK * (self.peak - held))


def passes_of(
    policy: nn.Module, config: Config, precision: Precision, longest: int, shared: bool
) -> tuple[Passes, str | None]:
    """What passes over rows hold, and where they could only be estimated, why."""
    group = Group(longest, config.num_generations, config.max_completion_length)
    try:
        split = precision.device.type == "cpu"
        again = config.activation_checkpointing
        return trace(policy, group, precision.compute, split=split, shared=shared, checkpointing=again), None
    except Untraceable as error:
        each = activation_bytes(causal_lm(policy).config, precision.compute.itemsize) or 0
        zero = Line(0, 0)
        return Passes(Line(0, each), Line(0, each), zero, zero), str(error)


def footprint(
    policy: nn.Module,
    config: Config,
    precision: Precision,
    static: Static,
    passes: tuple[Passes, str | None],
    longest: int,
    tokens: int,
) -> Footprint:
    """longest: tokens of the longest prompt. tokens: most row tokens of a micro-batch."""
    lines, estimate = passes
    group = Group(longest, config.num_generations, config.max_completion_length)
    whole = tokens // group.tokens
    if whole:  # groups in a micro-batch
        micro_batches, row, scored = -(-config.prompts_per_step // whole), whole * group.tokens, whole * group.scored
        if micro_batches == 1:
            row, scored = config.prompts_per_step * group.tokens, config.prompts_per_step * group.scored
    else:
        answers = max(1, (tokens - longest) // max(1, config.max_completion_length - 1))
        piece = Group(longest, answers, config.max_completion_length)
        micro_batches = config.prompts_per_step * -(-config.num_generations // answers)
        row, scored = piece.tokens, piece.scored
    head, trained_head = find_head(causal_lm(policy)), 0
    if causal_lm(policy).get_input_embeddings().weight.requires_grad:  # type: ignore[operator]
        trained_head = head.weight.numel() * head.weight.element_size()
    buffers = chunk_bytes(scored, len(head.weight), precision.compute, bool(head.softcap))
    hidden = scored * head.weight.shape[1] * 4  # gradient of the head's input
    ends = max(lines.saved(row) + buffers, lines.peak(row)) + hidden + trained_head
    gradients = static.gradients
    if micro_batches * config.num_iterations == 1:  # they come as the activations go
        training = static.held + max(ends, gradients - trained_head + lines.embeddings(row) + trained_head)
    else:
        training = static.held + gradients + ends
    return Footprint(
        static, row, micro_batches, lines.saved(row) / row, lines.saved(row), buffers + hidden + trained_head, training,
        estimate=estimate, **_sampling(policy, config, precision, static, lines, longest),
    )  # fmt: skip


def _sampling(
    policy: nn.Module, config: Config, precision: Precision, static: Static, lines: Passes, longest: int
) -> dict[str, int]:
    """Keys and values, logits and the step's peak, of a training step or of held-out problems, whichever is more."""
    shape = shape_of_model(policy, (precision.sampling or torch.float32).itemsize)
    groups, each = config.prompts_per_step, config.num_generations
    rows = min(groups * each, config.max_rows)
    if min(config.eval_problems * config.eval_samples, config.max_rows) > rows:
        each = config.eval_samples
        rows = min(config.eval_problems * each, config.max_rows)
    room, prompt = max(1, config.max_completion_length - 1), longest
    prompts = -(-rows // each)
    pages = rows * -(-room // PAGE) + prompts * -(-prompt // PAGE)
    pool = pages * PAGE * shape.cache
    if config.cache_gib is not None and pool > config.cache_gib * 2**30:
        fewer = max(1, int(rows * config.cache_gib * 2**30 / pool))
        rows, prompts, pool = fewer, -(-fewer // each), int(config.cache_gib * 2**30)
    resident = prompts * prompt
    room = -(-room // PAGE) * PAGE
    if precision.device.type == "cuda":  # caches of few sizes, for CUDA graphs
        room, prompt = round_up(room, LEAST), round_up(prompt, LEAST)
        own, stacked = round_up(rows) * room, round_up(prompts) * prompt
    else:
        own, stacked = rows * room, prompts * prompt
    cached = (resident + stacked + own) * shape.cache
    vocabulary = len(find_head(causal_lm(policy)).weight)
    copies = 3 if config.temperature == 1 and not config.filters else 6
    drawing = copies * rows * vocabulary * 4
    prefill = min(resident, PREFILL_TOKENS + longest)
    dynamic = max(cached + drawing + lines.forward(rows), resident * shape.cache + drawing + lines.forward(prefill))
    return {
        "keys_values": cached, "drawing": drawing, "rows": rows, "pool": pool,
        "sampling": static.held + static.laid_out + dynamic,
    }  # fmt: skip
