"""What a sampler asks of vLLM, be it a server or in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from groupline.sampling.sampler import SamplerError

Asked = tuple[Sequence[int], Mapping[str, Any]]  # token ids of a prompt, and vLLM's sampling parameters


class ServerGone(SamplerError):
    """The server does not answer: it ended, or the connection did."""


class ServerFailed(SamplerError):
    """vLLM failed at what it was asked; its log says why."""


class VllmClient(Protocol):
    """Every method raises ServerGone where vLLM does not answer, SamplerError with its own words where it refuses."""

    url: str
    """Its address, or words for where it is."""

    def generate_all(self, asked: Sequence[Asked], model: str | None = None) -> Generator[tuple[int, dict[str, Any]]]:
        """The answers to each prompt as they come, with its number in `asked`; as vLLM's /inference/v1/generate gives them:
        `choices` with token ids, log-probs and the versions that drew them. model: name of an adapter.

        Where vLLM is gone, what had come is given first.
        """
        ...

    def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        """`generate_all` of one."""
        ...

    def version(self) -> str:
        """The label of the weights that answers are drawn from."""
        ...

    def label(self, version: str) -> None:
        """Give the weights as they are a label."""
        ...

    def update(self, info: Mapping[str, Any], version: str, begin: bool) -> None:
        """Load new weights in place of all, and label them. info: for the transfer backend. begin: the first time."""
        ...

    def load_adapter(self, name: str, folder: str) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def sleep(self, level: int) -> None:
        """Give memory back: 1 keeps the weights in the host's memory, 2 drops them."""
        ...

    def wake(self, part: str) -> None:
        """Take the memory of "weights" or "kv_cache" again. After level 2 the weights are then to be loaded."""
        ...

    def close(self) -> None: ...
