"""Preference pairs in a loop: settings, token ids, and losses of pairs that micro-batches only add up.

Legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor

from groupline.chat import encode_answer, encode_prompt
from groupline.config import ConfigError
from groupline.models.packing import by_tokens, causal_lm, eval_mode
from groupline.objective import PreferenceFacts
from groupline.records import Pair
from groupline.tasks.pairs import read_pairs
from groupline.training.optim import NonFinite
from groupline.training.trainee import Trainee, UpdateSettings


class PairSettings(UpdateSettings):
    """What training on preference pairs has beside `UpdateSettings`."""

    pairs_file: str | None = None
    """Training pairs: a JSONL, CSV or Parquet file, a data set's folder, or hub:owner/name."""
    eval_pairs_file: str | None = None
    """Held-out pairs, likewise."""

    @model_validator(mode="after")
    def _of_pairs(self) -> Self:
        wrong = [n for n in ("train_file", "eval_file") if getattr(self, n) is not None]
        if wrong:
            raise ValueError(f"{' and '.join(wrong)} hold problems; here are pairs: use pairs_file and eval_pairs_file")
        return self


@dataclass(frozen=True)
class EncodedPair:
    """A pair as the model sees it. ref: the reference's log-probs of the two answers, in nats, once they are known."""

    pair: Pair
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    ref: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        """Row tokens."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)

    def row(self) -> list[Any]:
        """What it is, without the reference, as JSON."""
        return [self.pair.to_json(), self.prompt, self.chosen, self.rejected]


@dataclass
class Judged:
    """Pairs with their losses and scores, each [P] and detached. extras: further numbers of each pair, by name."""

    loss: Tensor
    facts: PreferenceFacts
    extras: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        facts = PreferenceFacts(
            torch.cat([p.facts.chosen for p in parts]), torch.cat([p.facts.rejected for p in parts])
        )
        extras = {name: torch.cat([p.extras[name] for p in parts]) for name in parts[0].extras}
        return cls(torch.cat([p.loss.detach() for p in parts]), facts, extras)


PairLoss = Callable[[Sequence[EncodedPair]], Judged]  # its loss [P] is differentiable


def the_pairs(config: PairSettings, pairs: Iterable[Any] | None, held_out: Iterable[Any] | None) -> list[list[Pair]]:
    """Training and held-out pairs: those given, or else those of the files.

    ConfigError: there are none to train on.
    """
    found: list[list[Pair]] = []
    for given, file, split in ((pairs, config.pairs_file, "train"), (held_out, config.eval_pairs_file, "test")):
        source = file if given is None else given
        found.append([] if source is None else read_pairs(source, system=config.system_prompt, split=split))
    if not found[0]:
        where = "`pairs` is empty" if pairs is not None else f"pairs_file is {config.pairs_file!r}"
        raise ConfigError(f"there are no pairs to train on: {where}; each row has prompt, chosen and rejected")
    return found


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Any, config: PairSettings, model: Any
) -> tuple[list[EncodedPair], int]:
    """(the pairs as token ids, how many were dropped as too long).

    ConfigError: a prompt is empty or over `max_prompt_length`, or a prompt with an answer over the model's positions,
    and `long_prompts` says to refuse; or an id is not in the vocabulary. The pair is named.
    """
    inner = causal_lm(model)
    positions = getattr(inner.config, "max_position_embeddings", None)
    vocabulary = inner.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    kept = []
    for pair in pairs:
        prompt = encode_prompt(tokenizer, pair.prompt, config.chat_template_kwargs)
        if not prompt:
            raise ConfigError(f"pair {pair.id!r} has an empty prompt")
        chosen, rejected = (
            encode_answer(tokenizer, text) if ids is None else list(ids)
            for text, ids in ((pair.chosen, pair.chosen_ids), (pair.rejected, pair.rejected_ids))
        )
        highest = max(chosen + rejected)
        if highest >= vocabulary:
            raise ConfigError(f"pair {pair.id!r} has token {highest}; the model's vocabulary has {vocabulary}")
        whole = len(prompt) + max(len(chosen), len(rejected))
        over = None
        if config.max_prompt_length is not None and len(prompt) > config.max_prompt_length:
            over = f"its prompt has {len(prompt)} tokens, and max_prompt_length is {config.max_prompt_length}"
        elif positions is not None and whole > positions:
            over = f"prompt and answer have {whole} tokens, and the model {positions} positions"
        if over is None:
            kept.append(EncodedPair(pair, tuple(prompt), tuple(chosen), tuple(rejected)))
        elif config.long_prompts == "refuse":
            raise ConfigError(f"pair {pair.id!r} is too long: {over}; set long_prompts: drop to leave such pairs out")
    if pairs and not kept:
        raise ConfigError(f"all {len(pairs)} pairs are too long")
    return kept, len(pairs) - len(kept)


def pair_update(trainee: Trainee, batch: Sequence[EncodedPair], pair_loss: PairLoss) -> tuple[Judged, dict[str, float]]:
    """One update on the mean loss of the batch's pairs; (what was found, the optimiser's facts and the tokens).

    The mean is over the whole batch, so the gradient does not depend on how it is cut. Raises NonFinite, naming pairs,
    if a loss is not finite; no weight has changed then.
    """
    found = []
    for part in by_tokens(sorted(batch, key=lambda p: p.tokens), lambda p: p.tokens, trainee.tokens):
        judged = pair_loss(part)
        bad = [p.pair.id for p, ok in zip(part, torch.isfinite(judged.loss).tolist(), strict=True) if not ok]
        if bad:
            trainee.optimiser.adam.zero_grad(set_to_none=True)
            raise NonFinite(f"the loss is not finite at the pairs {', '.join(map(repr, bad[:8]))}; training stopped")
        trainee.optimiser.backward(judged.loss.sum() / len(batch))
        found.append(judged)
    tokens = sum(len(p.chosen) + len(p.rejected) for p in batch)
    return Judged.joined(found), {**trainee.optimiser.step(), "tokens": tokens}


@torch.no_grad()
def measure_pairs(trainee: Trainee, pairs: Sequence[EncodedPair], pair_loss: PairLoss) -> Judged:
    """The same numbers without an update and without dropout, in the pairs' order."""
    with eval_mode(trainee.model):
        parts = by_tokens(pairs, lambda p: p.tokens, trainee.tokens)
        return Judged.joined([pair_loss(part) for part in parts])
