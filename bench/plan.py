"""What `groupline plan` predicts beside what a step takes: memory by part, and seconds. Prints a table a case.

    python bench/plan.py [CASE ...] [--model runs/smollm2/start] [--json FILE]

Memory is counted by the allocator: torch's profiler tells of every block that is taken and given back, in the third step
of a run (from the second on the optimiser has its moments). Weights, moments, gradients and copies are the sizes of the
tensors themselves. All answers are as long as they may be and all prompts alike, as the prediction supposes. `resident` is
the process's largest resident set less what it was before the model was loaded. Seconds are those of the second step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forced import force_drafts
from measure import peak_gib, resident_gib
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

import groupline.training.method
import groupline.training.step
from groupline import Config, Problem, Reward
from groupline.parallel.mesh import SOLO
from groupline.sampling import engine as engines
from groupline.training import grpo
from groupline.training.planning import device_of, planned_footprint, step_seconds
from groupline.training.run import RunFolder
from groupline.training.setup import Setup, prepare
from groupline.training.sharing import share_model

MIB = 2**20
WORDS = "A farmer has 12 hens and each hen lays 3 eggs a day. She sells 20 of them. How many eggs are left? Think step by step."
COMMON: dict[str, Any] = {"steps": 3, "eval_problems": 0, "learning_rate": 1e-6, "save_steps": 0}
CASES: dict[str, dict[str, Any]] = {
    "builtin-full": {"prompts_per_step": 16, "num_generations": 8, "max_completion_length": 96, "beta": 0.0},
    "builtin-kl": {
        "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64, "beta": 0.04, "micro_batch_tokens": 1200,
    },
    "builtin-again": {  # activations are computed again
        "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 64, "beta": 0.0, "micro_batch_tokens": 1200,
        "activation_checkpointing": True,
    },
    "smollm2-again": {
        "prompts_per_step": 2, "num_generations": 8, "max_completion_length": 32, "beta": 0.0, "micro_batch_tokens": 512,
        "activation_checkpointing": True,
    },
    "builtin-lora": {
        "prompts_per_step": 4, "num_generations": 8, "max_completion_length": 64, "beta": 0.04, "lora_r": 8,
    },
    "smollm2-lora": {
        "prompts_per_step": 2, "num_generations": 8, "max_completion_length": 32, "beta": 0.04, "lora_r": 16,
    },
    "smollm2-full": {
        "prompts_per_step": 2, "num_generations": 8, "max_completion_length": 32, "beta": 0.0, "micro_batch_tokens": 512,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all, each best in its own process")
    parser.add_argument("--model", default="runs/smollm2/start")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in args.cases or CASES:
        model = "builtin" if name.startswith("builtin") else args.model
        found = compare(name, model)
        print(table(name, found), flush=True)
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": name} | found) + "\n")


def compare(name: str, model: str) -> dict[str, Any]:
    """{part: [predicted, measured]} in bytes under `memory`, in seconds under `seconds`."""
    before = resident_gib()
    with tempfile.TemporaryDirectory() as folder:
        config = Config(model=model, output_dir=f"{folder}/run", **COMMON | CASES[name])
        force_drafts([config.max_completion_length] * config.num_generations)

        def by_place(completions: Any, **columns: Any) -> list[float]:
            return [float(place % 2) for place in range(len(completions))]

        problems = [Problem(str(i), WORDS) for i in range(config.prompts_per_step * config.steps)]
        setup = prepare(
            config, say=str, rewards=[Reward("by_place", by_place)], problems=problems, held_out=[],
        )  # fmt: skip
        setup.sampling = replace(setup.sampling, ignore_eos=True)
        share_model(setup, SOLO)
        f = planned_footprint(setup)
        s = f.static
        with RunFolder(setup.config) as log:
            grpo.one_step(setup, log, 0)
            timed = grpo.one_step(setup, log, 1)
            resident = (peak_gib() - before) * 2**30
            live, sizes = profiled(setup, log)
        prompt = len(setup.stream.prompted[0].ids)
        seconds = step_seconds(setup.policy, config, device_of(config), config.beta != 0, prompt)
    memory = {
        "weights": [s.weights, sizes["weights"]],
        "reference": [s.reference, sizes["reference"]],
        "sampler's copies": [s.sampler + s.joined, sizes["sampler"]],
        "layout for decoding": [s.laid_out, live["layout"]],
        "optimiser": [s.optimiser, sizes["optimiser"]],
        "gradients": [s.gradients, sizes["gradients"]],
        "activations": [f.activations, live["saved"]],
        "head chunk": [f.head, live["head"]],
        "KV cache": [f.keys_values, sizes["cache"]],
        "sampling beyond held": [f.sampling - s.held - s.laid_out, live["sampling"]],
        "training beyond held": [f.training - s.held, live["training"]],
        "update beyond held": [f.update - s.held, live["update"]],
        "peak": [f.peak, _held(sizes) + max(live["sampling"] + live["layout"], live["training"], live["update"])],
        "resident": [f.needed, resident],
    }
    spent = {
        "sampling": [seconds["prefill"] + seconds["decode"], timed["time/generate"]],
        "reference": [seconds["reference"], timed["time/reference"]],
        "training": [seconds["train"] + seconds["optimiser"], timed["time/train"]],
        "step": [seconds["total"], timed["step_time"]],
    }
    facts = {
        "tokens": f.tokens,
        "micro_batches": [f.micro_batches, timed["micro_batches"]],
        "threads": torch.get_num_threads(),
    }
    return {"memory": memory, "seconds": spent, "rate": seconds["rate"], "bandwidth": seconds["bandwidth"]} | facts


def _held(sizes: dict[str, float]) -> float:
    return sum(sizes[k] for k in ("weights", "reference", "sampler", "optimiser"))


class Marks:
    """When wrapped functions began and ended, in nanoseconds of the wall clock, as the profiler counts them."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[int, int]]] = {}

    def wrap(self, owner: Any, name: str, before: Any = None) -> None:
        """before: called first, with the function's own arguments."""
        key = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        inner = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args)
            start = time.time_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spans.setdefault(key, []).append((start, time.time_ns()))

        setattr(owner, name, marked)


