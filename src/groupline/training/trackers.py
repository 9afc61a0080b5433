"""TensorBoard, Weights & Biases, trackio and MLflow as sinks. Each is imported when it is asked for.

Where they send to is the user's own setting of them (WANDB_MODE, TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI, ...). What they
would report of themselves to their makers is switched off unless the user's environment says otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from groupline.training.sinks import RunInfo, Sink, Status


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self) -> None:
        _import("tensorboard")
        self._module = _import("torch.utils.tensorboard", "tensorboard")

    def start(self, run: RunInfo) -> None:
        self._writer: Any = self._module.SummaryWriter(str(run.folder / "tensorboard"))
        settings = json.dumps(dict(run.settings), indent=1, ensure_ascii=False)
        self._writer.add_text("settings", "    " + settings.replace("\n", "\n    "))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill then loses nothing

    def finish(self, status: Status, results: Mapping[str, float]) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases in the mode of WANDB_MODE. A run that the caller has begun is used, and left open."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._module = _import("wandb")

    def start(self, run: RunInfo) -> None:
        kept = run.kept("wandb")
        self._own = self._module.run is None
        self._run: Any = self._module.run or self._module.init(
            project=run.project_or(os.environ.get("WANDB_PROJECT")),
            name=run.name,
            dir=os.environ.get("WANDB_DIR") or str(run.folder.resolve()),
            config=dict(run.settings),
            id=kept,
            resume="allow" if kept else None,
        )
        run.keep("wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: Status, results: Mapping[str, float]) -> None:
        self._run.summary.update({**results, "status": status})
        if self._own:
            self._run.finish(exit_code=1 if status == "failed" else 0)


class Trackio:
    """A run of trackio: local, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

    def __init__(self) -> None:
        self._module = _import("trackio")

    def start(self, run: RunInfo) -> None:
        kept = run.kept("trackio")
        self._run: Any = self._module.init(
            project=run.project_or(None),
            name=kept or run.name,
            config=dict(run.settings),
            resume="allow" if kept else "never",
            embed=False,
        )
        run.keep("trackio", self._run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: Status, results: Mapping[str, float]) -> None:
        self._module.finish()


class Mlflow:
    """A run of MLflow where MLFLOW_TRACKING_URI says. `@` is not allowed in its names: pass@1 is pass_at_1 there."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._tracking = _import("mlflow.tracking", "mlflow")
        self._entities = _import("mlflow.entities", "mlflow")

    def start(self, run: RunInfo) -> None:
        self._client: Any = self._tracking.MlflowClient()
        self._step = 0
        kept = run.kept("mlflow")
        if kept:
            self._id: str = kept
            self._client.update_run(kept, status="RUNNING")
            return
        project = run.project_or(os.environ.get("MLFLOW_EXPERIMENT_NAME"))
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        run.keep("mlflow", self._id)
        settings = [self._entities.Param(name, str(value)[:500]) for name, value in run.settings.items()]
        for first in range(0, len(settings), 100):  # as many as one call takes
            self._client.log_batch(self._id, params=settings[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, self._step = int(time.time() * 1000), step
        points = [
            self._entities.Metric(re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_")), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=points)

    def finish(self, status: Status, results: Mapping[str, float]) -> None:
        self.log(self._step, results)
        ends = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, ends[status])


TRACKERS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def _import(module: str, extra: str | None = None) -> Any:
    extra = extra or module
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"report_to: {extra} needs its package: pip install 'groupline[{extra}]' ({error})"
        ) from error
