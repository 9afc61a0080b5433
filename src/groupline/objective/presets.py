"""Objective: an algorithm as a row of data, and the rows of the published ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from groupline.objective.advantages import GROUP_BASELINES, Baseline, Scale, check_advantage_rule
from groupline.objective.kl import KLEstimator
from groupline.objective.weights import TokenWeight

Ratio = Literal["token", "sequence", "sequence_product", "none"]
Form = Literal["surrogate", "detached"]
KLPlace = Literal["loss", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is maximised, as settings of operations.

    baseline, scale, ddof, eps: see `group_advantages`.
    ratio: what is compared with the weights that drew the answer: each token, the whole answer per token of length
    ("sequence"), the whole answer ("sequence_product"), or nothing.
    form: "surrogate", -min(r A, clip(r) A), the gradient flowing through the ratio (PPO, arXiv 1707.06347);
    "detached", -sg(clip(r)) A logp, the ratio being a constant weight (CISPO, arXiv 2506.13585; REINFORCE without it).
    clip_low, clip_high: the ratio is kept within 1 - clip_low .. 1 + clip_high; None is no bound on that side.
    delta: also keeps the unclipped ratio at most delta, which bounds the loss where the advantage is negative
    (two-sided clipping, arXiv 2505.07291). None is no bound.
    token_weight: see `token_weights`.
    kl, kl_place, beta: the estimator, whether beta times it is added to each token's loss or taken from the answer's
    reward, and its strength; beta 0 needs no reference. With kl "none" beta must be 0.
    kl_times_ratio: a KL in the loss is multiplied by the ratio, which makes its gradient that of the KL itself
    (arXiv 2512.02556).
    mask_truncated: answers cut at the token limit are not trained on and leave the denominators (see `token_weights`).
    count_masked: whether such answers stay in the denominators all the same; None is the token weight's own choice.
    top_entropy: the share of tokens, those of highest entropy, that keep their policy term (arXiv 2506.01939); a KL in
    the loss holds for every token. 1 keeps all.
    """

    name: str
    baseline: Baseline
    scale: Scale
    ddof: int = 1
    eps: float = 1e-4
    ratio: Ratio = "token"
    form: Form = "surrogate"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    delta: float | None = None
    token_weight: TokenWeight = "per_token"
    kl: KLEstimator = "none"
    kl_place: KLPlace = "loss"
    beta: float = 0.0
    kl_times_ratio: bool = False
    mask_truncated: bool = False
    count_masked: bool | None = None
    top_entropy: float = 1.0

    def __post_init__(self) -> None:
        def refuse(field: str, accepted: str) -> None:
            raise ValueError(f"Objective.{field} is {getattr(self, field)!r}; {accepted}")

        try:
            check_advantage_rule(self.baseline, self.scale, self.ddof, self.eps)
        except ValueError as error:
            raise ValueError(f"Objective.{error}") from None
        for field, kind in (
            ("ratio", Ratio),
            ("form", Form),
            ("token_weight", TokenWeight),
            ("kl", KLEstimator),
            ("kl_place", KLPlace),
        ):
            if getattr(self, field) not in get_args(kind):
                refuse(field, f"it must be one of {', '.join(get_args(kind))}")
        if self.ratio == "none" and self.form != "detached":
            refuse("form", 'with ratio "none" there is nothing to clip, so it must be "detached"')
        if self.ratio == "none" and (self.clip_low is not None or self.clip_high is not None):
            refuse("clip_high" if self.clip_low is None else "clip_low", 'with ratio "none" it must be None')
        if self.ratio == "sequence_product" and self.token_weight == "sequence_sum":
            refuse("token_weight", 'with ratio "sequence_product" it would count an answer once per token')
        if self.clip_low is not None and not 0 < self.clip_low <= 1:
            refuse("clip_low", "it must be above 0 and at most 1, or None for no bound")
        least = 0.0 if self.form == "surrogate" else -1.0
        if self.clip_high is not None and not least < self.clip_high < float("inf"):
            refuse("clip_high", f"it must be above {least:g}, or None for no bound")
        if self.delta is not None:
            if self.form != "surrogate":
                refuse("delta", 'it applies to form "surrogate"; use clip_high to bound a detached ratio')
            if not 1 < self.delta < float("inf"):
                refuse("delta", "it must be above 1 (and is of use above 1 + clip_high), or None for no bound")
        if not 0 < self.top_entropy <= 1:
            refuse("top_entropy", "it must be above 0 and at most 1")
        if not 0 <= self.beta < float("inf"):
            refuse("beta", "it must be 0 or positive")
        if self.beta > 0 and self.kl == "none":
            refuse("beta", 'with kl "none" it must be 0; name an estimator, kl="k3" for example')
        if self.kl_times_ratio and (self.ratio == "none" or self.kl_place != "loss"):
            refuse("kl_times_ratio", "it needs a ratio and a KL in the loss")

    def replace(self, **changes: Any) -> Objective:
        """A copy with these fields changed, checked again. TypeError for an unknown field."""
        return dataclasses.replace(self, **changes)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference policy are part of the objective."""
        return self.beta > 0

    @property
    def needs_groups(self) -> bool:
        """Whether an answer is judged against the others in its group, so that groups of one are refused."""
        return self.baseline in GROUP_BASELINES

    @property
    def equal_rewards_are_idle(self) -> bool:
        """Whether a group with equal rewards has exactly no gradient, so that training may skip it."""
        return self.needs_groups and self.beta == 0


GRPO = Objective(  # arXiv 2402.03300
    name="grpo", baseline="mean", scale="group", token_weight="per_sequence", kl="k3", beta=0.04
)
DR_GRPO = Objective(  # arXiv 2503.20783: neither the std nor the length divides
    name="dr_grpo", baseline="mean", scale="none", token_weight="per_budget"
)
BNPO = (
    Objective(  # GRPO averaged over tokens, as TRL's loss type "bnpo"; not the Beta normalisation of arXiv 2506.02864
        name="bnpo", baseline="mean", scale="group", token_weight="per_token"
    )
)
RLOO = Objective(  # arXiv 2402.14740; the answer's one loss is spread over its tokens, so per_sequence sums to it once
    name="rloo",
    baseline="leave_one_out",
    scale="none",
    ratio="sequence_product",
    token_weight="per_sequence",
    kl="k1",
    kl_place="reward",
    beta=0.05,
)
REINFORCE = Objective(  # Williams 1992, with the group's mean as baseline
    name="reinforce", baseline="mean", scale="none", ratio="none", form="detached", clip_low=None, clip_high=None
)
DAPO = Objective(  # arXiv 2503.14476; its resampling of idle groups and its length penalty are not part of the loss
    name="dapo", baseline="mean", scale="group", clip_low=0.2, clip_high=0.28, token_weight="per_token"
)
GSPO = Objective(  # arXiv 2507.18071
    name="gspo",
    baseline="mean",
    scale="group",
    ratio="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
    token_weight="per_sequence",
)
CISPO = (
    Objective(  # arXiv 2506.13585, no lower bound and no KL; the weight is cut at 5, the value TRL advises (2510.13786)
        name="cispo", baseline="mean", scale="group", form="detached", clip_low=None, clip_high=4.0
    )
)

# arXiv 1707.06347 with the KL of arXiv 2203.02155 in the reward. Not a row of OBJECTIVES: its advantages come from a value
# model, token by token, so it is not trained by `train` but by `ppo`.
PPO = Objective(name="ppo", baseline="none", scale="none", kl="k1", kl_place="reward", beta=0.05)

OBJECTIVES: dict[str, Objective] = {row.name: row for row in (GRPO, DR_GRPO, BNPO, RLOO, REINFORCE, DAPO, GSPO, CISPO)}


def get_objective(name: str) -> Objective:
    """The row of this name; case and "-" for "_" do not matter. ValueError naming the nearest row."""
    key = name.lower().replace("-", "_")
    if key in OBJECTIVES:
        return OBJECTIVES[key]
    near = get_close_matches(key, OBJECTIVES, n=1, cutoff=0.5)
    if key == PPO.name:
        raise ValueError("PPO needs a value model beside the policy: `groupline ppo`, groupline.ppo(PpoConfig(...))")
    hint = f'did you mean "{near[0]}"? ' if near else ""
    raise ValueError(f'no objective is named "{name}"; {hint}rows: {", ".join(OBJECTIVES)}')
