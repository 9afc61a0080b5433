"""The rollout alone: groupline's engine, `model.generate`, or transformers' continuous batching. One JSON line.

    python bench/engines.py groupline W1 --model runs/smollm2/start [--repeats 2]

Same model (fp32, no adapter), same prompts, same forced lengths as the workload; the first rollout warms up. `step` is
the seconds of one rollout.
generate: every prompt repeated for each of its answers, left-padded, as TRL does.
generate_batch: continuous batching with its cache sized for the workload (left alone, it takes 60% of the machine's
memory and is several times slower) in pages of 32 tokens. A group of even lengths is one request with G returned
sequences, so its prompt is encoded once; uneven lengths need a request an answer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from forced import ForcedEnd, force_drafts
from measure import emit, resident_gib
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from workloads import WORKLOADS, Workload, texts

from groupline import SamplingParams
from groupline.models.load import end_ids
from groupline.sampling import Engine

SYSTEMS = ("groupline", "generate", "generate_batch")
PAGE = 32
Rollout = Callable[[list[list[int]]], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("workload", choices=[w.name for w in WORKLOADS.values() if not w.tiny])
    parser.add_argument("--model", default="runs/smollm2/start")
    parser.add_argument("--repeats", type=int, default=2, help="counted rollouts")
    args = parser.parse_args()
    work = WORKLOADS[args.workload]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_safetensors=True).eval()
    rollout = {"groupline": ours, "generate": repeated, "generate_batch": continuous}[args.system](
        work, model, tokenizer
    )
    loaded, rows = resident_gib(), []
    ids = [list(i) for i in tokenizer(texts(work, tokenizer, work.prompts * (args.repeats + 1)))["input_ids"]]
    for number in range(args.repeats + 1):
        prompts = ids[number * work.prompts : (number + 1) * work.prompts]
        start = time.perf_counter()
        tokens = rollout(prompts)
        rows.append({"step": time.perf_counter() - start})
        if tokens != work.new_tokens:
            raise RuntimeError(f"{work.name}: {args.system} wrote {tokens} tokens, not {work.new_tokens}")
    emit(
        rows[1:],
        system=args.system,
        version=version("groupline" if args.system == "groupline" else "transformers"),
        workload=work.name,
        new_tokens=work.new_tokens,
        loaded_gib=loaded,
        threads=torch.get_num_threads(),
    )


def ours(work: Workload, model: Any, tokenizer: Any) -> Rollout:
    """groupline's engine."""
    force_drafts(work.lengths)
    engine = Engine(model, tokenizer, notify=str)
    params = SamplingParams(max_new_tokens=work.longest, ignore_eos=True)

    def rollout(prompts: list[list[int]]) -> int:
        return sum(len(c.ids) for group in engine.generate(prompts, work.group, params) for c in group)

    return rollout


def repeated(work: Workload, model: Any, tokenizer: Any) -> Rollout:
    """`model.generate` on every prompt once per answer."""
    ends = end_ids(model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=work.longest, do_sample=True, top_k=0, top_p=1.0, eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id, disable_compile=True,
    )  # fmt: skip

    @torch.inference_mode()
    def rollout(prompts: list[list[int]]) -> int:
        rows = [ids for ids in prompts for _ in range(work.group)]
        width = max(map(len, rows))
        batch = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in rows])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
        force = ForcedEnd(work.lengths, ends, width)
        out = model.generate(input_ids=batch, attention_mask=mask, generation_config=config, logits_processor=[force])[
            :, width:
        ]
        ended = torch.isin(out, force.ends).int()
        return int((ended.argmax(1) + 1).sum()) if bool(ended.any(1).all()) else -1

    return rollout


def continuous(work: Workload, model: Any, tokenizer: Any) -> Rollout:
    """transformers' `generate_batch`, or its manager where every answer has a length of its own."""
    even = len(set(work.lengths)) == 1
    pages = sum(-(-(work.prompt + length) // PAGE) + 1 for length in work.lengths) * work.prompts
    cache = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=min(4096, work.answers * work.prompt)
    )
    config = GenerationConfig(
        max_new_tokens=work.longest, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, disable_compile=True,
        pad_token_id=tokenizer.pad_token_id, num_return_sequences=work.group if even else 1,
    )  # fmt: skip
    settings = {"generation_config": config, "continuous_batching_config": cache, "warmup": False}

    def rollout(prompts: list[list[int]]) -> int:
        if even:
            out = model.generate_batch(prompts, **settings).values()
        else:
            out = []
            with model.continuous_batching_context_manager(**settings) as manager:
                for ids in prompts:
                    for length in work.lengths:
                        manager.add_request(list(ids), max_new_tokens=length)
                while len(out) < work.answers and manager.is_running():
                    done = manager.get_result(timeout=1)
                    if done is not None and done.is_finished():
                        out.append(done)
        return sum(len(answer.generated_tokens) for answer in out)

    return rollout


if __name__ == "__main__":
    main()
