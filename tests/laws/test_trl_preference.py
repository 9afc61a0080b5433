"""DPO and the reward model against TRL's own trainers: recorded pairs, their loss on a padded batch, gradients in weights.

Also the law that a batch's gradient does not depend on how it is cut. Legend: P pairs, L longest sequence.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Kept, gradients, random_ids, relative_gap, stir, tiny_lora, tiny_model
from torch import Tensor

from groupline.models.load import choose_precision
from groupline.models.lora import add_lora
from groupline.models.reference import Reference
from groupline.models.reward_head import add_reward_head
from groupline.records import Pair
from groupline.training.dpo import dpo_metrics, dpo_pairs, with_reference
from groupline.training.pairwise import EncodedPair, Judged, measure_pairs, pair_update
from groupline.training.reward_model import reward_metrics, score_pairs
from groupline.training.step import Scorer
from groupline.training.trainee import Trainee

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference as Scored
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.utils import add_fused_lm_head

PAD, BETA = 100, 0.3
PROMPTS = random_ids([4, 7, 3, 5, 2], seed=1, vocabulary=99)
CHOSEN = random_ids([3, 6, 1, 4, 5], seed=2, vocabulary=99)
REJECTED = random_ids([2, 6, 5, 8, 1], seed=3, vocabulary=99)
MARGINS = [0.0, 0.5, 1.0, 0.0, 2.0]
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
SCORER = Scorer()


def recorded(margins: list[float] | None = None) -> list[EncodedPair]:
    rows = enumerate(zip(PROMPTS, CHOSEN, REJECTED, strict=True))
    return [
        EncodedPair(
            Pair("p", "c", "r", f"pair-{i}", columns={} if margins is None else {"margin": margins[i]}),
            tuple(p), tuple(c), tuple(r),
        )
        for i, (p, c, r) in rows
    ]  # fmt: skip


def trainee(model: Any, tokens: int = 10**6, shared: bool = True) -> Trainee:
    return Trainee(model, None, choose_precision("cpu"), Kept(model), tokens, shared, passed_in=True)


def kept(made: Trainee) -> dict[str, Tensor]:
    assert isinstance(made.optimiser, Kept)
    return made.optimiser.kept


def stub(model: Any, **more: Any) -> Any:
    """What TRL's loss asks of its trainer."""
    same = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        model=model, accelerator=same, _metrics=metrics, _total_train_tokens=0, _tp_size=1, aux_loss_enabled=False, **more
    )  # fmt: skip


