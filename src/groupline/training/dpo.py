"""Direct preference optimisation: pairs in packed rows, the prompt shared, against the weights at the start.

Legend: P pairs, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from groupline.metrics import wilson_interval
from groupline.models.load import load_model, load_tokenizer
from groupline.models.packing import by_tokens, eval_mode, pack, why_not_shared
from groupline.objective import dpo_loss, sequence_sum
from groupline.parallel.mesh import refuse_ranks
from groupline.training.checkpoint import Checkpoint
from groupline.training.loop import finish, run_updates
from groupline.training.loop_resume import Keeper
from groupline.training.pairwise import (
    EncodedPair,
    Judged,
    PairSettings,
    encode_pairs,
    measure_pairs,
    pair_update,
    the_pairs,
)
from groupline.training.resume import find_checkpoint
from groupline.training.run import check_unused
from groupline.training.sinks import Sink, open_sinks
from groupline.training.step import Scorer
from groupline.training.trainee import Say, Trainee, make_ready

REFERENCE = "reference"  # its file in a checkpoint


class DpoConfig(PairSettings):
    """Settings of direct preference optimisation."""

    beta: float = Field(default=0.1, gt=0)
    """What holds the policy near its start: an answer's implicit reward is beta times its log-ratio to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs taken to be labelled the wrong way round."""
    batch_size: int = Field(default=32, ge=1)
    """Pairs an update."""
    steps: int = Field(default=100, ge=1)
    """Updates."""
    learning_rate: float = Field(default=1e-6, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    output_dir: str = "runs/dpo"


def dpo(
    config: DpoConfig,
    say: Say = print,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    pairs: Iterable[Any] | None = None,
    eval_pairs: Iterable[Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> dict[str, Any]:
    """Train as `config` says, save the model, and return what results.json holds.

    model, tokenizer, pairs and eval_pairs take the place of what the configuration names: the model is trained in place,
    and pairs are `Pair`s or rows such as dicts or a `datasets.Dataset` (see `read_pairs`).
    The reference is the policy as it starts: its log-probs of every pair to come are taken once, before the first
    update, and kept, so no second model is held.
    sinks: trackers of the caller's own, beside those of `report_to`. With `resume` the run in `output_dir` goes on from
    a checkpoint; what is given must then be what it was first given.
    ConfigError: there are no pairs, or one is too long; ValueError: a row is no pair.
    """
    refuse_ranks("dpo")
    told = open_sinks(config.report_to, sinks, say)
    found = find_checkpoint(config, say, "dpo")
    if config.resume is False:
        check_unused(config)
    train_on, measure_on = the_pairs(config, pairs, eval_pairs)
    passed_in = model is not None
    tokenizer = tokenizer or load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    if model is None:
        model = load_model(config.model, trust_remote_code=config.trust_remote_code)
    examples, dropped = encode_pairs(train_on, tokenizer, config, model)
    held, dropped_held = encode_pairs(measure_on, tokenizer, config, model)
    say(f"dpo: {len(examples)} pairs, {len(held)} held out, {dropped + dropped_held} too long")
    trainee = make_ready(config, model, tokenizer, say, why_not_shared=why_not_shared, passed_in=passed_in)
    scorer = Scorer(1.0, trainee.shared, trainee.precision.compute)
    keeper = Keeper.of(config, "dpo", trainee, found, *([p.row() for p in given] for given in (examples, held)))
    examples, held = the_reference(found, trainee, scorer, examples, held)
    keeper.extra = {REFERENCE: {"training": _refs(examples), "held_out": _refs(held)}}

    def loss(part: Sequence[EncodedPair]) -> Judged:
        return dpo_pairs(trainee.model, scorer, part, config.beta, config.label_smoothing)

    def update(batch: list[EncodedPair]) -> dict[str, float]:
        judged, facts = pair_update(trainee, batch, loss)
        return {**dpo_metrics(judged), **facts}

    def line(row: Any) -> str:
        return (
            f"loss {row['loss']:.4f}  right {row['rewards/accuracies']:6.1%}  margin {row['rewards/margins']:.3f}  "
            f"log p chosen {row['logps/chosen']:.1f}, rejected {row['logps/rejected']:.1f}"
        )

    def measure() -> dict[str, Any] | None:
        return _measured(measure_pairs(trainee, held, loss)) if held else None

    done, before, after = run_updates(config, examples, update, measure, say, line, told, keeper)
    if before is not None:
        before["accuracy"] = None  # the policy is its reference: every pair is a tie
    results = {"method": "dpo", "model": config.model, "seed": config.seed, "beta": config.beta, **done}
    results |= {
        "dropped": dropped + dropped_held, "held_out": {"pairs": len(held), "before": before, "after": after}
    }  # fmt: skip
    if after is not None:
        low, high = after["accuracy"]["wilson"]
        right = after["accuracy"]["value"]
        say(f"held out: {right:.1%} of {len(held)} pairs right ({low:.1%} to {high:.1%}), loss {after['loss']:.4f}")
    finish(config, trainee, results, say)
    return results


def pair_logps(model: nn.Module, scorer: Scorer, part: Sequence[EncodedPair]) -> tuple[Tensor, Tensor]:
    """Log-probs [P] of the chosen and of the rejected answers, in nats, summed over their tokens; differentiable."""
    device = next(model.parameters()).device
    row = pack([p.prompt for p in part], [(p.chosen, p.rejected) for p in part], device)
    logp, _ = scorer(model, row)  # [M]
    both = sequence_sum(logp, row.sequence, row.num_sequences).view(-1, 2)
    return both[:, 0], both[:, 1]


def the_reference(
    found: Checkpoint | None, trainee: Trainee, scorer: Scorer, *pairs: Sequence[EncodedPair]
) -> list[list[EncodedPair]]:
    """Each of these lists of pairs with the log-probs under the start: the checkpoint's, or those of the model now."""
    if found is None:
        return [with_reference(trainee, scorer, given) for given in pairs]
    kept = found.tensors(REFERENCE) or {}
    return [
        [replace(pair, ref=(c, r)) for pair, (c, r) in zip(given, kept[name].tolist(), strict=True)]
        for given, name in zip(pairs, ("training", "held_out"), strict=True)
    ]


def _refs(pairs: Sequence[EncodedPair]) -> Tensor:
    """[P, 2] in fp64, which holds them exactly."""
    return torch.tensor([p.ref for p in pairs], dtype=torch.float64).view(-1, 2)


@torch.no_grad()
def with_reference(trainee: Trainee, scorer: Scorer, pairs: Sequence[EncodedPair]) -> list[EncodedPair]:
    """The pairs with the log-probs of their answers under the model as it is now, without dropout."""
    out: list[EncodedPair] = []
    with eval_mode(trainee.model):
        for part in by_tokens(pairs, lambda p: p.tokens, trainee.tokens):
            chosen, rejected = pair_logps(trainee.model, scorer, part)
            refs = zip(part, chosen.tolist(), rejected.tolist(), strict=True)
            out += [replace(pair, ref=(c, r)) for pair, c, r in refs]
    return out


def dpo_pairs(
    model: nn.Module, scorer: Scorer, part: Sequence[EncodedPair], beta: float, label_smoothing: float = 0.0
) -> Judged:
    """`dpo_loss` of these pairs, whose `ref` is known."""
    chosen, rejected = pair_logps(model, scorer, part)
    refs = torch.tensor([p.ref for p in part], dtype=chosen.dtype, device=chosen.device)  # [P, 2]
    loss, facts = dpo_loss(chosen, rejected, refs[:, 0], refs[:, 1], beta, label_smoothing)
    return Judged(loss, facts, {"logps/chosen": chosen.detach(), "logps/rejected": rejected.detach()})


def dpo_metrics(judged: Judged) -> dict[str, float]:
    """Means over the pairs, under TRL's names."""
    facts = judged.facts
    named = {
        "loss": judged.loss,
        "rewards/chosen": facts.chosen,
        "rewards/rejected": facts.rejected,
        "rewards/margins": facts.margins,
        "rewards/accuracies": facts.right,
    }
    return {name: float(values.mean()) for name, values in (named | judged.extras).items()}


def _measured(judged: Judged) -> dict[str, Any]:
    """Of held-out pairs. accuracy: of the implicit rewards. chosen_likelier: share with log pi(c) > log pi(r)."""
    right, count = float(judged.facts.right.sum()), len(judged.loss)
    likelier = judged.extras["logps/chosen"] > judged.extras["logps/rejected"]
    return {
        **dpo_metrics(judged),
        "chosen_likelier": float(likelier.float().mean()),
        "accuracy": {"value": right / count, "wilson": list(wilson_interval(right, count))},
    }
