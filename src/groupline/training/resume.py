"""What a checkpoint of a GRPO run holds, how a run goes on from one, and what it must not change.

A step ends with its rollouts used up. Those that were drawn ahead for later steps (`staleness`) are saved.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupline.config import Config, ConfigError, ResumableSettings
from groupline.parallel.mesh import SOLO, World, whole
from groupline.training.ahead import Ahead
from groupline.training.checkpoint import (
    Checkpoint,
    Saver,
    check_finite,
    newest_whole,
    read_checkpoint,
    set_aside,
    write_checkpoint,
)
from groupline.training.collect import Prompted
from groupline.training.generators import random_state, set_random_state
from groupline.training.method import Method
from groupline.training.run import RunFolder, check_rows, unsaved
from groupline.training.setup import Setup, describe
from groupline.training.shares import read_moments, shapes_in, split_moments, take_up, writer_of
from groupline.training.sharing import NoFolder

# Settings that a resumed run may change: where and what it writes, and memory. `steps` may under a constant rate.
FREE = frozenset(
    {
        "activation_checkpointing", "cache_gib", "device", "eval_every", "log_rollouts", "log_tokens", "max_rows",
        "merge_adapter", "micro_batch_tokens", "output_dir", "overwrite", "parallel", "precision", "project",
        "rank_timeout", "report_to", "resume", "reward_timeouts",
        "run_name", "save_steps", "save_total_limit", "stop_on_alarm", "trust_remote_code",
    }
)  # fmt: skip


@dataclass
class Keeper(Saver):
    """Saves checkpoints of one run. origin: what the run started from, by which a resumed one is held to it."""

    setup: Setup
    folder: RunFolder | NoFolder
    method: Method
    origin: dict[str, Any]
    ahead: Ahead
    newest: Path | None = None

    def settings(self) -> Config:
        return self.setup.config

    def world(self) -> World:
        return self.setup.world

    def write(self, folder: Path, step: int, results: dict[str, Any], hooks: Mapping[str, Any] | None = None) -> Path:
        """A checkpoint after `step` steps, as a folder in `folder`. hooks: what it keeps of `Hooks.kept`."""
        setup, world = self.setup, self.setup.world
        world.now("saving a checkpoint")
        tensors = {"weights": _trained(setup), **self.method.tensors()}
        world.agreed(lambda: check_finite(tensors, step), "the weights to save")
        if setup.reference is not None and setup.passed_in and setup.reference.state():
            tensors["reference"] = setup.reference.state()
        state = {
            "settings": setup.config.model_dump(mode="json"),
            "origin": self.origin,
            "environment": _environment(setup),
            "processes": world.size,
            "prompts_taken": step * setup.config.prompts_per_step,
            "tokens_seen": setup.tokens_seen,
            "files": self.folder.sync(),
            "results": results,
            "ahead": self.ahead.to_json(setup.stream.prompted),
            "hooks": dict(hooks or {}),
        }
        optimiser = setup.optimiser.state_dict()
        shares = None
        if world.sharded:
            optimiser, moments = split_moments(optimiser, list(tensors["weights"]))
            shares = writer_of(tensors | moments, world)
            tensors = {}
        own, *others = world.gather(random_state(), "random states")
        torch_state = {"optimiser": optimiser, "random": own, **self.method.torch_state()}
        if others:
            torch_state["random_of_others"] = others
        return write_checkpoint(folder, step, tensors, torch_state, state, shares, world)


def find_checkpoint(
    config: ResumableSettings, say: Callable[[str], None], method: str | None = None
) -> Checkpoint | None:
    """The checkpoint that `config.resume` asks for; names torn ones. None: begin at the beginning.

    method: as its `state` names it; None for GRPO and PPO. Raises ConfigError if the folder holds a run that cannot be
    continued, or the settings are not that run's.
    """
    run = Path(config.output_dir)
    if config.resume is False:
        return None
    if config.resume is True:
        found, torn = newest_whole(run)
        for folder, reason in torn:
            say(f"passing over {folder}: {reason}")
        if found is None:
            _may_begin_anew(run)
            say(f"{run} holds no whole checkpoint: beginning at the beginning")
            return None
    else:
        found = read_checkpoint(Path(str(config.resume)))
        if found.folder.resolve().parent != run.resolve():
            raise ConfigError(
                f"resume: {found.folder} is not in output_dir {run}, where the rows of its run are; set output_dir to "
                f"{found.folder.parent}"
            )
    if found.state.get("method") != method:
        told, now = (name or "train or ppo" for name in (found.state.get("method"), method))
        raise ConfigError(f"resume: {found.folder} is of a run of {told}, and this is one of {now}")
    refuse_changes(found, config)
    check_rows(run, found.state["files"])
    return found


def _may_begin_anew(run: Path) -> None:
    kept = sorted(p.name for p in run.iterdir() if not unsaved(p)) if run.is_dir() else []
    if kept:
        raise ConfigError(
            f"resume: {run} holds {', '.join(kept[:8])} and no whole checkpoint to go on from; give another output_dir, "
            "or --overwrite True without --resume to delete what is there"
        )


def refuse_changes(found: Checkpoint, config: ResumableSettings) -> None:
    """Raises ConfigError if a setting that decides what is computed is not what it was.

    `steps` may change while the learning rate does not depend on it.
    """
    before, now = found.state["settings"], config.model_dump(mode="json")
    told = [
        f"{key} was {json.dumps(before[key])} and is {json.dumps(now[key])} now"
        for key in now
        if key not in FREE and key in before and before[key] != now[key]
        and not (key == "steps" and config.lr_scheduler_type == "constant")
    ]  # fmt: skip
    if told:
        free = ", ".join(sorted(FREE.intersection(now)))
        raise ConfigError(
            f"resume: {'; '.join(told)}. What was trained so far in {found.folder} was not trained so: set it back, or "
            f"start a run of its own in another output_dir. These may change: {free}; and steps, under a constant rate"
        )
    if config.steps < found.step:
        raise ConfigError(f"resume: steps is {config.steps}, and {found.folder} is after step {found.step} already")


def origin_of(setup: Setup) -> dict[str, Any]:
    """Marks of what a run starts from, taken before its first update."""
    trained = _trained(setup)
    frozen = ((n, p) for n, p in setup.policy.named_parameters() if n not in trained)
    with setup.world.exchange("marks of the weights"):
        marks = fingerprint(frozen), fingerprint(trained.items())
    return {
        "frozen weights": marks[0],
        "starting weights": marks[1],
        "training problems": _mark(setup.stream.prompted),
        "held-out problems": _mark(setup.held_out),
        "rewards": [[r.name, r.weight] for r in setup.rewards],
        "number format (precision)": str(setup.precision.compute),
    }


def restore(
    found: Checkpoint, setup: Setup, method: Method, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bring `setup` to where the checkpoint was taken; (the run's results so far, its origin).

    Raises ConfigError, before anything is changed, if the run did not start from what `setup` holds.
    """
    origin, world = origin_of(setup), setup.world
    own_reference = "reference" in shapes_in(found)
    world.agreed(lambda: _refuse_other_origin(found, origin, setup, own_reference), "the checkpoint's origin")
    take_weights(found, setup.policy, world)
    kept = found.torch_state()
    if setup.reference is not None and own_reference:
        take_up(found, "reference", setup.reference.state(), world)
    setup.optimiser.load_state_dict(read_moments(found, kept["optimiser"], _trained(setup), world))
    method.load(found)
    setup.tokens_seen = found.state["tokens_seen"]
    if setup.why_tokens != "as set":
        tokens = found.state["settings"]["micro_batch_tokens"]
        setup.config = setup.config.model_copy(update={"micro_batch_tokens": tokens})
        setup.why_tokens = "as before"
        setup.plan = describe(setup)
    with world.exchange("the weights for sampling"):
        setup.engine.load_weights(setup.policy, version=found.step)
    go_on(found, _environment(setup), setup.config.steps, say, world)
    states = [kept["random"], *kept.get("random_of_others", ())]
    if world.rank < len(states):  # a rank that there was not goes on with its own seed
        set_random_state(states[world.rank])
    return dict(found.state["results"]), dict(found.state["origin"])


