"""What a training loop asks of whatever draws its answers, and the checks that every such sampler makes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from groupline.records import Completion, SamplingParams
from groupline.sampling.draft import OnGroup


class SamplerError(OSError):
    """Answers could not be drawn, or not from the weights they were asked from."""


class Sampler(Protocol):
    """Draws answers from a policy's weights as of the last `load_weights`: `Engine` in this process, or `VllmSampler`."""

    version: int
    """Number of the weights that answers are drawn from; each completion bears it."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        keys: Sequence[Hashable] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """`n` answers to every prompt (token ids), in order.

        The draws of an answer depend on (seed, key of its prompt, its number), not on what else is drawn. on_group:
        called with a prompt's number and its answers as soon as the last of them has ended.
        """
        ...

    def load_weights(self, policy: nn.Module, version: int) -> None:
        """From now on draw from the policy's weights as they are, under this number; an error where that failed."""
        ...

    def release(self) -> None:
        """Let go of memory that is not needed until the next `generate`."""
        ...

    def close(self) -> None:
        """End whatever was started. May be called twice."""
        ...


@runtime_checkable
class Elsewhere(Sampler, Protocol):
    """A sampler that draws outside this process, so that `generate` may run in a thread while the policy trains."""

    def stand_by(self) -> None:
        """Have the newest weights ready, so that `generate` reads nothing of the policy. `close` ends it for good."""
        ...


def checked(
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    keys: Sequence[Hashable] | None,
    limit: int | None,
    tokenizer: Any,
) -> Sequence[Hashable]:
    """The prompts' keys, by default their own tokens and how often those came before; raises ValueError for a call that
    no sampler could answer.

    limit: the model's positions.
    """
    if n < 1 or not prompts:
        raise ValueError(f"generate: {len(prompts)} prompts with n={n}; both must be at least 1")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: Engine(model, tokenizer)")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"generate: prompt {i} has no tokens")
        if limit is not None and len(prompt) + params.max_new_tokens > limit:
            raise ValueError(
                f"generate: prompt {i} has {len(prompt)} tokens; with {params.max_new_tokens} new ones it passes the "
                f"model's limit of {limit} positions; drop the prompt or lower max_new_tokens"
            )
    if keys is not None and len(keys) != len(prompts):
        raise ValueError(f"generate: {len(keys)} keys for {len(prompts)} prompts")
    return _default_keys(prompts) if keys is None else keys


def _default_keys(prompts: Sequence[Sequence[int]]) -> list[str]:
    seen: dict[tuple[int, ...], int] = {}
    keys = []
    for prompt in prompts:
        ids = tuple(prompt)
        seen[ids] = seen.get(ids, -1) + 1
        keys.append(f"{ids}#{seen[ids]}")
    return keys