def trl_dpo(policy: Any, reference: Any, pairs: list[EncodedPair], loss: str, smoothing: float = 0.0) -> Any:
    """(TRL's loss, its metrics) of these pairs. reference: None for a policy whose adapter TRL takes off instead."""
    for model in (policy.get_base_model() if reference is None else policy, reference):
        if model is not None:
            add_fused_lm_head(model, outputs=OUTPUTS)
    trainer = stub(
        policy, ld_alpha=None, precompute_ref_logps=False, ref_model=reference, f_divergence_type="reverse_kl",
        loss_types=[loss], loss_weights=[1.0], beta=BETA, label_smoothing=smoothing, use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    rows = [
        {"prompt_ids": list(p.prompt), "chosen_ids": list(p.chosen), "rejected_ids": list(p.rejected)} for p in pairs
    ]
    with warnings.catch_warnings():  # it asks for an attribute that transformers is renaming
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        value = DPOTrainer._compute_loss(trainer, policy, DataCollatorForPreference(PAD)(rows), False)
    mode = "train" if policy.training else "eval"
    return value, {name: values[-1] for name, values in trainer._metrics[mode].items()}


def dpo_trainee(tokens: int = 10**6, shared: bool = True) -> tuple[Trainee, Any, list[EncodedPair]]:
    """(a policy that has moved, its reference, pairs with the reference's log-probs as the trainer takes them)."""
    made = trainee(tiny_model("llama"), tokens, shared)
    scorer = Scorer(shared=shared)
    pairs = with_reference(made, scorer, recorded())
    start = copy.deepcopy(made.model)
    stir(made.model, 5, size=0.05)
    return made, start, pairs


@pytest.mark.parametrize("tokens", [1, 30, 10**6])
@pytest.mark.parametrize("shared", [True, False], ids=["packed", "padded"])
def test_dpo_is_trls(shared: bool, tokens: int) -> None:
    made, start, pairs = dpo_trainee(tokens, shared)
    theirs = copy.deepcopy(made.model)
    loss, metrics = trl_dpo(theirs, start, pairs, "sigmoid")
    loss.backward()
    judged, facts = pair_update(made, pairs, lambda p: dpo_pairs(made.model, Scorer(shared=shared), p, BETA))
    ours = dpo_metrics(judged)
    assert ours["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert abs(ours["rewards/margins"]) > 0.05
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert ours[name] == pytest.approx(metrics[name], abs=1e-5), name
    for name in ("logps/chosen", "logps/rejected"):
        assert ours[name] == pytest.approx(metrics[name], rel=1e-5), name
    assert 0 < ours["rewards/accuracies"] < 1
    assert relative_gap(kept(made), gradients(theirs)) < 1e-5
    assert facts["tokens"] == sum(map(len, CHOSEN + REJECTED))


def test_dpo_with_an_adapter_is_trls() -> None:
    """The reference is the base under it: TRL runs it with the adapter off, here its log-probs were kept."""
    made = trainee(add_lora(tiny_model("llama"), 4))
    pairs = with_reference(made, SCORER, recorded())
    stir(made.model, 5, size=0.05)
    theirs = copy.deepcopy(made.model)
    loss, metrics = trl_dpo(theirs, None, pairs, "sigmoid")
    loss.backward()
    judged, _ = pair_update(made, pairs, lambda p: dpo_pairs(made.model, SCORER, p, BETA))
    ours = dpo_metrics(judged)
    assert ours["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert abs(ours["loss"] - math.log(2)) > 1e-3
    assert ours["rewards/margins"] == pytest.approx(metrics["rewards/margins"], abs=1e-5)
    assert kept(made).keys() == {n for n, p in made.model.named_parameters() if "lora_" in n}
    assert relative_gap(kept(made), gradients(theirs)) < 1e-5


def test_label_smoothing_is_trls() -> None:
    """TRL's `sigmoid` leaves label_smoothing out; its `aot` has the smoothed loss, on one pair nothing else."""
    made, start, pairs = dpo_trainee()
    theirs = copy.deepcopy(made.model)
    loss = sum(trl_dpo(theirs, start, [p], "aot", 0.2)[0] for p in pairs) / len(pairs)
    loss.backward()
    judged, _ = pair_update(made, pairs, lambda p: dpo_pairs(made.model, SCORER, p, BETA, 0.2))
    assert float(judged.loss.mean()) == pytest.approx(loss.item(), abs=1e-5)
    assert relative_gap(kept(made), gradients(theirs)) < 1e-5


@pytest.mark.parametrize("kind", ["frozen copy", "adapter off", "starting adapter"])
def test_log_probs_at_the_start_are_the_references(kind: str) -> None:
    """What is kept before the first update equals what a reference that is held would give after it."""
    model = tiny_lora(dropout=0.5) if kind == "starting adapter" else tiny_model("llama")
    policy = add_lora(model, 4, dropout=0.5) if kind == "adapter off" else model
    policy.train()
    reference = Reference(policy, kind == "adapter off")
    assert reference.kind == kind
    made = trainee(policy)
    pairs = with_reference(made, SCORER, recorded())
    stir(policy, 7, size=0.1)
    moved = [p.ref for p in with_reference(made, SCORER, recorded())]
    with reference.running() as held:
        expected = [p.ref for p in with_reference(trainee_of(held), SCORER, recorded())]
    assert [p.ref for p in pairs] == [pytest.approx(e, rel=1e-6) for e in expected]
    assert moved != [pytest.approx(e, rel=1e-3) for e in expected]


def trainee_of(model: Any) -> Trainee:
    """Of a model that nothing trains."""
    return Trainee(model, None, choose_precision("cpu"), SimpleNamespace(), 10**6, True, True)  # type: ignore[arg-type]


def trl_reward(model: Any, margins: list[float] | None, center: float | None) -> Any:
    rows: list[dict[str, Any]] = [
        {"chosen_ids": [*p.prompt, *p.chosen], "rejected_ids": [*p.prompt, *p.rejected]} for p in recorded()
    ]
    for row, margin in zip(rows, margins or [], strict=False):
        row["margin"] = margin
    trainer = stub(model, args=SimpleNamespace(center_rewards_coefficient=center))
    loss = RewardTrainer.compute_loss(trainer, model, Scored(PAD)(rows))
    mode = "train" if model.training else "eval"
    return loss, {name: values[-1] for name, values in trainer._metrics[mode].items()}


class Ends:
    """What the head asks of a tokenizer."""

    pad_token_id, eos_token_id, all_special_ids, added_tokens_decoder = PAD, 99, (), ()


@pytest.mark.parametrize("tokens", [1, 30, 10**6])
@pytest.mark.parametrize(
    ("margins", "center"), [(None, None), (MARGINS, None), (None, 0.05)], ids=["plain", "margin", "centred"]
)
def test_the_reward_model_is_trls(margins: list[float] | None, center: float | None, tokens: int) -> None:
    model = add_reward_head(tiny_model("qwen3"), Ends())
    theirs = copy.deepcopy(model)
    loss, metrics = trl_reward(theirs, margins, center)
    loss.backward()
    made = trainee(model, tokens)
    judged, _ = pair_update(made, recorded(margins), lambda p: score_pairs(model, p, center or 0.0))
    ours = reward_metrics(judged)
    assert ours["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert ours[name] == pytest.approx(metrics[name], abs=1e-5), name
    assert 0 < ours["accuracy"] < 1
    assert relative_gap(kept(made), gradients(theirs)) < 1e-5


@pytest.mark.parametrize("method", ["dpo", "reward model"])
def test_how_a_batch_is_cut_changes_nothing(method: str) -> None:
    """In fp64, so that what differs is not rounding."""
    base = tiny_model("llama", dtype=torch.float64)
    model = base if method == "dpo" else add_reward_head(base, Ends())
    found = []
    for tokens in (1, 17, 40, 10**6):
        own = copy.deepcopy(model)
        made = trainee(own, tokens)
        pairs = with_reference(made, SCORER, recorded()) if method == "dpo" else recorded()
        stir(own, 3, size=0.05)

        def loss(part: Any, own: Any = own) -> Judged:
            return dpo_pairs(own, SCORER, part, BETA) if method == "dpo" else score_pairs(own, part)

        measured = measure_pairs(made, pairs, loss)
        pair_update(made, pairs, loss)
        found.append((kept(made), measured.loss))
    for gradient, losses in found[1:]:
        assert relative_gap(gradient, found[0][0]) < 1e-10
        assert torch.allclose(losses, found[0][1], atol=1e-10)
