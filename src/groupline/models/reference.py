"""The reference policy of the KL penalty: what the policy was at the start, at the least memory that holds it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from groupline.models.lora import is_peft
from groupline.models.packing import eval_mode


class Reference:
    """`with reference.running() as model:` gives a model whose log-probs are the reference's, dropout off.

    kind: "adapter off" (a fresh LoRA: the base itself), "starting adapter" (a PEFT model passed in: its adapter as it
    was, kept as a copy of the adapter's weights only) or "frozen copy" (full fine-tune: a copy of the weights passed
    in, whatever folder or hub id they once came from).
    """

    def __init__(self, policy: nn.Module, fresh_adapter: bool = False) -> None:
        self.policy: Any = policy
        self._saved: dict[str, Any] = {}
        if not is_peft(policy):
            self.kind = "frozen copy"
            self._copy = copy.deepcopy(policy).eval().requires_grad_(False)
        elif fresh_adapter:
            self.kind = "adapter off"
        else:
            self.kind = "starting adapter"
            self._saved = {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}

    @property
    def own_model(self) -> nn.Module | None:
        """The model it is, where it is not the policy with other weights."""
        return self._copy if self.kind == "frozen copy" else None

    def state(self) -> dict[str, Tensor]:
        """The weights that are its own, by name; none where they are the policy's base."""
        return dict(self._copy.named_parameters()) if self.kind == "frozen copy" else self._saved

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over the weights that `state` of the same kind of reference gave."""
        for name, own in self.state().items():
            own.copy_(state[name])

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        if self.kind == "frozen copy":
            yield self._copy
            return
        with eval_mode(self.policy), self._starting_weights():
            yield self.policy

    @torch.no_grad()
    def mix_in(self, share: float) -> None:
        """Move the reference's weights this share of the way to the policy's (TR-DPO, arXiv 2404.09656).

        ValueError unless the reference is a frozen copy.
        """
        if self.kind != "frozen copy":
            raise ValueError(f"the reference is the {self.kind}; only that of a full fine-tune can follow the policy")
        for held, trained in zip(self._copy.parameters(), self.policy.parameters(), strict=True):
            held.lerp_(trained, share)

    @contextmanager
    def _starting_weights(self) -> Iterator[None]:
        if self.kind == "adapter off":
            with self.policy.disable_adapter():
                yield
        else:
            now = {n: p for n, p in self.policy.named_parameters() if n in self._saved}
            trained = {n: p.data for n, p in now.items()}
            try:
                for name, parameter in now.items():
                    parameter.data = self._saved[name]
                yield
            finally:
                for name, parameter in now.items():
                    parameter.data = trained[name]
