"""groupline on a GPU with a random model shaped like Qwen3-0.6B: what `bench/gpu.sh` runs. Prints one line a figure.

    python bench/gpu.py check     answers and log-probs against a plain forward, with CUDA graphs and without
    python bench/gpu.py rollout   tokens a second and peak memory, beside `model.generate`
    python bench/gpu.py step      one optimiser step by phase, beside plain padded training

Utilisation is operations of the model's products (2 a weight and token forward, 6 forward and backward; attention not
counted) over the device's dense peak. `--small` takes a model of a few layers, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from forced import force_drafts
from ours import InOrder
from ours import run as run_steps
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupline import Config, Problem, Reward, SamplingParams
from groupline.models.load import load_tokenizer
from groupline.sampling import Engine
from groupline.training.setup import prepare

PEAK = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "T4": 65e12,
    "A10": 125e12,
}  # dense, half precision
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 4096}
PROMPTS, GROUP, PROMPT, ANSWER = 16, 16, 256, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["check", "rollout", "step"])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.small:
        raise SystemExit("no GPU: `--small` tries the script on a CPU")
    model = random_model(device, args.small)
    sizes = (2, 4, 12, 10) if args.small else (PROMPTS, GROUP, PROMPT, ANSWER)
    {"check": check, "rollout": rollout, "step": step}[args.part](model, *sizes)


def random_model(device: torch.device, small: bool) -> Any:
    """Weights spread so that distributions are neither flat nor certain. bf16; fp16 below compute capability 8."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE | (SMALL if small else {}), tie_word_embeddings=True, max_position_embeddings=4096)
    if device.type == "cpu":
        dtype = torch.float32
    else:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model.eval()


def random_prompts(model: Any, count: int, length: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (count, length), generator=draw).tolist()


