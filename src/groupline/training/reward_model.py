"""A reward model from preference pairs: a scoring head on a language model, Bradley and Terry's loss.

Legend: P pairs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from groupline.metrics import calibration, wilson_interval
from groupline.models.load import load_model, load_tokenizer
from groupline.models.packing import causal_lm
from groupline.models.reward_head import (
    add_reward_head,
    is_reward_model,
    load_reward_model,
    packed_scores,
    why_scores_not_shared,
)
from groupline.objective import bradley_terry_loss
from groupline.parallel.mesh import refuse_ranks
from groupline.records import Pair
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
from groupline.training.trainee import Say, make_ready

BINS = 10


class RewardModelConfig(PairSettings):
    """Settings of a reward model's training."""

    center_rewards_coefficient: float | None = Field(default=None, ge=0)
    """Weight of (chosen + rejected)^2, which pulls the scores to a mean of 0; none by default."""
    batch_size: int = Field(default=32, ge=1)
    """Pairs an update."""
    steps: int = Field(default=100, ge=1)
    """Updates."""
    learning_rate: float = Field(default=1e-4, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    output_dir: str = "runs/reward_model"


def reward_model(
    config: RewardModelConfig,
    say: Say = print,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    pairs: Iterable[Any] | None = None,
    eval_pairs: Iterable[Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> dict[str, Any]:
    """Train as `config` says, save a transformers sequence classifier, and return what results.json holds.

    model, tokenizer, pairs and eval_pairs take the place of what the configuration names; pairs are `Pair`s or rows
    such as dicts or a `datasets.Dataset` (see `read_pairs`). A causal LM is copied and stays as it is; a reward model,
    passed in or named, is trained further, in place.
    The folder loads with `load_reward_model`, and with `AutoModelForSequenceClassification` if the adapter is merged.
    sinks: trackers of the caller's own, beside those of `report_to`. With `resume` the run in `output_dir` goes on from
    a checkpoint; what is given must then be what it was first given.
    ConfigError: there are no pairs, or one is too long; ValueError: a row is no pair, or has a `margin` that is no
    number.
    """
    refuse_ranks("reward_model")
    told = open_sinks(config.report_to, sinks, say)
    found = find_checkpoint(config, say, "reward_model")
    if config.resume is False:
        check_unused(config)
    train_on, measure_on = the_pairs(config, pairs, eval_pairs)
    for pair in train_on:
        margin_of(pair)
    tokenizer = copy.deepcopy(tokenizer) or load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    scorer, passed_in = _start(config, model, tokenizer)
    padding = causal_lm(scorer).config.get_text_config().pad_token_id  # type: ignore[union-attr, operator]
    if padding is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    examples, dropped = encode_pairs(train_on, tokenizer, config, scorer)
    held, dropped_held = encode_pairs(measure_on, tokenizer, config, scorer)
    say(f"reward model: {len(examples)} pairs, {len(held)} held out, {dropped + dropped_held} too long")
    trainee = make_ready(
        config, scorer, tokenizer, say, why_not_shared=why_scores_not_shared, passed_in=passed_in, task="SEQ_CLS"
    )
    keeper = Keeper.of(
        config, "reward_model", trainee, found, *([p.row() for p in given] for given in (examples, held))
    )
    center = config.center_rewards_coefficient or 0.0

    def loss(part: Sequence[EncodedPair]) -> Judged:
        return score_pairs(trainee.model, part, center, trainee.shared, trainee.precision.compute)

    def update(batch: list[EncodedPair]) -> dict[str, float]:
        judged, facts = pair_update(trainee, batch, loss)
        return {**reward_metrics(judged), **facts}

    def line(row: Any) -> str:
        return f"loss {row['loss']:.4f}  right {row['accuracy']:6.1%}  margin {row['margin']:.3f}"

    def measure() -> dict[str, Any] | None:
        return measured(measure_pairs(trainee, held, loss)) if held else None

    done, before, after = run_updates(config, examples, update, measure, say, line, told, keeper)
    results = {"method": "reward_model", "model": config.model, "seed": config.seed, **done}
    results |= {
        "dropped": dropped + dropped_held, "held_out": {"pairs": len(held), "before": before, "after": after}
    }  # fmt: skip
    if after is not None:
        low, high = after["accuracy"]["wilson"]
        say(
            f"held out: {after['accuracy']['value']:.1%} of {len(held)} pairs right ({low:.1%} to {high:.1%}), "
            f"calibration error {after['calibration']['ece']:.3f}, Brier {after['calibration']['brier']:.3f}"
        )
    finish(config, trainee, results, say)
    return results


def score_pairs(
    model: nn.Module,
    part: Sequence[EncodedPair],
    center: float = 0.0,
    shared: bool = True,
    compute: torch.dtype = torch.float32,
) -> Judged:
    """`bradley_terry_loss` of these pairs; a pair's `margin` column is its margin, 0 without one."""
    scores = packed_scores(model, [(p.prompt, (p.chosen, p.rejected)) for p in part], shared, compute).view(-1, 2)
    margins = [margin_of(p.pair) for p in part]
    margin = scores.new_tensor(margins) if any(margins) else None
    return Judged(*bradley_terry_loss(scores[:, 0], scores[:, 1], margin, center))


def margin_of(pair: Pair) -> float:
    """How much better the chosen answer is: the column `margin`, else 0. ValueError if that is no finite number."""
    value = pair.columns.get("margin")
    if value is None:
        return 0.0
    try:
        number = float(value)  # text, too: a CSV holds nothing else
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"pair {pair.id!r} has margin {value!r}; it must be a finite number")
    return number


def reward_metrics(judged: Judged) -> dict[str, float]:
    """Of the batch's pairs, under TRL's names."""
    scores: Tensor = torch.cat([judged.facts.chosen, judged.facts.rejected])
    return {
        "loss": float(judged.loss.mean()),
        "accuracy": float(judged.facts.right.mean()),
        "margin": float(judged.facts.margins.mean()),
        "min_reward": float(scores.min()),
        "mean_reward": float(scores.mean()),
        "max_reward": float(scores.max()),
    }


def measured(judged: Judged, bins: int = BINS) -> dict[str, Any]:
    """What held-out pairs say: accuracy with its interval, and whether sigmoid(margin) is a probability.

    Calibration is that of both questions a pair can be put as (is the one better, is the other), so which of the two
    answers stands first does not matter. The Brier score is the same either way round.
    """
    right, count = float(judged.facts.right.sum()), len(judged.loss)
    sure = torch.sigmoid(judged.facts.margins.double())
    ways = [*sure.tolist(), *(1 - sure).tolist()]
    return {
        **reward_metrics(judged),
        "accuracy": {"value": right / count, "wilson": list(wilson_interval(right, count))},
        "calibration": calibration(ways, [1.0] * count + [0.0] * count, bins),
    }


def _start(config: RewardModelConfig, model: nn.Module | None, tokenizer: Any) -> tuple[Any, bool]:
    """(the classifier to train, whether the caller goes on holding it)."""
    if model is not None and hasattr(causal_lm(model), "score"):
        return model, True
    if model is None and is_reward_model(config.model):
        return load_reward_model(config.model, trust_remote_code=config.trust_remote_code), False
    base = load_model(config.model, trust_remote_code=config.trust_remote_code) if model is None else model
    return add_reward_head(base, tokenizer, config.seed), False