def profiled(setup: Setup, log: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes beyond what is held at the start of a phase, bytes of what is held), of the run's last step."""
    marks, sizes = Marks(), {}
    engine, policy = setup.engine, setup.policy
    own = [p for p in engine.mirror.model.parameters() if id(p) not in engine.mirror.borrowed]
    sizes["weights"] = _bytes([*policy.parameters(), *policy.buffers()])
    sizes["sampler"] = _bytes(own)
    reference = setup.reference
    sizes["reference"] = _bytes(reference.state().values()) if reference else 0
    sizes["cache"] = 0.0

    def grads(*_: Any) -> None:
        sizes["gradients"] = _bytes(p.grad for p in policy.parameters() if p.grad is not None)

    def cached(plan: Any, *_: Any) -> None:
        pairs = [*plan._own.values(), *plan._prompt.values()]
        stores = [*plan.prompts.keys.values(), *plan.prompts.values.values()]
        sizes["cache"] = max(sizes["cache"], _bytes([t for pair in pairs for t in pair] + stores))

    marks.wrap(setup.optimiser, "step", grads)
    marks.wrap(engine, "generate")
    marks.wrap(engine, "load_weights")
    marks.wrap(groupline.training.step, "one_pass_loss")
    marks.wrap(groupline.training.method, "train_step")
    marks.wrap(engines.DecodePlan, "step", cached)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        grpo.one_step(setup, log, 2)
    curve = allocations(prof)
    state = setup.optimiser.adam.state.values()
    sizes["optimiser"] = _bytes(t for entry in state for k, t in entry.items() if k != "step")

    def at(when: int) -> float:
        return next((held for t, held in reversed(curve) if t <= when), 0.0)

    def most(start: int, end: int) -> float:
        return max((held for t, held in curve if start <= t <= end), default=at(start))

    spans = marks.spans
    train, update = spans["groupline.training.method.train_step"][0], spans["Optimiser.step"][0]
    sample, publish = spans["Engine.generate"][0], spans["Engine.load_weights"][0]
    base = at(train[0])
    heads = spans["groupline.training.step.one_pass_loss"]
    grown = [at(t0) - base - (sizes["gradients"] if i else 0) for i, (t0, _) in enumerate(heads)]
    return {
        "saved": max(grown),
        "head": max(most(*span) - at(span[0]) for span in heads),
        "training": most(train[0], update[0]) - base,
        "update": most(*update) - base,
        "sampling": most(*sample) - at(sample[0]),
        "layout": at(publish[1]) - at(publish[0]),
    }, sizes


def allocations(prof: Any) -> list[tuple[int, float]]:
    """(time, bytes held since the profile began) after every block taken or given back."""
    found, todo = [], list(prof.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    curve, held = [], 0.0
    for when, size in sorted(found, key=lambda pair: pair[0]):
        held += size
        curve.append((when, held))
    return curve


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(n for n in {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()))


def table(name: str, found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"{name}: {found['tokens']} row tokens, {found['micro_batches']} micro-batches, {found['threads']} threads"
    ]
    lines += ["", "| part | predicted MiB | measured MiB | ratio |", "|---|---|---|---|"]
    for part, (predicted, measured) in found["memory"].items():
        if predicted or measured:
            ratio = f"{predicted / measured:.2f}" if measured else "-"
            lines.append(f"| {part} | {predicted / MIB:.1f} | {measured / MIB:.1f} | {ratio} |")
    lines += ["", "| phase | floor s | measured s | measured / floor |", "|---|---|---|---|"]
    for phase, (least, measured) in found["seconds"].items():
        if least:
            lines.append(f"| {phase} | {least:.2f} | {measured:.2f} | {measured / least:.1f} |")
    rates = f"{found['rate'] / 1e9:.0f} GFLOP/s, {found['bandwidth'] / 1e9:.1f} GB/s"
    return "\n".join([*lines, "", rates, ""])


if __name__ == "__main__":
    main()
