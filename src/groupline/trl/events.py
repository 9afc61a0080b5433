"""The loop's moments as Hugging Face's callback events, with its log history."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

from groupline.batch import Batch
from groupline.records import Group
from groupline.training.hooks import Hooks
from groupline.training.optim import Optimiser
from groupline.trl.arguments import GRPOConfig, Plan
from groupline.trl.completions import print_completions
from groupline.trl.reporting import Reporting
from groupline.trl.resume import options_of

LATEST = ("num_tokens", "learning_rate", "skipped_steps")  # logged as they stand; all else as a mean since the last log


class Events(Hooks):
    """Calls `transformers.TrainerCallback` objects, and `on_rollout_end` of those that have it."""

    keeps_model = False

    def __init__(self, args: GRPOConfig, callbacks: Sequence[Any], model: Any, tokenizer: Any) -> None:
        self.args, self.reporting = args, Reporting(args)
        self.handler = CallbackHandler([DefaultFlowCallback(), *callbacks], model, tokenizer, None, None)
        self.state, self.control = TrainerState(), TrainerControl()
        self.evaluate: Callable[[], Any] | None = None
        self.save: Callable[[], None] | None = None
        self.keep: Callable[[Callable[[Path], Path]], None] | None = None
        self.sync: Callable[[], None] | None = None
        self.losses: list[float] = []
        self._since: list[Mapping[str, float]] = []
        self._drawn: tuple[Sequence[Group], list[float]] | None = None
        self._per_epoch = 1
        self._began = 0.0

    def call(self, event: str, **kwargs: Any) -> None:
        self.control = self.handler.call_event(event, self.args, self.state, self.control, **kwargs)

    def start(self, plan: Plan, optimiser: Optimiser, found: Mapping[str, Any] | None = None) -> None:
        """A run begins: `on_train_begin`, and the evaluation that eval_on_start asks for.

        found: what `kept` gave to the checkpoint that it goes on from.
        """
        history = self.state.log_history
        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.state.log_history, self.state.epoch = history, 0.0
        self.losses, self._since = [], []
        if found is not None:
            self.state = TrainerState(**found["trainer"])
            self.losses, self._since = list(found["losses"]), list(found["since"])
        self.state.max_steps = plan.updates
        self.state.num_train_epochs = -(-plan.updates // plan.per_epoch)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, plan.updates)
        self.control = TrainerControl()
        self.handler.optimizer, self.handler.lr_scheduler = optimiser.adam, optimiser.schedule
        optimiser.adam.register_step_pre_hook(lambda *_: self.call("on_pre_optimizer_step"))
        optimiser.adam.register_step_post_hook(lambda *_: self.call("on_optimizer_step"))
        self._per_epoch, self.stop = plan.per_epoch, False
        self.call("on_train_begin")
        if self.args.eval_on_start and self.evaluate and found is None:
            self.evaluate()

    def update_begin(self) -> None:
        self._began = time.perf_counter()
        if self.state.global_step % self._per_epoch == 0:
            self.call("on_epoch_begin")
        self.call("on_step_begin")

    def rollout_end(self, groups: Sequence[Group], batch: Batch) -> None:
        if self.args.log_completions:
            self._drawn = (groups, batch.advantages.tolist())
        for callback in self.handler.callbacks:
            if hasattr(callback, "on_rollout_end"):
                callback.on_rollout_end(
                    self.args,
                    self.state,
                    self.control,
                    groups=groups,
                    advantages=batch.advantages.tolist(),
                    model=self.handler.model,
                    processing_class=self.handler.processing_class,
                )

    def update_end(self, metrics: Mapping[str, float]) -> None:
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._per_epoch
        self._since.append({**metrics, "step_time": time.perf_counter() - self._began})
        self.losses.append(metrics["loss"])
        if self.sync and self.state.global_step % self.args.ref_model_sync_steps == 0:
            self.sync()
        self.call("on_step_end")
        self._follow()
        ended = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if ended or self.state.global_step % self._per_epoch == 0:
            self.call("on_epoch_end")
            self._follow()
        self.stop = ended or self.control.should_training_stop

    def rollout_done(self, save: Callable[[Path], Path]) -> None:
        if self.keep:
            self.keep(save)

    def kept(self) -> dict[str, Any]:
        return {
            "options": options_of(self.args),
            "trainer": dataclasses.asdict(self.state),
            "losses": self.losses,
            "since": self._since,
            "sinks": self.reporting.ids(),
        }

    def _follow(self) -> None:
        """Do what the callbacks have asked for: log, evaluate, save."""
        if self.control.should_log and self._since:
            self.control.should_log = False
            self.log(_mean(self._since))
            self._since = []
            if self._drawn is not None:
                print_completions(*self._drawn, self.state.global_step, self.args.num_completions_to_print)
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            if self.evaluate:
                self.evaluate()
        if self.control.should_save:
            self.control.should_save = False
            if self.save:
                self.save()
            self.call("on_save")

    def log(self, logs: Mapping[str, float]) -> None:
        """A row of the log history, and `on_log`."""
        row = dict(logs)
        if self.state.epoch is not None:
            row["epoch"] = self.state.epoch
        self.state.log_history.append({**row, "step": self.state.global_step})
        self.reporting.report(self.state.global_step, row)
        self.call("on_log", logs=row)


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        out[name] = values[-1] if name in LATEST else sum(values) / len(values)
    return out