def take_weights(found: Checkpoint, model: nn.Module, world: World = SOLO) -> None:
    """The checkpoint's weights into those that train. ConfigError, before any changes, if they are not the same ones."""
    own = trainable(model)
    if {n: tuple(p.shape) for n, p in own.items()} != shapes_in(found).get("weights", {}):
        raise ConfigError(f"resume: the weights that train are not those of {found.folder}: other names or shapes")
    take_up(found, "weights", own, world)


def go_on(found: Checkpoint, now: dict[str, Any], steps: int, say: Callable[[str], None], world: World = SOLO) -> None:
    """Say where the run goes on, and what differs around it (`environment`); put later checkpoints aside."""
    say(f"resuming from {found.folder}, after step {found.step} of {steps}")
    then = {**found.state["environment"], "processes": found.state.get("processes", 1)}
    now = {**now, "processes": world.size}
    changed = [f"{key} {then[key]} -> {now[key]}" for key in now if then.get(key) != now[key]]
    if changed:
        say(f"note: {', '.join(changed)}: the same run up to rounding, not bit for bit")
    for moved in world.from_main(lambda: set_aside(found.folder.parent, found.step), "setting checkpoints aside"):
        say(f"a later checkpoint is set aside as {moved}; the run writes it anew")


def _refuse_other_origin(found: Checkpoint, origin: dict[str, Any], setup: Setup, own_reference: bool) -> None:
    told = dict(found.state["origin"])
    from_start = setup.reference is not None and setup.reference.kind != "adapter off" and not own_reference
    for key, value in origin.items():
        if key == "starting weights" and not from_start:
            continue  # they are replaced by the checkpoint's, and no reference is made of them
        if told[key] != value:
            shown = f": {told[key]}, now {value}" if key in ("rewards", "number format (precision)") else ""
            why = " (how many are taken follows from `steps`)" if key == "training problems" else ""
            raise ConfigError(f"resume: the {key} are not those that {found.folder} started from{why}{shown}")


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A mark of names, shapes and bits at one pass over memory: tells models apart, guards against nothing hostile."""
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = whole(tensor).detach().contiguous().flatten()
        total = int(flat.view(of_size[flat.element_size()]).sum(dtype=torch.int64)) if len(flat) else 0
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode())
    return digest.hexdigest()


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The weights that train, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _trained(setup: Setup) -> dict[str, Tensor]:
    return trainable(setup.policy)


def mark(rows: Iterable[Any]) -> str:
    """A mark of rows that JSON can hold, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _mark(prompted: Sequence[Prompted]) -> str:
    return mark([p.problem.to_json(), list(p.ids)] for p in prompted)


def environment(device: torch.device, micro_batch_tokens: int) -> dict[str, Any]:
    """What the last bits of a sum may depend on."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "threads": torch.get_num_threads(),
        "micro_batch_tokens": micro_batch_tokens,
    }


def _environment(setup: Setup) -> dict[str, Any]:
    return environment(setup.precision.device, setup.config.micro_batch_tokens)
