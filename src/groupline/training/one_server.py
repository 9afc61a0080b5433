"""Several ranks on one vLLM server: rank 0 starts it and hands weights over, every rank asks it for its own answers."""

from __future__ import annotations

import os

from torch import nn

from groupline.config import ConfigError
from groupline.models.lora import Mirror
from groupline.parallel.mesh import World
from groupline.sampling.vllm import VllmSampler


class OneServer:
    """A `Sampler` of ranks that train together. Every rank calls `stand_by` and `load_weights`, in the same order.

    own: this rank's; that of rank 0 owns the server, if one is started, and the others follow it (`VllmOptions.follows`).
    Raises ConfigError where a server would be started that ranks on other machines could not reach.
    """

    def __init__(self, own: VllmSampler, world: World) -> None:
        if own.options.url is None and os.environ.get("LOCAL_WORLD_SIZE", str(world.size)) != str(world.size):
            raise ConfigError(
                "sampler is vllm, and ranks are on several machines: a server that rank 0 starts answers its own machine "
                "alone; start one that all can reach and set vllm_url"
            )
        self._own, self._world, self._begun = own, world, False
        self.version = own.version
        # Each rank's own; when memory is released all ranks have their answers, as these were gathered.
        self.generate, self.release, self.close = own.generate, own.release, own.close

    @property
    def mirror(self) -> Mirror:
        return self._own.mirror

    def load_weights(self, policy: nn.Module, version: int) -> None:
        """Before the server runs, these are the weights that it will start with."""
        self._own.take(version)
        self.version = version
        if self._begun:
            self.stand_by()

    def stand_by(self) -> None:
        """Have every rank know a server that has the newest weights."""
        self._begun = True
        address = self._world.from_main(self._own.lead, "the vLLM server")
        if not self._world.main:
            self._own.follow(address)
