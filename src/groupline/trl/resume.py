"""Going on from `checkpoint-N` of a TRL script: Hugging Face's files, and in it groupline's own checkpoint, which resumes.

N counts optimiser steps and the folder inside, `checkpoint-R`, rollouts. A step within a rollout is not resumed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from groupline.config import ConfigError
from groupline.training.checkpoint import Checkpoint, checkpoints, newest_whole, read_checkpoint, why_torn
from groupline.trl.arguments import GRPOConfig

# Options that change what is computed and stand in none of groupline's own settings, which are compared too.
FIXED = (
    "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "mask_truncated_completions",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "reward_weights", "scale_rewards", "shuffle_dataset",
    "steps_per_generation", "sync_ref_model", "top_entropy_quantile", "use_bias_correction_kl",
)  # fmt: skip


def find(asked: Any, args: GRPOConfig) -> Checkpoint:
    """The checkpoint that `train(resume_from_checkpoint=asked)` means: a folder, or True for the newest whole one.

    ConfigError: there is none, or it is of a run with other options.
    """
    if asked is True:
        found = _newest(Path(args.output_dir))
    else:
        folder = Path(asked)
        if not folder.is_dir():
            raise ConfigError(f"resume_from_checkpoint: there is no folder {folder}")
        inner = checkpoints(folder)
        if not inner:
            raise ConfigError(f"resume_from_checkpoint: {folder} {_lacks(args)}")
        found = read_checkpoint(inner[-1])
    before = found.state["hooks"]["options"]
    told = [
        f"{n} was {before[n]!r} and is {now!r} now" for n in FIXED if before[n] != (now := _plain(getattr(args, n)))
    ]
    if told:
        raise ConfigError(
            f"resume_from_checkpoint: {'; '.join(told)}; set it back, or train from the folder as a model"
        )
    return found


def _newest(root: Path) -> Checkpoint:
    reasons: list[str] = []
    for folder in reversed(checkpoints(root)):
        found, torn = newest_whole(folder)
        if found is not None:
            for line in reasons:
                print(f"passing over {line}")
            return found
        reasons.append(f"{folder}: {torn[0][1]}" if torn else f"{folder}: it holds the model alone")
    raise ConfigError(
        f"resume_from_checkpoint: {root} holds no checkpoint to go on from" + "".join(f"; {line}" for line in reasons)
    )


def _lacks(args: GRPOConfig) -> str:
    per_rollout = args.updates_per_rollout
    within = f", or its number is no multiple of {per_rollout}, the updates of a rollout" if per_rollout > 1 else ""
    return f"holds the model alone: it was saved with save_only_model{within}; pass it as the model to train from it"


def forget(folder: Path) -> None:
    """Remove what resumes from a `checkpoint-N` whose model is about to be written anew."""
    for inner in checkpoints(folder):
        shutil.rmtree(inner)


def prune(root: Path, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, never the newest that can be resumed."""
    there = checkpoints(root)
    whole = [f for f in there if any(why_torn(inner, checksums=False) is None for inner in checkpoints(f))]
    for folder in there[:-limit] if limit else []:
        if folder not in whole[-1:]:
            shutil.rmtree(folder)


def options_of(args: GRPOConfig) -> dict[str, Any]:
    """What `find` compares."""
    return {name: _plain(getattr(args, name)) for name in FIXED}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
