import dataclasses

import pytest

from groupline.objective import GRPO, OBJECTIVES, Objective, get_objective

# name: baseline, scale, ratio, form, clip low, clip high, token weight, kl, where, beta
TABLE = {
    "grpo": ("mean", "group", "token", "surrogate", 0.2, 0.2, "per_sequence", "k3", "loss", 0.04),
    "dr_grpo": ("mean", "none", "token", "surrogate", 0.2, 0.2, "per_budget", "none", "loss", 0.0),
    "bnpo": ("mean", "group", "token", "surrogate", 0.2, 0.2, "per_token", "none", "loss", 0.0),
    "rloo": ("leave_one_out", "none", "sequence_product", "surrogate", 0.2, 0.2, "per_sequence", "k1", "reward", 0.05),
    "reinforce": ("mean", "none", "none", "detached", None, None, "per_token", "none", "loss", 0.0),
    "dapo": ("mean", "group", "token", "surrogate", 0.2, 0.28, "per_token", "none", "loss", 0.0),
    "gspo": ("mean", "group", "sequence", "surrogate", 3e-4, 4e-4, "per_sequence", "none", "loss", 0.0),
    "cispo": ("mean", "group", "token", "detached", None, 4.0, "per_token", "none", "loss", 0.0),
}


def test_rows():
    rows = {
        name: (o.baseline, o.scale, o.ratio, o.form, o.clip_low, o.clip_high, o.token_weight, o.kl, o.kl_place, o.beta)
        for name, o in OBJECTIVES.items()
    }
    assert rows == TABLE
    for name, row in OBJECTIVES.items():
        assert (row.name, row.ddof, row.eps, row.delta, row.kl_times_ratio, row.mask_truncated) == (
            (name, 1, 1e-4, None, False, False)
        )


def test_get_objective():
    assert get_objective("GRPO") is GRPO
    assert get_objective("Dr-GRPO").name == "dr_grpo"
    with pytest.raises(ValueError, match='did you mean "gspo"'):
        get_objective("gspoo")
    with pytest.raises(ValueError, match="rows: grpo, dr_grpo"):
        get_objective("xyz")


def test_replace_checks_again_and_leaves_the_row_alone():
    changed = GRPO.replace(beta=0.0, kl="none", ddof=0)
    assert (changed.beta, changed.ddof, GRPO.beta, GRPO.ddof) == (0.0, 0, 0.04, 1)
    with pytest.raises(TypeError, match="clip"):
        GRPO.replace(clip=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPO.beta = 1.0


def test_which_rows_need_a_reference():
    assert [name for name, row in OBJECTIVES.items() if row.needs_reference] == ["grpo", "rloo"]
    assert not GRPO.replace(beta=0.0).needs_reference


def test_which_groups_may_be_skipped():
    assert get_objective("dapo").equal_rewards_are_idle
    assert not GRPO.equal_rewards_are_idle  # its KL has a gradient in every group
    assert not get_objective("rloo").equal_rewards_are_idle  # the KL is part of the reward
    assert not get_objective("dapo").replace(baseline="batch", scale="batch").equal_rewards_are_idle
    assert not GRPO.replace(baseline="batch", scale="batch").needs_groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "median"}, "Objective.baseline"),
        ({"scale": "std"}, "Objective.scale"),
        ({"baseline": "batch"}, "Objective.scale"),
        ({"ddof": 3}, "Objective.ddof"),
        ({"eps": -1}, "Objective.eps"),
        ({"ratio": "word"}, "Objective.ratio.*token, sequence"),
        ({"form": "max"}, "Objective.form"),
        ({"ratio": "none"}, "Objective.form"),
        ({"ratio": "none", "form": "detached"}, "Objective.clip_low"),
        ({"ratio": "none", "form": "detached", "clip_low": None}, "Objective.clip_high"),
        ({"ratio": "sequence_product", "token_weight": "sequence_sum"}, "Objective.token_weight"),
        ({"token_weight": "mean"}, "Objective.token_weight"),
        ({"clip_low": 0}, "Objective.clip_low"),
        ({"clip_low": 1.5}, "Objective.clip_low"),
        ({"clip_high": -0.1}, "Objective.clip_high"),
        ({"form": "detached", "clip_high": -1.0}, "Objective.clip_high"),
        ({"delta": 1.0}, "Objective.delta"),
        ({"delta": 2.0, "form": "detached"}, "Objective.delta"),
        ({"kl": "k4"}, "Objective.kl"),
        ({"kl_place": "both"}, "Objective.kl_place"),
        ({"beta": -0.1}, "Objective.beta"),
        ({"beta": float("nan")}, "Objective.beta"),
        ({"kl": "none"}, "Objective.beta"),
        ({"kl_times_ratio": True, "kl_place": "reward"}, "Objective.kl_times_ratio"),
    ],
)
def test_refusals_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        GRPO.replace(**changes)


def test_a_row_of_ones_own():
    own = Objective(name="mine", baseline="batch", scale="none", clip_low=None, clip_high=None)
    assert own.clip_low is None
