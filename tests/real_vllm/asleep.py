"""Run with the Python of an environment that has vLLM and groupline: one sampler in this process, and then another.

A CPU's memory is not given back, but the calls are vLLM's own, and it draws nothing before it is wholly awake.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from groupline.models.load import load_model, load_tokenizer
from groupline.models.lora import add_lora
from groupline.records import SamplingParams
from groupline.sampling import SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.sampling.vllm_options import VllmOptions

ARGS = ("--max-model-len", "512")


def main(folder: Path, adapter: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    base = load_model("builtin").eval()
    model: Any = add_lora(base, 4).eval() if adapter else base
    tokenizer = load_tokenizer("builtin")
    if adapter:
        load_model("builtin").save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
    options = VllmOptions(
        mode="colocate", folder=folder / "vllm", arguments=ARGS, cache_gib=0.25, max_rows=16, tolerance=1e-4,
        base=str(folder / "base") if adapter else None, rank=4,
    )  # fmt: skip
    before = torch.get_rng_state()
    said: list[str] = []
    sampler = VllmSampler(model, tokenizer, options, said.append)
    sampler._sleeps = True  # where there is no GPU, vLLM takes the calls and keeps the memory
    params = SamplingParams(max_new_tokens=12)
    first = sampler.generate([[5, 6, 7, 8]], 2, params, seed=1)
    found: dict[str, Any] = {"undisturbed": bool(torch.equal(before, torch.get_rng_state()))}
    torch.set_num_threads(1)
    sampler.release()
    engine = sampler._client._engine  # type: ignore[union-attr]
    found["asleep"] = engine.is_sleeping()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not adapter or "lora_" in name:
                p.add_(0.05 * torch.randn_like(p))
    sampler.load_weights(model, 1)
    found["awake"] = not engine.is_sleeping()
    second = sampler.generate([[5, 6, 7, 8]], 2, params, seed=1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, *second[0][0].ids]])).logits[0, 3:-1]
    own = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(second[0][0].ids)[:, None])[:, 0]
    found["gap"] = float((own - torch.tensor(second[0][0].logprobs)).abs().max())
    found["changed"] = first[0][0].logprobs != second[0][0].logprobs
    found["versions"] = [first[0][0].policy_version, second[0][0].policy_version]
    sampler.close()
    sampler.close()
    again = VllmSampler(model, tokenizer, options, said.append)
    warm = SamplingParams(max_new_tokens=12, temperature=0.7)
    third = again.generate([[5, 6, 7, 8]], 1 if adapter else 2, warm, seed=1)
    found["plain_apart"] = third[0][0].logprobs != third[0][0].plain_logprobs
    again.close()
    try:
        VllmSampler(model, tokenizer, VllmOptions(mode="colocate", arguments=("--no-such",)), print).stand_by()
    except SamplerError as error:
        found["refused"] = str(error)
    found["said"] = said
    found["log"] = (folder / "vllm" / "engine.log").stat().st_size
    return found


if __name__ == "__main__":
    print("found " + json.dumps(main(Path(sys.argv[1]), sys.argv[2] == "adapter")))
