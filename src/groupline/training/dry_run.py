"""What a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupline.config import Config
from groupline.parallel.mesh import refuse_ranks
from groupline.training.planning import planned_memory
from groupline.training.run import PLAN, check_unused
from groupline.training.setup import prepare
from groupline.training.sinks import open_sinks


def dry_run(config: Config, say: Callable[[str], None] = print, **given: Any) -> str:
    """Load and check everything that `train` would, say and return the plan, and stop before the first token.

    The run's folder, which must not hold a run, gets config.yaml, which `groupline train` accepts, and plan.txt.
    Training may then use the folder.
    given: as for `train`.
    """
    refuse_ranks("a dry run")
    folder = check_unused(config.model_copy(update={"overwrite": False}))  # a plan replaces no run
    open_sinks(config.report_to)
    setup = prepare(config, say, **given)
    config.save(folder / "config.yaml")
    (folder / PLAN).write_text(setup.plan + "\n", encoding="utf-8")
    say(setup.plan)
    if type(config) is Config:  # a value model of PPO is in no part of it
        say("\n".join(["memory at the longest answers:", *planned_memory(setup)]))
    say(f"dry run: the plan is in {folder / PLAN}, the settings are in {folder / 'config.yaml'}; nothing was trained")
    return setup.plan
