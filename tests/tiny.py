"""Tiny random models of many architectures, a tiny tokenizer, and hand-made records. For every test."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from groupline.models.lora import add_lora
from groupline.models.new import new_tokenizer
from groupline.models.packing import PackedRow
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.training.optim import Optimiser

VOCABULARY = 101
WINDOW = 6  # Gemma's sliding window: smaller than the tests' sequences
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8}
_GEMMA = {**_GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "num_hidden_layers": 3}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
_STATE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, _GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, "tie_word_embeddings": True}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**_GEMMA, "layer_types": _LOCAL, "final_logit_softcapping": 5.0},
    ),
    "neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _SHAPE),
    "phi": (PhiForCausalLM, PhiConfig, _SHAPE),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**_GEMMA, "layer_types": _LOCAL, "attn_logit_softcapping": 4.0}),
    "bloom": (BloomForCausalLM, BloomConfig, {**_STATE, "n_head": 4, **_NO_ENDS}),
    "mamba": (MambaForCausalLM, MambaConfig, {**_STATE, **_NO_ENDS}),
}
SHARED = ("llama", "qwen2", "qwen3", "gemma3", "neox", "phi")  # run on packed rows
UNSHARED = ("bloom", "gemma2", "mamba")  # fall back to plain rows


def tiny_model(
    kind: str, seed: int = 0, *, scale: float = 10.0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model of this architecture, dropout off. Matrices are scaled up, so that distributions are not flat.

    State spaces are scaled less: their steps stand in exponents, and rounding would grow with the scale.
    """
    scale = min(scale, 3.0) if kind == "mamba" else scale
    cls, config, shape = _KINDS[kind]
    torch.manual_seed(seed)
    model = cls(config(**{**shape, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name:
                parameter.mul_(scale)
            elif parameter.dim() == 1 and "bias" in name and kind != "mamba":
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def adapted(model: Any, **settings: Any) -> Any:
    """A PEFT model with any LoRA settings, for what `add_lora` does not make itself."""
    with warnings.catch_warnings():  # peft asks for an attribute that transformers is renaming
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*lora_bias=True")  # it cannot be merged, and never is here
        policy = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    return policy.eval()


def tiny_lora(kind: str = "llama", seed: int = 0, *, r: int = 4, dropout: float = 0.0, **changes: Any) -> Any:
    """A tiny model with a LoRA adapter whose B is not zero, dropout off."""
    policy = add_lora(tiny_model(kind, seed, **changes), r, dropout=dropout)
    stir(policy, seed + 1, only="lora_B")
    return policy.eval()


@torch.no_grad()
def stir(model: Any, seed: int, *, size: float = 0.1, only: str = "") -> None:
    """Change trainable weights at random, in place: as an update would."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and only in name:
            parameter.add_(size * torch.randn(parameter.shape, generator=draw).to(parameter.dtype))


def random_ids(lengths: Sequence[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """One list of token ids per length."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def plain_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [len(ids)] of one answer: a forward of the whole model on one sequence. Nothing packed, cached, padded."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(list(ids))[:, None])[:, 0]


def padded_logprobs(model: Any, row: PackedRow, temperature: float = 1.0) -> Tensor:
    """Log-probs [M] in the row's order: one right-padded batch through the whole model, as a plain trainer does it."""
    pairs = [(p, a) for p, own in zip(row.prompts, row.answers, strict=True) for a in own]
    width = max(len(p) + len(a) for p, a in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (p, a) in enumerate(pairs):
        ids[i, : len(p) + len(a)] = torch.tensor([*p, *a])
        mask[i, : len(p) + len(a)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1] / temperature
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([logp[i, len(p) - 1 : len(p) + len(a) - 1] for i, (p, a) in enumerate(pairs)])


def gradients(model: Any) -> dict[str, Tensor]:
    """A copy of every parameter's gradient; absent means zero."""
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def relative_gap(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest gap between two sets of gradients, relative to the largest entry of the expected ones."""
    assert got.keys() == expected.keys()
    scale = max(float(x.abs().max()) for x in expected.values())
    return max(float((got[n] - expected[n]).abs().max()) for n in expected) / scale


def completion(prompt: Sequence[int], ids: Sequence[int], finish: Any = "stop", **changes: Any) -> Completion:
    logprobs = changes.pop("logprobs", [-0.5] * len(ids))
    return Completion(
        prompt_ids=tuple(prompt),
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        plain_logprobs=tuple(logprobs),
        finish_reason=finish,
        params=SamplingParams(),
        **changes,
    )


def group(
    name: str,
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    rewards: Sequence[float | None],
    truncated: Sequence[int] = (),
) -> Group:
    """A scored group. truncated: numbers of the answers that were cut at the token limit."""
    rollouts = [
        Rollout(completion(prompt, ids, "length" if i in truncated else "stop"), "", {"reward": r}, r)
        for i, (ids, r) in enumerate(zip(answers, rewards, strict=True))
    ]
    return Group(Problem(name, "prompt"), tuple(rollouts))


def optimiser_settings(**changes: Any) -> Any:
    """What `Optimiser` is built from: plain Adam at a constant rate, gradients not clipped."""
    settings = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 0.0,
    }
    return SimpleNamespace(**{**settings, **changes})


class Kept(Optimiser):
    """Keeps the gradients of the last update."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, optimiser_settings(), 1)
        self.model, self.kept = model, dict[str, Tensor]()

    def step(self) -> dict[str, float]:
        self.kept = gradients(self.model)
        return super().step()


@cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer that has merged the words, blank lines and ends of these few lines."""
    lines = [
        "the answer is 12\n\n",
        "the end.\n\nthe answer",
        "one and two make three END",
        "so it is STOP there",
        "a\n\n\nb",
    ] * 3
    return new_tokenizer(lines, 320)


def chain_model(following: dict[int, int], vocabulary: int, **changes: Any) -> Any:
    """A Llama that writes what `following` says: token t is followed by following[t], else by t itself.

    Embeddings are one-hot and every layer adds nothing, so the next token depends on the last one alone.
    """
    width = -(-vocabulary // 8) * 8
    model = tiny_model(
        "llama", vocab_size=vocabulary, hidden_size=width, num_attention_heads=4, tie_word_embeddings=False, **changes
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        model.lm_head.weight.zero_()
        for t in range(vocabulary):
            model.lm_head.weight[following.get(t, t), t] = 5.0
    return model
