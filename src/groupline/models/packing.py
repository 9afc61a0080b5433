"""Rows of tokens in which every prompt stands once, and the hidden states that predict each answer token.

Legend: N row tokens, M scored tokens, S answers, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn

from groupline.models.attention import PackedPlan, UnsupportedAttention, planned, shared_attention
from groupline.models.logprobs import find_head
from groupline.models.products import FastProducts

Ids = Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True)
class PackedRow:
    """[prompt 1 | its answers | prompt 2 | ...] with what scores the answers' tokens.

    The last token of an answer predicts nothing, so it is scored but not fed; the prompt's last token predicts the
    first token of every one of its answers. Scored tokens are ordered answer by answer.
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]  # answers[b]: the answers to prompt b, none empty
    input_ids: Tensor  # [N]
    position_ids: Tensor  # [N]
    score_at: Tensor  # [M] row index whose hidden state predicts the token
    targets: Tensor  # [M]
    sequence: Tensor  # [M] answer index, 0..S-1

    @property
    def num_sequences(self) -> int:
        return sum(len(a) for a in self.answers)


def pack(prompts: Sequence[Ids], answers: Sequence[Sequence[Ids]], device: torch.device | str = "cpu") -> PackedRow:
    """answers[b] are the answers to prompts[b]. Raises ValueError on an empty prompt or answer."""
    ids: list[int] = []
    positions: list[int] = []
    score_at: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    count = 0
    for prompt, own in zip(prompts, answers, strict=True):
        if not prompt:
            raise ValueError("pack: a prompt has no tokens")
        start = len(ids)
        ids += prompt
        positions += range(len(prompt))
        last = start + len(prompt) - 1
        for answer in own:
            if not answer:
                raise ValueError("pack: an answer has no tokens")
            place = len(ids)
            ids += answer[:-1]
            positions += range(len(prompt), len(prompt) + len(answer) - 1)
            score_at += [last, *range(place, place + len(answer) - 1)]
            targets += answer
            sequence += [count] * len(answer)
            count += 1
    as_tensor = [
        torch.tensor(x, dtype=torch.long, device=device) for x in (ids, positions, score_at, targets, sequence)
    ]
    return PackedRow(
        tuple(tuple(p) for p in prompts), tuple(tuple(tuple(a) for a in own) for own in answers), *as_tensor
    )


def by_tokens(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """The items in their order, in parts of at most `limit` row tokens (or of one item, if that alone is more)."""
    part: list[T] = []
    total = 0
    for item in items:
        tokens = size(item)
        if part and total + tokens > limit:
            yield part
            part, total = [], 0
        part.append(item)
        total += tokens
    if part:
        yield part


def causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper (its adapters stay in place), or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; then each module as it was: an adapter's dropout may train in a model that does not."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def decoder(model: nn.Module) -> Any:
    """The model without its head."""
    return causal_lm(model).base_model


def layers_of(body: nn.Module) -> list[Any]:
    """The decoder's layers: the list of modules that holds most of its weights. ValueError if there is none."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(body).__name__} has no list of layers")
    sizes = [sum(p.numel() for p in found.parameters()) for found in lists]
    return list(lists[sizes.index(max(sizes))])


def hidden_states(model: nn.Module, row: PackedRow, shared: bool = True) -> Tensor:
    """Hidden states [M, H] that predict the scored tokens, in `row.targets`' order.

    shared: one packed row with every prompt once; otherwise plain right-padded rows, one an answer, through the
    model's own attention (for models whose attention cannot be shared).
    """
    body = decoder(model)
    if not shared:
        with FastProducts():
            return _padded_hidden_states(body, row)
    lengths = [[len(a) - 1 for a in own] for own in row.answers]
    plan = PackedPlan([len(p) for p in row.prompts], lengths, row.input_ids.device)
    with shared_attention(causal_lm(model)), planned(plan), FastProducts():
        out = body(input_ids=row.input_ids[None], position_ids=row.position_ids[None], use_cache=False)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden.index_select(0, row.score_at)


def _padded_hidden_states(body: Any, row: PackedRow) -> Tensor:
    pairs = [(p, a) for p, own in zip(row.prompts, row.answers, strict=True) for a in own]
    width = max(len(p) + len(a) - 1 for p, a in pairs)
    device = row.input_ids.device
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    columns: list[int] = []
    for i, (prompt, answer) in enumerate(pairs):
        tokens = [*prompt, *answer[:-1]]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, : len(tokens)] = 1
        columns += range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    out = body(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden[row.sequence, torch.tensor(columns, device=device)]


def why_not_shared(model: nn.Module) -> str | None:
    """None if packed rows give this model's own numbers; otherwise the reason they cannot be used.

    Runs two short groups through both paths and compares logits: a model whose layers mix tokens outside
    attention (state-space layers, convolutions, ALiBi) shows here, whatever its configuration says.
    Raises ValueError if plain rows through `find_head` do not give the model's own logits either: training it would
    optimise another distribution than the one that is sampled.
    """
    inner = causal_lm(model)
    head = find_head(inner)
    vocabulary = min(head.weight.shape[0], int(getattr(inner.config, "vocab_size", head.weight.shape[0])))
    draw = torch.Generator().manual_seed(0)

    def some(n: int) -> list[int]:
        return torch.randint(0, vocabulary, (n,), generator=draw).tolist()

    row = pack([some(7), some(4)], [[some(5), some(3)], [some(6)]], head.weight.device)
    limit = 1e-3 if head.weight.dtype in (torch.float32, torch.float64) else 5e-2
    with torch.no_grad(), eval_mode(inner):
        plain = _plain_logits(inner, row)

        def gap(shared: bool) -> float:
            ours = head.logits(hidden_states(inner, row, shared))
            return float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-9))

        reason = why_not_packed(inner, gap, limit)
        if reason is not None and gap(False) >= limit:
            raise ValueError(
                f"{type(inner).__name__} makes its logits from its last hidden states in a way that groupline does "
                f"not know (they differ by {gap(False):.1e} of the largest logit)"
            )
    return reason


def why_not_packed(inner: Any, gap: Callable[[bool], float], limit: float) -> str | None:
    """gap(shared): how far what `hidden_states` leads to is from the model's own, relative to the largest."""
    if not getattr(inner, "_supports_attention_backend", False) and not getattr(inner, "_supports_sdpa", False):
        return f"{type(inner).__name__} does not take its attention from AttentionInterface"
    try:
        difference = gap(True)
    except UnsupportedAttention as error:
        return str(error)
    if difference < limit:
        return None
    return f"{type(inner).__name__}: packed and plain logits differ by {difference:.1e} of the largest logit"


def _plain_logits(model: Any, row: PackedRow) -> Tensor:
    """Logits of the scored tokens from the whole model, one answer at a time: nothing shared, nothing padded."""
    parts = []
    for prompt, own in zip(row.prompts, row.answers, strict=True):
        for answer in own:
            ids = torch.tensor([[*prompt, *answer[:-1]]], device=row.input_ids.device)
            parts.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    return torch.cat(parts).to(torch.promote_types(parts[0].dtype, torch.float32))
