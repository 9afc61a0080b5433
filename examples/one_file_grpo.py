"""GRPO in one file, on torch and transformers alone: the algorithm without the machinery.

    python examples/one_file_grpo.py MODEL [--steps 100] [--beta 0.04] [--weight per_token] [--device cuda] ...

MODEL is a folder in Hugging Face format or a hub id. A step draws G answers to each of B prompts, scores them by code,
and makes the answers that beat their own group's mean likelier, the others less likely (arXiv 2402.03300): no value
network, no reward model. A test holds loss and gradient equal to those of the groupline package, which runs every
prompt once for its group, pads nothing outside attention and never holds logits whole.

Legend: B prompts, G answers to each, S = B * G answers (s in a micro-batch), P prompt and T answer tokens, padded.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@dataclass(frozen=True)
class Settings:
    """Every setting, each also a flag of the same name."""

    model: str
    steps: int = 50
    prompts: int = 8  # B, a step
    group: int = 8  # G, answers to each prompt
    max_new_tokens: int = 96
    temperature: float = 1.0
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    num_iterations: int = 1  # optimiser steps on the same answers; from the second on, the clip has something to do
    micro_batch: int = 32  # answers in one forward pass: memory only, the gradient does not depend on it
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0  # weight of the KL to the starting model; 0 keeps no second model
    scale: str = "group"  # "group": divide advantages by the group's std; "none": leave them centred (Dr. GRPO)
    weight: str = "per_sequence"  # or "per_token" (DAPO), "per_budget" (Dr. GRPO)
    device: str = "cpu"
    seed: int = 0


SYSTEM = "Think in English inside <think>...</think>, then give the answer as a number alone on the last line."
NAMES = ("Anna", "Ben", "Mia", "Tom", "Lily", "Sam")
SITUATIONS = (
    ("{name} has {a} apples and buys {b} more. How many apples does {name} have now?", lambda a, b: a + b),
    ("A class has {a} boys and {b} girls. How many pupils are in the class?", lambda a, b: a + b),
    ("There are {a} trays with {b} eggs on each. How many eggs are there in all?", lambda a, b: a * b),
    ("A pen costs {a} dollars. {name} buys {b} pens. How many dollars does {name} pay?", lambda a, b: a * b),
)


def make_problem(rng: random.Random) -> tuple[str, int]:
    """A question and its answer."""
    text, solve = rng.choice(SITUATIONS)
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return text.format(name=rng.choice(NAMES), a=a, b=b), solve(a, b)


def correct(text: str, answer: int) -> float:
    """1 if the last number after the thinking is the answer. Thinking that never closes has not answered."""
    said = text.rpartition("</think>")[2]
    numbers = re.findall(r"-?\d+", said.replace(",", "")) if "<think>" not in said else []
    return float(bool(numbers) and int(numbers[-1]) == answer)


def well_formed(text: str) -> float:
    """1 for one <think> with something in it, then something after it. Paying for an empty one would teach emptiness."""
    return float(re.fullmatch(r"\s*<think>[^<]*\w[^<]*</think>[^<]*\w[^<]*", text) is not None)


def group_advantages(rewards: Tensor, group: int, scale: str = "group") -> Tensor:
    """How much better than its group each answer is. rewards [S], group by group -> [S].

    A group whose rewards are all equal says nothing about which answer is better: exactly 0, whatever the rounding.
    """
    r = rewards.double().view(-1, group)  # [B, G]
    unit = {"group": r.std(1, keepdim=True) + 1e-4, "none": 1.0}[scale]
    equal = r.amax(1, keepdim=True) == r.amin(1, keepdim=True)
    return ((r - r.mean(1, keepdim=True)) / unit).masked_fill(equal, 0.0).flatten().to(rewards.dtype)


def token_weights(trained: Tensor, rule: str, budget: int) -> Tensor:
    """What each token counts in the loss. trained [S, T], True where the model wrote -> [S, T], 0 at padding.

    Counted once, over all answers of the step. Dividing inside each micro-batch instead would let the way the step is
    cut up decide how much an answer matters.
    """
    lengths = trained.sum(1, keepdim=True)  # [S, 1]
    divisors = {
        "per_sequence": len(trained) * lengths,  # every answer counts the same, so a token of a long one counts less
        "per_token": lengths.sum(),  # every token counts the same, so a long answer counts more
        "per_budget": len(trained) * budget,  # as per_token, by a constant that does not depend on what was drawn
    }
    return trained / divisors[rule]


def token_logprobs(model: nn.Module, ids: Tensor, seen: Tensor, trained: Tensor, temperature: float) -> Tensor:
    """log p of each answer token, at the temperature it was drawn with. ids, seen [s, P + T], trained [s, T] -> [s, T]."""
    width = trained.shape[1]
    positions = (seen.cumsum(1) - 1).clamp(min=0)  # left padding must not shift a prompt's positions
    out = model(input_ids=ids, attention_mask=seen, position_ids=positions, logits_to_keep=width + 1, use_cache=False)
    logits = out.logits[:, :-1] / temperature  # the logits at t are about token t + 1
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, -width:, None]).squeeze(-1)
    return logp.masked_fill(~trained, 0.0)  # padding: 0, and no gradient


def policy_loss(
    logp: Tensor, old: Tensor, ref: Tensor | None, advantages: Tensor, weights: Tensor, s: Settings
) -> Tensor:
    """The clipped loss of a micro-batch, a sum. logp, old, ref, weights [s, T], advantages [s] -> scalar.

    While the weights are still those that drew the answers, ratio is 1 and the value is near 0 by construction: the
    advantages of a group cancel. Its gradient is not 0. So the loss says nothing about progress; the reward does.
    """
    advantage = advantages.to(logp.dtype)[:, None]
    ratio = torch.exp(logp - old)
    clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if ref is not None:  # k3: never negative, and the KL on average
        d = ref - logp
        loss = loss + s.beta * (torch.exp(d) - d - 1)
    return (weights * loss).sum()


@dataclass(frozen=True)
class Rollout:
    """The answers of a step, group by group. Token ids stay as they were drawn: text is never tokenised again."""

    ids: Tensor  # [S, P + T] left-padded prompt, right-padded answer
    seen: Tensor  # [S, P + T] 1 at real tokens
    trained: Tensor  # [S, T] True at tokens the model wrote, the end included
    texts: list[str]


def answer_mask(answers: Tensor, ends: Sequence[int]) -> Tensor:
    """True up to and including the first end of each answer, for stopping too must be learnt. [S, T] -> [S, T]."""
    is_end = torch.isin(answers, torch.tensor(ends, device=answers.device))
    return is_end.cumsum(1) - is_end.long() == 0


@torch.no_grad()
def rollout(model: Any, tokenizer: Any, questions: Sequence[str], s: Settings) -> Rollout:
    """`s.group` answers to each question, drawn from the model's whole distribution."""
    texts = [f"{SYSTEM}\n{q}\n" for q in questions]
    plain = not tokenizer.chat_template  # a template writes its own special tokens
    if not plain:
        talks = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}] for q in questions]
        texts = [tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in talks]
    prompt = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=plain, return_tensors="pt")
    prompt_ids, prompt_seen = (prompt[k].to(model.device) for k in ("input_ids", "attention_mask"))
    ids = model.generate(prompt_ids, attention_mask=prompt_seen, num_return_sequences=s.group)
    answers = ids[:, prompt_ids.shape[1] :]
    trained = answer_mask(answers, model.generation_config.eos_token_id)
    seen = torch.cat([prompt_seen.repeat_interleave(s.group, 0), trained.long()], 1)
    written = [row[mask].tolist() for row, mask in zip(answers, trained, strict=True)]
    return Rollout(ids, seen, trained, [tokenizer.decode(w, skip_special_tokens=True) for w in written])


