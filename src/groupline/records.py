"""The records that flow through a step: Problem -> Completion -> Rollout -> Group; and Pair, of two answers.

All are frozen and hold plain Python values, and each goes to JSON and back without loss.
A later stage is a new type: a reward never becomes an advantage in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

Message = dict[str, str]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and what a judge needs to score answers to it.

    `prompt` is plain text or a conversation (a tuple of `{"role", "content"}` messages).
    `answer` is the gold answer as text. `columns` are further values that reward functions receive by name.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return {"id": self.id, "prompt": prompt, "answer": self.answer, "columns": dict(self.columns)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        prompt = row["prompt"]
        return cls(
            id=str(row["id"]),
            prompt=prompt if isinstance(prompt, str) else tuple(dict(m) for m in prompt),
            answer=str(row.get("answer", "")),
            columns=dict(row.get("columns", {})),
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, of which one is preferred.

    chosen_ids, rejected_ids: the answer's tokens as they were sampled, its end included if it has one. Where given they
    are what is trained on, and the text is only shown; otherwise the text is, with an end-of-sequence token behind it.
    columns: further values; a number `margin` is how much better the chosen one is, for the reward model's loss.
    """

    prompt: str | tuple[Message, ...]
    chosen: str
    rejected: str
    id: str = ""
    chosen_ids: tuple[int, ...] | None = None
    rejected_ids: tuple[int, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, ids in (("chosen_ids", self.chosen_ids), ("rejected_ids", self.rejected_ids)):
            if ids is not None and not ids:
                raise ValueError(f"{name} is empty; an answer has at least one token, or leave {name} out")
        by_ids = self.chosen_ids is not None and self.rejected_ids is not None
        if self.chosen_ids == self.rejected_ids if by_ids else self.chosen == self.rejected:
            raise ValueError(f"chosen and rejected are the same answer, {self.chosen[:60]!r}: nothing is preferred")

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.id,
            "prompt": self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt],
            "chosen": self.chosen,
            "rejected": self.rejected,
        }
        for name, ids in (("chosen_ids", self.chosen_ids), ("rejected_ids", self.rejected_ids)):
            if ids is not None:
                row[name] = list(ids)
        return row | ({"columns": dict(self.columns)} if self.columns else {})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        prompt, chosen, rejected = row["prompt"], row.get("chosen_ids"), row.get("rejected_ids")
        return cls(
            prompt=prompt if isinstance(prompt, str) else tuple(dict(m) for m in prompt),
            chosen=row["chosen"],
            rejected=row["rejected"],
            id=str(row.get("id", "")),
            chosen_ids=None if chosen is None else tuple(chosen),
            rejected_ids=None if rejected is None else tuple(rejected),
            columns=dict(row.get("columns", {})),
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answers are drawn.

    temperature: logits are divided by it; 0 means greedy (evaluation only).
    top_k: keep the k most probable tokens; 0 keeps all. top_p: keep the smallest set whose probability reaches it.
    min_p: drop tokens less probable than `min_p` times the most probable one.
    max_new_tokens: limit per answer, the end-of-sequence token included.
    stop: strings that end an answer. ignore_eos: end-of-sequence ids do not end an answer (benchmarks).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"SamplingParams.temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"SamplingParams.top_k is {self.top_k}; it must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p is {self.top_p}; it must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"SamplingParams.min_p is {self.min_p}; it must be in [0, 1]")
        if self.max_new_tokens < 1:
            raise ValueError(f"SamplingParams.max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if any(not s for s in self.stop):
            raise ValueError(
                "SamplingParams.stop holds an empty string; every stop string needs at least one character"
            )

    @property
    def filters(self) -> bool:
        """Whether the sampled distribution leaves out part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"stop": list(self.stop)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(**{**row, "stop": tuple(row.get("stop", ()))})


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as token ids.

    logprobs: per token, natural log, under the very distribution it was drawn from (temperature and filters applied).
    plain_logprobs: per token under the plain model (temperature 1, whole vocabulary).
    stop_string: the stop string that ended it, if one did; the ids still include it.
    policy_version: number of the weights that drew it.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    plain_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    params: SamplingParams
    policy_version: int = 0
    stop_string: str | None = None

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.logprobs) == len(self.plain_logprobs):
            raise ValueError(
                f"Completion has {len(self.ids)} ids, {len(self.logprobs)} logprobs and "
                f"{len(self.plain_logprobs)} plain_logprobs; the three must be equally long"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_ids": list(self.prompt_ids),
            "ids": list(self.ids),
            "logprobs": list(self.logprobs),
            "plain_logprobs": list(self.plain_logprobs),
            "finish_reason": self.finish_reason,
            "params": self.params.to_json(),
            "policy_version": self.policy_version,
            "stop_string": self.stop_string,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(
            prompt_ids=tuple(row["prompt_ids"]),
            ids=tuple(row["ids"]),
            logprobs=tuple(row["logprobs"]),
            plain_logprobs=tuple(row["plain_logprobs"]),
            finish_reason=row["finish_reason"],
            params=SamplingParams.from_json(row["params"]),
            policy_version=row.get("policy_version", 0),
            stop_string=row.get("stop_string"),
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its text and its scores.

    rewards: each reward function's own value by name; None where it does not apply.
    reward: their weighted sum; None when none of them applies, and then the answer carries no gradient.
    extras: what the functions recorded beside (`log_extra`), by column.
    """

    completion: Completion
    text: str
    rewards: Mapping[str, float | None]
    reward: float | None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "completion": self.completion.to_json(),
            "text": self.text,
            "rewards": dict(self.rewards),
            "reward": self.reward,
            "extras": dict(self.extras),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        completion, extras = Completion.from_json(row["completion"]), dict(row.get("extras", {}))
        return cls(completion, row["text"], dict(row["rewards"]), row["reward"], extras)


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one problem: the unit that group-relative advantages are computed on."""

    problem: Problem
    rollouts: tuple[Rollout, ...]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ. Decided on the rewards themselves, never on a rounded standard deviation."""
        rewards = [r.reward for r in self.rollouts if r.reward is not None]
        return len(rewards) > 1 and max(rewards) != min(rewards)

    def to_json(self) -> dict[str, Any]:
        return {"problem": self.problem.to_json(), "rollouts": [r.to_json() for r in self.rollouts]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(Problem.from_json(row["problem"]), tuple(Rollout.from_json(r) for r in row["rollouts"]))
