"""Loss and gradient against TRL's own `_compute_loss`, on padded tensors, and advantages against its formula.

Legend: S answers, L longest answer, N trained tokens.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from groupline.objective import (
    BNPO,
    CISPO,
    DAPO,
    DR_GRPO,
    GRPO,
    GSPO,
    RLOO,
    add_kl_to_reward,
    answer_kl,
    group_advantages,
    policy_loss,
    token_weights,
    truncated_importance_weights,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.utils import nanstd

LENGTHS = torch.tensor([1, 4, 2, 6, 3, 5, 1, 2])
S, L, N, BUDGET = len(LENGTHS), 6, int(LENGTHS.sum()), 10
MASK = torch.arange(L) < LENGTHS[:, None]  # [S, L]
PLACE = MASK.nonzero()[:, 0]  # [N]


def close(got, expected, tol=1e-5):
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol * 1e-2)


@pytest.fixture(params=[0.05, 0.6], ids=["near", "far"])
def data(request):
    """Padded log-probs [S, L] with garbage in the padding, and advantages [S]."""
    rng = torch.Generator().manual_seed(11)
    logp = -3 * torch.rand(S, L, generator=rng)
    old, ref = (logp + scale * torch.randn(S, L, generator=rng) for scale in (request.param, 0.5))
    return SimpleNamespace(logp=logp, old=old, ref=ref, advantages=torch.randn(S, generator=rng))


class Accelerator:
    num_processes = 1

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trl_loss(trainer, data, mask=MASK, **settings):
    """-> loss, gradient in the log-probs [S, L], metrics."""
    logp = data.logp.clone().requires_grad_()
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros(S, L), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=Accelerator(),
        args=SimpleNamespace(**{k: settings.pop(k, v) for k, v in args.items()}),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=BUDGET,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        **{
            "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
            "use_vllm": False, "vllm_importance_sampling_correction": False, **settings,
        },
    )  # fmt: skip
    prompt = torch.ones(S, 2, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones(S, L, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": data.advantages,
        "old_per_token_logps": data.old,
        "old_logps": (data.old * mask).sum(1),
        "ref_per_token_logps": data.ref,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": getattr(data, "importance", None),
    }
    loss = trainer._compute_loss(stub, None, inputs)
    (grad,) = torch.autograd.grad(loss, logp)
    return loss, grad, {k: v[0] for k, v in stub._metrics["train"].items()}


def our_loss(row, data, mask=MASK, **weighting):
    logp = data.logp.clone().requires_grad_()
    place = mask.nonzero()[:, 0]
    weights = token_weights(mask.sum(1), row.token_weight, budget=BUDGET, **weighting)
    importance = getattr(data, "importance", None)
    per_token, facts = policy_loss(
        logp[mask],
        data.old[mask],
        data.advantages[place],
        row,
        sequence=place,
        num_sequences=S,
        ref_logp=data.ref[mask],
        importance=None if importance is None else importance[mask],
    )
    loss = (weights[place] * per_token).sum()
    (grad,) = torch.autograd.grad(loss, logp)
    return loss, grad, facts


NO_KL = GRPO.replace(kl="none", beta=0.0)
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {
    "grpo": (NO_KL, {"loss_type": "grpo"}),
    "grpo with KL": (GRPO, {"loss_type": "grpo", "beta": 0.04}),
    "grpo with KL times ratio": (
        GRPO.replace(kl_times_ratio=True),
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
    ),
    "grpo with delta": (NO_KL.replace(delta=1.5), {"loss_type": "grpo", "delta": 1.5}),
    "grpo with delta below the clip": (NO_KL.replace(delta=1.1), {"loss_type": "grpo", "delta": 1.1}),
    "bnpo": (BNPO, {"loss_type": "bnpo"}),
    "bnpo with KL": (BNPO.replace(kl="k3", beta=0.1), {"loss_type": "bnpo", "beta": 0.1}),
    "dr_grpo": (DR_GRPO, {"loss_type": "dr_grpo"}),
    "dapo": (DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "cispo": (CISPO, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo truncated often": (CISPO.replace(clip_high=0.2), {"loss_type": "cispo", "epsilon_high": 1.2}),
    "cispo below one": (CISPO.replace(clip_high=-0.8), {"loss_type": "cispo", "epsilon_high": 0.2}),
    "gspo": (
        GSPO,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "sequence ratio with KL times ratio": (
        GRPO.replace(ratio="sequence", kl_times_ratio=True),
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04,
            "use_bias_correction_kl": True,
        },
    ),
    "luspo": (  # TRL sums one value per answer over its tokens
        GSPO.replace(token_weight="sequence_sum", **WIDE),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_high": 0.28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient(name, data):
    row, settings = SETTINGS[name]
    expected, grad, metrics = trl_loss(GRPOTrainer, data, **settings)
    loss, got, facts = our_loss(row, data)
    close(loss, expected)
    close(got, grad)
    if "kl" in metrics and not row.kl_times_ratio:
        assert (facts.kl_sum / facts.tokens).item() == pytest.approx(metrics["kl"], rel=1e-5)
    counted_alike = row.ratio == "token" and "below" not in name  # TRL counts per answer there, and after delta
    if "clip_ratio/low_mean" in metrics and counted_alike:
        assert facts.clip_low.item() == round(metrics["clip_ratio/low_mean"] * N)
        assert facts.clip_high.item() == round(metrics["clip_ratio/high_mean"] * N)


def test_rloo(data):
    expected, grad, _ = trl_loss(RLOOTrainer, data)
    loss, got, _ = our_loss(RLOO, data)
    close(loss, expected)
    close(got, grad)


def test_masked_answers(data):
    mask = MASK.clone()
    mask[[1, 5]] = False
    for name in ("bnpo", "dr_grpo", "dapo", "cispo"):
        row, settings = SETTINGS[name]
        expected, grad, _ = trl_loss(GRPOTrainer, data, mask, **settings)
        loss, got, _ = our_loss(row, data, mask)
        close(loss, expected)
        close(got, grad)
    # its "grpo" counts masked answers in the mean: the same under count_masked, larger by 8/6 without
    expected, grad, _ = trl_loss(GRPOTrainer, data, mask, **SETTINGS["grpo"][1])
    close(our_loss(NO_KL, data, mask, count_masked=True)[1], grad)
    close(our_loss(NO_KL, data, mask)[1], grad * 8 / 6)


def test_truncated_importance_weights(data):
    sampler = data.old - 0.4 * torch.randn(S, L, generator=torch.Generator().manual_seed(3))
    # vllm_importance_sampling_mode "token_truncate": clamp(exp(old - sampler), max=cap)
    data.importance = torch.exp(data.old - sampler).clamp(max=1.2)
    close(truncated_importance_weights(data.old, sampler, 1.2), data.importance)
    settings = {"loss_type": "grpo", "beta": 0.04, "use_vllm": True, "vllm_importance_sampling_correction": True}
    expected, grad, _ = trl_loss(GRPOTrainer, data, **settings)
    loss, got, _ = our_loss(GRPO, data)
    close(loss, expected)
    close(got, grad)


NAN = float("nan")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards",
    [[1.5, 0.3, 0.5, 1.5, 0.3, 0.0, 0.3, 0.5], [1.0, 0, 0, 0, 2, 2, 2, 2], [1.0, NAN, 0, 0.5, NAN, NAN, NAN, 3]],
    ids=["mixed", "one equal", "unscored"],
)
def test_advantages_by_the_formula_of_its_trainer(rewards, scale):
    r = torch.tensor(rewards)
    grouped = r.view(-1, 4)
    expected = grouped - grouped.nanmean(1, keepdim=True)
    if scale == "group":
        expected = expected / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    elif scale == "batch":
        expected = expected / (nanstd(r) + 1e-4)
    close(group_advantages(r, 4, scale=scale), expected.flatten().nan_to_num(nan=0.0))


def test_rloo_advantages_with_the_kl_in_the_reward(data):
    rewards = torch.tensor([1.0, 0, 0, 1, 0.5, 0, 1, 1])
    kl = ((data.old - data.ref) * MASK).sum(-1)
    r = rewards - 0.05 * kl
    grouped = r.view(-1, 4)
    expected = grouped - (grouped.sum(1, keepdim=True) - grouped) / 3
    ours = add_kl_to_reward(rewards, answer_kl(data.old[MASK], data.ref[MASK], PLACE, len(rewards)), 0.05)
    close(group_advantages(ours, 4, baseline="leave_one_out", scale="none"), expected.flatten())