def update(
    model: nn.Module, reference: nn.Module | None, optimiser: Any, data: Rollout, advantages: Tensor, s: Settings
) -> float:
    """`num_iterations` optimiser steps on one rollout; the last gradient's norm before clipping."""
    weights = token_weights(data.trained, s.weight, s.max_new_tokens)
    parts = [slice(i, i + s.micro_batch) for i in range(0, len(data.ids), s.micro_batch)]
    old: dict[int, Tensor] = {}
    ref: dict[int, Tensor] = {}
    for _ in range(s.num_iterations):
        for i, part in enumerate(parts):
            inputs = (data.ids[part], data.seen[part], data.trained[part], s.temperature)
            logp = token_logprobs(model, *inputs)
            old.setdefault(i, logp.detach())  # the first pass runs the very weights that drew the answers
            if reference is not None and i not in ref:
                with torch.no_grad():
                    ref[i] = token_logprobs(reference, *inputs)
            policy_loss(logp, old[i], ref.get(i), advantages[part], weights[part], s).backward()  # parts only add up
        norm = nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
        optimiser.step()
        optimiser.zero_grad()
    return float(norm)


def load(s: Settings) -> tuple[Any, Any]:
    """(model in fp32, tokenizer). The model's own top-k or repetition penalty is put aside: with it, answers would come
    from another distribution than the one whose log-probs are trained."""
    tokenizer = AutoTokenizer.from_pretrained(s.model)
    model = AutoModelForCausalLM.from_pretrained(s.model, dtype=torch.float32).to(s.device)
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=s.temperature, top_k=0, top_p=1.0, max_new_tokens=s.max_new_tokens,
        eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return model.eval(), tokenizer  # eval: dropout would make sampling and training two different policies


def train(s: Settings) -> list[dict[str, float]]:
    """Run all steps; the printed figures, one dict a step."""
    torch.manual_seed(s.seed)
    rng = random.Random(s.seed)
    model, tokenizer = load(s)
    reference = copy.deepcopy(model).requires_grad_(False) if s.beta else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=0.0)
    history = []
    for step in range(1, s.steps + 1):
        began = time.perf_counter()
        problems = [make_problem(rng) for _ in range(s.prompts)]
        data = rollout(model, tokenizer, [question for question, _ in problems], s)
        gold = [answer for _, answer in problems for _ in range(s.group)]
        right = torch.tensor([correct(t, a) for t, a in zip(data.texts, gold, strict=True)])  # [S]
        rewards = right + 0.3 * torch.tensor([well_formed(t) for t in data.texts])  # [S]
        advantages = group_advantages(rewards, s.group, s.scale).to(s.device)
        norm = update(model, reference, optimiser, data, advantages, s)
        facts = {
            "reward": float(rewards.mean()),
            "right": float(right.mean()),
            "signal": float((advantages.view(-1, s.group) != 0).any(1).float().mean()),
            "length": float(data.trained.sum(1).float().mean()),
            "grad": norm,
            "seconds": time.perf_counter() - began,
        }
        history.append(facts)
        print(f"step {step}/{s.steps}  " + "  ".join(f"{k} {v:.3f}" for k, v in facts.items()), flush=True)
    return history


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("model", help="folder in Hugging Face format, or a hub id")
    for f in fields(Settings)[1:]:
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default, help=f"default {f.default}")
    train(Settings(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    main()
