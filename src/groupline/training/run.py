"""A run's folder: one run each, files whole at any moment.

config.yaml, plan.txt, metrics.jsonl (a row a step), rollouts.jsonl (a row an answer), held_out.jsonl, alarms.jsonl,
results.json, model/, value_model/ (of PPO), checkpoint-<step>/.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from groupline.alarms import Alarm
from groupline.config import Config, ConfigError, RunSettings
from groupline.models.load import save_model
from groupline.records import Group
from groupline.runlog import JsonlWriter, read_jsonl, write_json
from groupline.training.samplers import VLLM_FOLDER
from groupline.training.setup import Setup
from groupline.training.sinks import IDS, Sinks, Status, held_out_numbers, last_step, run_info

PLAN = "plan.txt"
ROWS = ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl")


def check_unused(settings: RunSettings) -> Path:
    """The run's folder; refuses one that already holds something, other than a plan. Changes nothing."""
    folder = Path(settings.output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not holds_only_a_plan(folder):
        if not settings.overwrite:
            raise ConfigError(
                f"{folder} already holds a run; give another output_dir, or --overwrite True to delete what is there"
            )
        if not (folder / "config.yaml").exists():
            raise ConfigError(
                f"{folder} holds files that are not a run's, so it is not overwritten; choose another output_dir"
            )
    return folder


def holds_only_a_plan(folder: Path) -> bool:
    """Whether nothing is there but what `dry_run` writes."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} == {"config.yaml", PLAN}


def claim(settings: RunSettings) -> Path:
    """Make the run's folder, in place of an earlier run's if that was asked for, and write the resolved configuration.

    Called once everything else was checked, so a run that is refused neither leaves a folder nor deletes one.
    """
    folder = check_unused(settings)
    if folder.exists() and any(folder.iterdir()):
        shutil.rmtree(folder)
    settings.save(folder / "config.yaml")
    return folder


def begin(settings: RunSettings, sinks: Sinks) -> Path:
    """Claim the run's folder and start the sinks. Where one cannot start, ConfigError, and the folder is gone again."""
    folder = claim(settings)
    try:
        sinks.start(run_info(settings, folder))
    except ConfigError:
        shutil.rmtree(folder)
        raise
    return folder


def begin_again(settings: RunSettings, sinks: Sinks, sizes: Mapping[str, int]) -> Path:
    """The folder of a run that goes on: rows cut to these sizes in bytes, sinks told so, the settings as they are now."""
    folder = Path(settings.output_dir)
    seen = last_step(folder / ROWS[0])
    _cut(folder, sizes)
    sinks.start(run_info(settings, folder, resumed=True), seen)
    settings.model_copy(update={"resume": False, "overwrite": False}).save(folder / "config.yaml")
    return folder


def clear_unsaved(folder: Path) -> None:
    """Remove what a run left that was killed before its first checkpoint; anything else stays, and is refused."""
    if folder.is_dir():
        for path in filter(unsaved, folder.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def unsaved(path: Path) -> bool:
    """Whether a run without a checkpoint leaves such a file when it is killed."""
    files = ("config.yaml", ".config.yaml.new", PLAN, *ROWS, IDS, f".{IDS}.new", "report.html")
    own = (*files, "tensorboard", "wandb", VLLM_FOLDER)
    return path.name in own or path.name.startswith((".checkpoint-", ".model-", ".value_model-"))


class RunFolder:
    """Writes a GRPO run's files and tells its sinks. Use as a context manager, so that open files are closed."""

    def __init__(self, config: Config, sizes: Mapping[str, int] | None = None, sinks: Sinks | None = None) -> None:
        """sizes: of a run to go on with, the bytes of each file of rows that count; later ones are cut off."""
        self.config, self.sinks = config, sinks or Sinks()
        self.path = begin(config, self.sinks) if sizes is None else begin_again(config, self.sinks, sizes)
        self._writers = [JsonlWriter(self.path / name) for name in ROWS]
        self._metrics, self._rollouts, self._held_out, self._alarms = self._writers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()
        if kind is not None:
            self.sinks.finish("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed", {})

    def sync(self) -> dict[str, int]:
        """Wait until all rows are on the disk; the size of each file in bytes."""
        return {w.path.name: w.sync() for w in self._writers}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The steps' metrics so far."""
        return read_jsonl(self.path / ROWS[0])

    def log(
        self,
        metrics: dict[str, Any],
        groups: Sequence[Group],
        advantages: Sequence[float],
        tokens: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """tokens: `token_rows` of those answers that have any."""
        self._metrics.write(metrics)
        if self.config.log_rollouts:
            self._write(self._rollouts, int(metrics["step"]), groups, advantages, tokens or {})
        self.sinks.log(int(metrics["step"]), metrics)

    def log_held_out(self, step: int, groups: Sequence[Group], measured: Mapping[str, Any]) -> None:
        if self.config.log_rollouts:
            self._write(self._held_out, step, groups, None, {})
        self.sinks.log(step, held_out_numbers(measured, "held_out"))

    def log_alarm(self, alarm: Alarm) -> None:
        self._alarms.write(alarm.to_json())

    @staticmethod
    def _write(
        writer: JsonlWriter,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[float] | None,
        tokens: Mapping[int, Mapping[str, Any]],
    ) -> None:
        place = 0
        for number, group in enumerate(groups):
            for answer, rollout in enumerate(group.rollouts):
                c = rollout.completion
                row = {
                    "step": step,
                    "group": number,
                    "answer_number": answer,
                    "problem": group.problem.id,
                    "prompt": group.problem.to_json()["prompt"],
                    "gold": group.problem.answer,
                    "text": rollout.text,
                    "rewards": dict(rollout.rewards),
                    "reward": rollout.reward,
                    "advantage": None if advantages is None else advantages[place],
                    "finish_reason": c.finish_reason,
                    "policy_version": c.policy_version,
                    "ids": list(c.ids),
                    "logprobs": [round(x, 5) for x in c.logprobs],
                }
                if rollout.extras:
                    row["extras"] = dict(rollout.extras)
                if place in tokens:
                    row["tokens"] = dict(tokens[place])
                writer.write(row)
                place += 1

    def finish(
        self,
        results: dict[str, Any],
        model: nn.Module | None,
        tokenizer: Any,
        card: str | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the model, if one is given, then results.json: where the latter exists, the run is whole.

        card: the model's README.md. weights: the model's, if it holds no more than a share of them.
        """
        if model is not None:
            save_model(model, tokenizer, self.path / "model", card, weights=weights)
        if self.sinks:
            results["sinks"] = self.sinks.counts()
        write_json(self.path / "results.json", results)
        status: Status = "failed" if "error" in results else "interrupted" if results["interrupted"] else "finished"
        self.sinks.finish(status, end_numbers(results))


def end_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Held-out measures before and after training, for sinks."""
    held = results["held_out"]
    return held_out_numbers(held["before"], "before") | held_out_numbers(held["after"], "after")


def check_rows(run: Path, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError if a file of rows is shorter than it was."""
    for name, size in sizes.items():
        file = run / name
        have = file.stat().st_size if file.exists() else 0
        if have < size:
            raise ConfigError(
                f"resume: {file} has {have} bytes and had {size} when the checkpoint was taken; rows were deleted: put "
                "the file back, or resume from an earlier checkpoint"
            )


def _cut(run: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        with (run / name).open("ab") as stream:
            stream.truncate(size)
    (run / "results.json").unlink(missing_ok=True)  # where it exists, the run is whole


def results_json(config: Config, setup: Setup) -> dict[str, Any]:
    """The frame of results.json before anything was measured."""
    return {
        "objective": setup.objective.name,
        "model": config.model,
        "seed": config.seed,
        "steps": [],
        "interrupted": False,
        "held_out": {
            "problems": len(setup.held_out),
            "samples_per_problem": config.eval_samples,
            "before": None,
            "after": None,
            "history": [],
        },
    }


def results_row(metrics: dict[str, Any]) -> dict[str, Any]:
    """A step's row of results.json."""
    return {
        "step": metrics["step"],
        "reward": metrics["reward"],
        "frac_groups_with_signal": metrics["frac_groups_with_signal"],
        "completion_length": metrics["completions/mean_length"],
        "accuracy": metrics["accuracy"],
    }