def check(model: Any, prompts: int, group: int, prompt: int, answer: int) -> None:
    """Largest difference of a token's log-prob from a plain forward, and of answers with graphs from those without."""
    ids = [p[: prompt - 3 * i] for i, p in enumerate(random_prompts(model, 4, prompt))]
    params = SamplingParams(max_new_tokens=answer // 2, ignore_eos=True)
    found: dict[bool, Any] = {}
    for graphs in (False, True):
        engine = Engine(model, graphs=graphs)
        found[graphs] = engine.generate(ids, 4, params)
        worst = 0.0
        for own in found[graphs]:
            for c in own:
                row = torch.tensor([[*c.prompt_ids, *c.ids]], device=model.device)
                with torch.inference_mode():
                    logits = model(input_ids=row, use_cache=False).logits[0, len(c.prompt_ids) - 1 : -1].float()
                logp = torch.log_softmax(logits, -1).gather(-1, row[0, len(c.prompt_ids) :, None])[:, 0]
                worst = max(worst, float((logp.cpu() - torch.tensor(c.plain_logprobs)).abs().max()))
        limit = 1e-3 if model.dtype == torch.float32 else 0.3
        print(f"graphs {graphs}: log-probs differ by at most {worst:.2e} from a plain forward (limit {limit:g})")
        if not worst < limit:
            raise SystemExit("check failed")
    pairs = [(a, b) for x, y in zip(found[False], found[True], strict=True) for a, b in zip(x, y, strict=True)]
    equal = sum(a.ids == b.ids for a, b in pairs)
    print(f"answers equal with and without graphs: {equal} of {len(pairs)} (half precision rounds differently)")
    if model.dtype == torch.float32 and equal < len(pairs):
        raise SystemExit("check failed")


def rollout(model: Any, prompts: int, group: int, prompt: int, answer: int) -> None:
    ids = random_prompts(model, prompts, prompt)
    params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
    tokens = prompts * group * answer
    engine = Engine(model, max_rows=prompts * group)
    report(model, "engine, graphs", tokens, lambda: engine.generate(ids, group, params))
    plain = Engine(model, max_rows=prompts * group, graphs=False)
    report(model, "engine, no graphs", tokens, lambda: plain.generate(ids, group, params))
    rows = torch.tensor(ids, device=model.device).repeat_interleave(group, 0)

    @torch.inference_mode()
    def generate() -> None:
        model.generate(
            input_ids=rows, attention_mask=torch.ones_like(rows), max_new_tokens=answer, min_new_tokens=answer,
            do_sample=True, top_k=0, pad_token_id=0, disable_compile=True,
        )  # fmt: skip

    report(model, "model.generate", tokens, generate)


def step(model: Any, prompts: int, group: int, prompt: int, answer: int) -> None:
    """groupline's step by phase, then the training part alone on padded rows with whole logits."""
    tokenizer = load_tokenizer("builtin")
    texts = ["".join(chr(97 + i % 26) for i in p[: prompt // 2]) for p in random_prompts(model, prompts * 3, prompt)]
    force_drafts((answer,) * group)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model="builtin", output_dir=f"{folder}/run", steps=3, prompts_per_step=prompts, num_generations=group,
            max_completion_length=answer, beta=0.0, lora_r=16, learning_rate=1e-5, eval_problems=0,
        )  # fmt: skip

        def by_place(completions: Any, **columns: Any) -> list[float]:
            return [float(place % 2) for place in range(len(completions))]

        setup = prepare(
            config, say=print, model=model, tokenizer=tokenizer, rewards=[Reward("by_place", by_place)],
            problems=[Problem(str(i), text) for i, text in enumerate(texts)], held_out=[],
        )  # fmt: skip
        setup.sampling = replace(setup.sampling, ignore_eos=True)
        setup.stream = InOrder(setup.stream.prompted, seed=0)
        reset_peak()
        metrics, rows = run_steps(setup, 2, profile=False)
    for row in rows[1:]:
        print("groupline step: " + ", ".join(f"{k} {v:.3f} s" for k, v in row.items()))
    shown = metrics[-1]["num_prompt_tokens"] / prompts
    row_tokens = prompts * (shown + group * answer)
    train = rows[-1]["train"]
    speed, use = prompts * group * answer / train, mfu(model, 4 * row_tokens / train)
    print(f"groupline train: {speed:,.0f} answer tokens/s, peak {peak()}{use}")
    plain_training(setup.policy, prompts, group, int(shown), answer)


def plain_training(policy: Any, prompts: int, group: int, prompt: int, answer: int) -> None:
    """Forward and backward on padded rows, the prompt repeated, log-probs from whole logits: as many rows as fit."""
    rows = torch.randint(0, 1000, (group, prompt + answer), device=policy.device)
    count = 1

    def one(size: int) -> None:
        part = rows[:size]
        logits = policy(input_ids=part, use_cache=False).logits[:, prompt - 1 : -1].float()
        logp = torch.log_softmax(logits, -1).gather(-1, part[:, prompt:, None])
        (logp.mean()).backward()

    while count < group:
        try:
            one(count * 2)
            count *= 2
        except torch.cuda.OutOfMemoryError:
            break
    policy.zero_grad(set_to_none=True)
    reset_peak()
    seconds = timed(lambda: one(count))
    rate = count * answer / seconds
    use = mfu(policy, 4 * count * (prompt + answer) / seconds)
    print(f"plain train, {count} rows: {rate:,.0f} answer tokens/s, peak {peak()}{use}")


def report(model: Any, name: str, tokens: int, work: Callable[[], Any]) -> None:
    reset_peak()
    seconds = timed(work, 2)
    print(f"{name}: {tokens / seconds:,.0f} tokens/s, peak {peak()}{mfu(model, 2 * tokens / seconds)}", flush=True)


def timed(work: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds, the first call not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def mfu(model: Any, per_weight: float) -> str:
    """per_weight: operations a weight and second."""
    weights = sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak_rate = next((rate for key, rate in PEAK.items() if key in name), None)
    rate = weights * per_weight
    return f", {rate / 1e12:.2f} TFLOP/s" + (
        f", {rate / peak_rate:.1%} of {name}'s peak" if peak_rate else f" on {name}"
    )


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if torch.cuda.is_available() else "not measured"


if __name__ == "__main__":
    main()
