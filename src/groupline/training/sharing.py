"""One run over several processes: how the model is shared, that all start alike, and how the whole model is saved."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from groupline.config import Config, ConfigError
from groupline.models.checkpointing import checkpoint_layers
from groupline.models.lora import is_peft
from groupline.models.memory import free_memory
from groupline.parallel.mesh import World
from groupline.sampling import Engine
from groupline.sampling.vllm import VllmSampler
from groupline.training.card import model_card
from groupline.training.one_server import OneServer
from groupline.training.optim import Optimiser
from groupline.training.run import PLAN, RunFolder
from groupline.training.setup import Setup, describe
from groupline.training.sinks import Sinks


def share_model(setup: Setup, world: World) -> None:
    """Make of what one process prepared its part in `world`. Alone it only switches activation checkpointing on.

    Raises ConfigError for what does not go with shares of a model.
    """
    config = setup.config
    if config.activation_checkpointing:
        checkpoint_layers(setup.policy)
    if world.size == 1:
        if config.parallel == "fsdp":
            raise ConfigError("parallel is fsdp, and there is one process; start several: torchrun --nproc-per-node N")
        return
    if config.staleness:
        raise ConfigError(
            f"staleness is {config.staleness}, and several processes train; use 0, or train in one process"
        )
    from groupline.parallel.shard import clip, sum_gradients

    setup.world = world
    kind = world.from_main(lambda: _kind(setup, world.size), "how to share the model")
    if world.rank:  # masks of dropout are then each rank's own; rank 0 goes on as one process would
        torch.manual_seed(config.seed * world.size + world.rank)
    if kind == "fsdp":
        _shard(setup, world)
        setup.optimiser.clip = functools.partial(clip, world=world)
    setup.optimiser.reduce = functools.partial(sum_gradients, world=world)
    if isinstance(setup.engine, VllmSampler) and not setup.engine.options.colocated:
        setup.engine = OneServer(setup.engine, world)
    what = "a share of its layers" if kind == "fsdp" else "a copy of the model"
    world.words = f", one of {world.size} processes, each with {what}"
    setup.plan = describe(setup)


def _kind(setup: Setup, processes: int) -> str:
    """The setting `parallel`, auto decided: shares if a copy's weights, gradients and moments would fill half of what is
    free."""
    asked, device = setup.config.parallel, setup.precision.device
    if asked != "auto":
        return asked
    held = sum(p.numel() * p.element_size() for p in setup.policy.parameters())
    to_come = 3 * sum(p.numel() * p.element_size() for p in setup.optimiser.parameters)
    if device.type == "cpu":  # the weights of all processes are in the same memory
        return "fsdp" if processes * to_come > free_memory(device) / 2 else "replicate"
    return "fsdp" if held + to_come > (free_memory(device) + held) / 2 else "replicate"


def _shard(setup: Setup, world: World) -> None:
    from groupline.parallel.shard import shard

    reference = setup.reference
    if setup.optimiser.scaler is not None:
        raise ConfigError(
            "parallel is fsdp and precision fp16, whose gradient scale takes whole gradients; use bf16 or fp32"
        )
    if reference is not None and reference.kind == "starting adapter":
        raise ConfigError(
            "parallel is fsdp, and the KL is taken to the adapter that was passed in, which is swapped in whole; use "
            "parallel: replicate, or beta: 0"
        )
    place, compute = setup.precision.device, setup.precision.compute
    if isinstance(setup.engine, VllmSampler) and setup.engine.publisher.adapter:
        raise ConfigError(
            "parallel is fsdp, and the adapter alone is to be handed to vLLM, of which each process holds a share; use "
            "vllm_sync: weights, or parallel: replicate"
        )
    assert isinstance(setup.engine, Engine | VllmSampler)
    setup.engine.mirror.part()
    shard(setup.policy, place, compute, world)
    if reference is not None and reference.own_model is not None:
        shard(reference.own_model, place, compute, world)
    c = setup.config
    updates = c.steps * c.num_iterations * c.updates_per_pass
    setup.optimiser = Optimiser(setup.policy, c, updates)
    world.sharded = True


def check_alike(world: World, origin: dict[str, Any]) -> None:
    """Raises ConfigError on every rank if one starts from something else than rank 0: copies would drift apart."""
    for rank, other in enumerate(world.gather(origin, "what the run starts from")):
        differ = [key for key, value in origin.items() if other[key] != value]
        if differ:
            raise ConfigError(
                f"rank {rank} and rank {world.rank} do not start alike: {', '.join(differ)}. Every process must see the "
                "same files; check the model's folder and the problems on each machine"
            )


class NoFolder:
    """In place of `RunFolder` on ranks that write nothing."""

    def __init__(self, config: Config) -> None:
        self.config, self.path = config, Path(config.output_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def rows(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def sync(self) -> dict[str, int]:
        return {}

    def log(self, *_: object) -> None:
        pass

    def log_held_out(self, *_: object) -> None:
        pass

    def log_alarm(self, *_: object) -> None:
        pass

    def finish(self, *_: object) -> None:
        pass


def open_folder(
    world: World, config: Config, sizes: Mapping[str, int] | None, plan: str, sinks: Sinks | None
) -> RunFolder | NoFolder:
    """The run's folder with its plan, for the one rank that writes. Raises on all ranks alike."""
    opened: list[RunFolder] = []

    def begin() -> None:
        folder = RunFolder(config, sizes, sinks)
        opened.append(folder)
        (folder.path / PLAN).write_text(plan + "\n", encoding="utf-8")

    world.from_main(begin, "opening the run's folder")
    return opened[0] if opened else NoFolder(config)


def finish(folder: RunFolder | NoFolder, setup: Setup, results: dict[str, Any], keep_model: bool = True) -> None:
    """Write the run's last files, with the whole model in Hugging Face format."""
    world = setup.world
    world.now("saving the model")
    weights = None
    if keep_model and world.sharded:
        from groupline.parallel.shard import whole_weights

        with world.exchange("the whole model"):
            weights = whole_weights(_saved(setup.policy), world.main)
    card, model = model_card(setup, results), setup.policy if keep_model else None
    world.from_main(lambda: folder.finish(results, model, setup.tokenizer, card, weights), "saving the model")


def _saved(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What the model's folder holds: all weights, or those that belong to an adapter."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad} if is_peft(model) else None
    named = ((name, tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor))
    return [(n, t) for n, t in named if trained is None or n in trained or "lora_" in n]
