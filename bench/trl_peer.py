"""TRL's GRPOTrainer on one workload, tuned for a CPU: one JSON line of seconds a step by phase, and peak memory.

    python bench/trl_peer.py W1 --model runs/smollm2/start [--steps 1] [--rows 16]

fp32, no gradient checkpointing, one optimiser step a rollout (so no pass for old log-probs), the reference only with a
KL penalty. Answers have forced lengths. The first step warms up and is not counted. Phases add up to the step:
generate and reward as TRL's own methods, reference: the rest of its scoring (reference pass, advantages), forward (with
the loss), backward, and optimiser: all that happens outside of a training step (clipping, update, bookkeeping).
`train` is forward + backward + optimiser.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from forced import ForcedEnd
from measure import Clock, emit, resident_gib
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workloads import WORKLOADS, Workload, reward_of, texts

from groupline.models.load import resolve_model
from groupline.tasks.task import get_task

ROWS = 16  # answers of a forward pass; `compare.py --tune` tries the others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", default="runs/smollm2/start")
    parser.add_argument("--steps", type=int, default=1, help="counted steps")
    parser.add_argument("--rows", type=int, help="per_device_train_batch_size; it must divide the step's answers")
    parser.add_argument(
        "--cache", help="cache_implementation of generate, for instance static; TRL's default if absent"
    )
    args = parser.parse_args()
    work = WORKLOADS[args.workload]
    rows = args.rows or min(ROWS, work.answers)
    if work.answers % rows:
        raise SystemExit(f"--rows {rows} does not divide the {work.answers} answers of a step of {work.name}")
    with tempfile.TemporaryDirectory() as folder:
        trainer = set_up(work, args.model, args.steps, rows, args.cache, folder)
        loaded = resident_gib()
        steps = Steps(trainer, work)
        trainer.add_callback(steps)
        trainer.train()
    emit(
        steps.rows[1:],
        system="trl",
        version=version("trl"),
        workload=work.name,
        new_tokens=steps.new_tokens,
        prompt_tokens=steps.prompt_tokens,
        trained_tokens=steps.tokens,
        loaded_gib=loaded,
        threads=torch.get_num_threads(),
        settings={"per_device_train_batch_size": rows, "cache_implementation": args.cache},
    )


def set_up(work: Workload, model: str, steps: int, rows: int, cache: str | None, out: str) -> GRPOTrainer:
    """The trainer, its model's `generate` forced to the workload's lengths."""
    folder = resolve_model("builtin") if work.tiny else model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)

    def by_place(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        groups = [prompts[i : i + work.group] for i in range(0, len(prompts), work.group)]
        if any(p != group[0] for group in groups for p in group):
            raise RuntimeError("the answers are not in the order of their groups, so rewards by place would be wrong")
        return [reward_of(work, place) for place in range(len(completions))]

    config = GRPOConfig(
        output_dir=out, num_generations=work.group, max_completion_length=work.longest, temperature=1.0, beta=work.beta,
        loss_type="grpo", epsilon=0.2, learning_rate=1e-5, per_device_train_batch_size=rows,
        gradient_accumulation_steps=work.answers // rows, max_steps=steps + 1, use_cpu=True, bf16=False, fp16=False,
        gradient_checkpointing=False, cache_implementation=cache, shuffle_dataset=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    )  # fmt: skip
    lora = LoraConfig(
        r=work.lora, lora_alpha=2 * work.lora, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=[by_place],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts_of(work, tokenizer, steps + 1)]),
        processing_class=tokenizer,
        peft_config=lora if work.lora else None,
    )
    force(policy, work, trainer.eos_token_ids)
    return trainer


def prompts_of(work: Workload, tokenizer: Any, steps: int) -> list[Any]:
    """The same prompts in the same order as groupline gets."""
    count = work.prompts * steps
    if work.tiny:
        problems = get_task("arithmetic_th").problems("train", count, seed=0)
        return [[dict(message) for message in problem.prompt] for problem in problems]
    return texts(work, tokenizer, count)


def force(policy: Any, work: Workload, ends: list[int]) -> None:
    """Give every call of the policy's `generate` a processor that ends answers at their own length and nowhere else."""
    generate = policy.generate

    def forced(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return generate(
            *args,
            input_ids=input_ids,
            logits_processor=[ForcedEnd(work.lengths, ends, input_ids.shape[1])],
            **kwargs,
        )

    policy.generate = forced


class Steps(TrainerCallback):
    """Seconds by phase of every step, and the check that each step did the workload's work."""

    def __init__(self, trainer: GRPOTrainer, work: Workload) -> None:
        self.work = work
        self.rows: list[dict[str, float]] = []
        self.new_tokens = self.prompt_tokens = self.tokens = 0
        self.clock = Clock()
        self.clock.wrap(trainer, "_generate", "generate")
        self.clock.wrap(trainer, "_calculate_rewards", "reward")
        self.clock.wrap(trainer, "_generate_and_score_completions", "scored")
        self.clock.wrap(trainer, "compute_loss", "forward")
        self.clock.wrap(trainer, "training_step", "passes")
        self._count(trainer)

    def _count(self, trainer: GRPOTrainer) -> None:
        """Count from the masks: prompt tokens once a group, answer tokens as scored, answer tokens as trained."""
        score, loss = trainer._generate_and_score_completions, trainer.compute_loss

        def scored(inputs: Any) -> Any:
            out = score(inputs)
            lengths = out["completion_mask"].sum(1)
            if lengths.tolist() != list(self.work.lengths) * self.work.prompts:
                raise RuntimeError(f"{self.work.name}: TRL's answers have lengths {lengths.tolist()}")
            self.new_tokens = int(lengths.sum())
            self.prompt_tokens = int(out["prompt_mask"].sum()) // self.work.group
            return out

        def trained(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens += int(inputs["completion_mask"].sum())
            return loss(model, inputs, *args, **kwargs)

        trainer._generate_and_score_completions, trainer.compute_loss = scored, trained

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.tokens = 0
        self.clock.take()
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step, spent = time.perf_counter() - self._began, self.clock.take()
        if self.tokens != self.work.new_tokens:
            raise RuntimeError(f"{self.work.name}: TRL trained on {self.tokens} tokens, not {self.work.new_tokens}")
        row = {"step": step, "generate": spent["generate"], "reward": spent["reward"]}
        row["reference"] = spent["scored"] - spent["generate"] - spent["reward"]
        row["train"] = step - spent["scored"]
        row["forward"] = spent["forward"]
        row["backward"] = spent["passes"] - spent["scored"] - spent["forward"]
        row["optimiser"] = step - spent["passes"]
        self.rows.append(row)


if __name__ == "__main__":
    main()
