"""The moments of the loop at which others may look on or act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupline.batch import Batch
from groupline.records import Group


class Hooks:
    """Does nothing by itself; a subclass overrides what it needs. Setting `stop` ends the run after the update."""

    stop: bool = False
    keeps_model: bool = True  # whether the run's folder holds the trained model

    def update_begin(self) -> None:
        """An optimiser step begins; on the first of a rollout, before its answers are drawn."""

    def rollout_end(self, groups: Sequence[Group], batch: Batch) -> None:
        """The answers of a rollout are drawn, scored and weighed. batch.advantages [S], group by group."""

    def update_end(self, metrics: Mapping[str, float]) -> None:
        """The weights have changed. metrics: of this optimiser step, on the first of a rollout with the rollout's."""

    def rollout_done(self, save: Callable[[Path], Path]) -> None:
        """Everything of a rollout is done and written. save: writes a checkpoint into a folder, and returns its own."""

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of these hooks, as JSON; they read it from its `state["hooks"]`."""
        return {}
