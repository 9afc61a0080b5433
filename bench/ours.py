"""groupline on one workload: one JSON line of seconds a step by phase, and peak memory.

    python bench/ours.py W1 --model runs/smollm2/start [--steps 2]

Answers have forced lengths: end-of-sequence ends none. The first step warms up and is not counted.
`train` is forward (with the loss) + backward + optimiser (clipping included) + publish (weights to the sampler).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from forced import force_drafts
from measure import Clock, emit, resident_gib
from workloads import WORKLOADS, Workload, reward_of, texts

from groupline import Config, Problem, Reward
from groupline.models.load import load_model, load_tokenizer
from groupline.tasks.task import get_task
from groupline.training import grpo
from groupline.training.collect import ProblemStream, Prompted
from groupline.training.run import RunFolder
from groupline.training.setup import Setup, prepare

PHASES = {
    "step": "step_time",
    "generate": "time/generate",
    "reward": "time/reward",
    "reference": "time/reference",
    "train": "time/train",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", default="runs/smollm2/start")
    parser.add_argument("--steps", type=int, default=2, help="counted steps")
    parser.add_argument("--micro", type=int, help="most row tokens of a forward pass")
    parser.add_argument("--profile", action="store_true", help="print where the last step's time went, by operator")
    args = parser.parse_args()
    work = WORKLOADS[args.workload]
    force_drafts(work.lengths)
    with tempfile.TemporaryDirectory() as folder:
        setup = set_up(work, args.model, args.steps, args.micro, f"{folder}/run")
        loaded = resident_gib()
        metrics, rows = run(setup, args.steps, args.profile)
    last = metrics[-1]
    check(work, last)
    emit(
        rows[1:],
        system="groupline",
        version=version("groupline"),
        workload=work.name,
        new_tokens=int(last["num_completion_tokens"]),
        prompt_tokens=int(last["num_prompt_tokens"]),
        trained_tokens=int(last["num_trained_tokens"]),
        loaded_gib=loaded,
        threads=torch.get_num_threads(),
    )


class InOrder(ProblemStream):
    """The problems as they come, so that every system sees the same prompts in the same step."""

    def take(self, step: int, count: int) -> list[Prompted]:
        return list(self.prompted[step * count : (step + 1) * count])


def problems_of(work: Workload, tokenizer: Any, count: int) -> list[Problem]:
    """The workload's prompts; the tiny one's are conversations of the built-in task."""
    if work.tiny:
        return list(get_task("arithmetic_th").problems("train", count, seed=0))
    return [Problem(str(i), text) for i, text in enumerate(texts(work, tokenizer, count))]


def set_up(work: Workload, model: str, steps: int, micro: int | None, out: str) -> Setup:
    """Everything the loop needs, with rewards by place and answers that end at their forced lengths only."""
    folder = "builtin" if work.tiny else model
    tokenizer = load_tokenizer(folder)
    config = Config(
        model=folder, output_dir=out, steps=steps + 1, prompts_per_step=work.prompts,
        num_generations=work.group, max_completion_length=work.longest, beta=work.beta, lora_r=work.lora,
        learning_rate=1e-5, eval_problems=0, **({"micro_batch_tokens": micro} if micro else {}),
    )  # fmt: skip

    def by_place(completions: Sequence[str], **columns: Any) -> list[float]:
        return [reward_of(work, place) for place in range(len(completions))]

    setup = prepare(
        config,
        say=str,
        model=load_model(folder),
        tokenizer=tokenizer,
        rewards=[Reward("by_place", by_place)],
        problems=problems_of(work, tokenizer, work.prompts * (steps + 1)),
        held_out=[],
    )
    setup.sampling = replace(setup.sampling, ignore_eos=True)
    setup.stream = InOrder(setup.stream.prompted, seed=0)
    return setup


def run(setup: Setup, steps: int, profile: bool) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """(metrics, seconds by phase) of the warm-up step and `steps` counted ones."""
    clock = Clock()
    clock.wrap(setup.optimiser, "backward", "backward")
    clock.wrap(setup.optimiser, "step", "optimiser")
    clock.wrap(setup.engine, "load_weights", "publish")
    metrics, rows = [], []
    with RunFolder(setup.config) as log:
        for step in range(steps + 1):
            clock.take()
            if profile and step == steps:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
                    metrics.append(grpo.one_step(setup, log, step))
                print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
            else:
                metrics.append(grpo.one_step(setup, log, step))
            parts = {"backward": 0.0, "optimiser": 0.0, "publish": 0.0} | clock.take()
            row = {name: float(metrics[-1][key]) for name, key in PHASES.items()}
            rows.append(row | {"forward": row["train"] - sum(parts.values())} | parts)
    return metrics, rows


def check(work: Workload, metrics: dict[str, Any]) -> None:
    """The step did the workload's work, or RuntimeError says how it differs."""
    found = int(metrics["num_completion_tokens"]), int(metrics["num_trained_tokens"])
    if found != (work.new_tokens, work.trained_tokens):
        raise RuntimeError(
            f"{work.name}: groupline sampled {found[0]} tokens and trained on {found[1]}; "
            f"the workload has {work.new_tokens} and {work.trained_tokens}"
        )


if __name__ == "__main__":
    main()
