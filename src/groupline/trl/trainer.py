"""GRPOTrainer: TRL's trainer on groupline's own loop."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from groupline.config import ConfigError
from groupline.evaluation import summarise_held_out
from groupline.parallel.mesh import refuse_ranks
from groupline.records import SamplingParams
from groupline.runlog import write_json
from groupline.training.checkpoint import Checkpoint
from groupline.training.collect import collect, encode_problems
from groupline.training.grpo import run
from groupline.training.optim import Optimiser
from groupline.training.resume import refuse_changes
from groupline.training.setup import describe, prepare, prompt_limit
from groupline.training.sinks import IDS, last_step
from groupline.training.summary import summarise, with_logged
from groupline.trl.arguments import GRPOConfig, Plan
from groupline.trl.events import Events
from groupline.trl.judges import judges
from groupline.trl.order import EpochStream, problems_of
from groupline.trl.policy import adapter_dropout, load_policy
from groupline.trl.resume import find, forget, prune

NOT_TAKEN = {
    "tools": "an answer is one turn",
    "rollout_func": "answers are drawn by groupline's own engine",
    "environment_factory": "an answer is one turn",
    "quantization_config": "load the model with it and pass the model",
    "reward_processing_classes": "reward models are not taken; give functions",
}


class GRPOTrainer:
    """Trains a causal language model with GRPO, called as TRL's trainer is.

    model: a transformers model, a `PeftModel` (with `is_trainable=True`; its adapter is trained, and the KL is taken to
    it as it was), or a folder or hub id. reward_funcs: functions `f(completions, **columns)`, or names of built-in ones.
    args: a `GRPOConfig` of this package. train_dataset, eval_dataset: a `datasets.Dataset` or a list of rows with
    `prompt` (text or conversation) and further columns; of held-out ones also a mapping of several.
    processing_class: the tokenizer, by default the model's own. peft_config: a PEFT configuration for a new adapter.
    callbacks: `transformers.TrainerCallback`s, which may also have `on_rollout_end(args, state, control, *, groups,
    advantages, **kwargs)`.

    Raises ConfigError (a ValueError) that says what to change, before anything is trained.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        refuse_ranks("GRPOTrainer")
        self.args = args = GRPOConfig() if args is None else args
        if not isinstance(args, GRPOConfig):
            raise ConfigError(
                f"args is a {type(args).__module__}.{type(args).__name__}; import GRPOConfig from groupline.trl"
            )
        for name, value in others.items():
            if name not in NOT_TAKEN:
                raise TypeError(f"GRPOTrainer has no argument {name!r}")
            if value is not None:
                raise ConfigError(f"{name} is not taken here: {NOT_TAKEN[name]}")
        if tuple(optimizers) != (None, None):
            raise ConfigError("optimizers is not taken here: AdamW is set by the options of GRPOConfig")
        if train_dataset is None:
            raise ConfigError("train_dataset is missing; give a datasets.Dataset or a list of rows with a prompt")
        policy, self.processing_class = load_policy(model, processing_class, args, peft_config)
        rewards = judges(reward_funcs, args.reward_weights, lambda: self.state)
        plan_of_one = Plan(1, 1, 1, 1)
        dropout = adapter_dropout(policy)
        folder = Path(args.output_dir) / "runs" / "next"
        first = args.settings(plan_of_one, folder, dropout)
        self._limit = prompt_limit(first, policy)
        problems = problems_of(train_dataset, "train_dataset")
        prompted, dropped = encode_problems(problems, self.processing_class, first, self._limit)
        if dropped:
            print(f"{dropped} of {len(problems)} prompts are over {self._limit} tokens and left out")
        self._plan = Plan.of(args, len(prompted))
        batch = args.generation_batch_size // args.num_generations
        stream = EpochStream(prompted, batch, args.generations_per_rollout, args.shuffle_dataset, args.seed)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        if args.device.type == "cpu" and (args.fp16 or args.bf16):
            print("fp16 and bf16 are for GPUs; this run computes on the CPU in fp32")
        try:
            objective = args.objective()
        except ValueError as error:
            raise ConfigError(f"GRPOConfig: {error}") from None
        self._config = args.settings(self._plan, folder, dropout)
        self._setup = prepare(
            self._config,
            model=policy,
            tokenizer=self.processing_class,
            rewards=rewards,
            held_out=[],
            objective=objective,
            stream=stream,
        )
        self.model: Any = self._setup.policy
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._events = Events(args, callbacks or (), self.model, self.processing_class)
        if eval_dataset is not None:
            self._events.evaluate = self.evaluate
        elif args.eval_strategy != "no":
            raise ConfigError(f'eval_strategy is "{args.eval_strategy}", and there is no eval_dataset; give one')
        self._events.save, self._events.keep = self._checkpoint, self._keep
        self._saved: Path | None = None
        if args.sync_ref_model:
            self._events.sync = self._sync_reference
        self._events.call("on_init_end")

    @property
    def state(self) -> Any:
        """A `transformers.TrainerState`: global_step, epoch, log_history, ..."""
        return self._events.state

    @property
    def control(self) -> Any:
        return self._events.control

    @property
    def callback_handler(self) -> Any:
        return self._events.handler

    def add_callback(self, callback: Any) -> None:
        self._events.handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self._events.handler.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._events.handler.pop_callback(callback)

    def train(self, resume_from_checkpoint: Any = None) -> Any:
        """Train as the arguments say, from the weights as they are now, and return transformers' `TrainOutput`.

        resume_from_checkpoint: a `checkpoint-N` to go on from, or True for the newest whole one in output_dir. The run's
        files (metrics, every answer) go to a new folder under `output_dir/runs`, those of a resumed run from there on.
        """
        from transformers.trainer_utils import TrainOutput

        found = find(resume_from_checkpoint, self.args) if resume_from_checkpoint else None
        if found is not None:
            refuse_changes(found, self._config)
        setup, events, began = self._setup, self._events, time.perf_counter()
        new = _new_run(Path(self.args.output_dir) / "runs")
        folder = {"output_dir": str(new)}
        setup.config = setup.config.model_copy(update=folder)
        scale = setup.precision.scale_gradients
        setup.optimiser = Optimiser(setup.policy, setup.config, self._plan.updates, scale)
        setup.tokens_seen, setup.plan = 0, describe(setup)
        events.reporting.told_before = 0
        if found is not None:
            before = Path(found.state["settings"]["output_dir"]) / "metrics.jsonl"
            events.reporting.told_before = last_step(before) * self.args.updates_per_rollout
            write_json(new / IDS, found.state["hooks"]["sinks"])
            found = Checkpoint(found.folder, {**found.state, "files": {}})  # its rows stay in the folder they are in
        events.start(self._plan, setup.optimiser, found.state["hooks"] if found else None)
        results = run(self._config.model_copy(update=folder), setup, hooks=events, found=found, sinks=events.reporting)
        if results["interrupted"]:
            raise KeyboardInterrupt
        seconds, loss = time.perf_counter() - began, sum(events.losses) / max(1, len(events.losses))
        measures = {
            "train_runtime": seconds,
            "train_steps_per_second": len(events.losses) / seconds,
            "train_loss": loss,
        }
        events.log(measures)
        events.call("on_train_end")
        return TrainOutput(events.state.global_step, loss, measures)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Held-out measures under TRL's names and pass@k, logged and given to `on_evaluate`.

        Answers are drawn as in training, num_generations_eval to a prompt. There is no eval_loss: it would stand near
        0 whatever was learned. The draws are the same at every call.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if given is None:
            raise ConfigError("evaluate: there is no eval_dataset; give one here or to GRPOTrainer")
        if isinstance(given, Mapping):
            merged: dict[str, float] = {}
            for name, rows in given.items():
                merged |= self.evaluate(rows, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return merged
        measures = {f"{metric_key_prefix}_{name}": value for name, value in self._measure(given).items()}
        self._events.log(measures)
        self._events.call("on_evaluate", metrics=measures)
        self._note_best(measures)
        return measures

    def _measure(self, rows: Any) -> dict[str, float]:
        setup, began = self._setup, time.perf_counter()
        n = self.args.num_generations_eval or self.args.num_generations
        problems = problems_of(rows, "eval_dataset")
        prompted, _ = encode_problems(problems, self.processing_class, setup.config, self._limit)
        setup.engine.load_weights(setup.policy, version=setup.engine.version)
        params: SamplingParams = setup.sampling
        logged: dict[str, float] = {}
        groups, _ = collect(
            prompted, setup.engine, self.processing_class, setup.rewards, n, params,
            seed=setup.config.seed, label="held-out", log=logged.update,
        )  # fmt: skip
        judge = setup.rewards[0].name
        found = summarise_held_out(groups, judge, [2**i for i in range(n.bit_length()) if 2**i <= n])
        chances = {name: value["value"] for name, value in found.items() if name.startswith("pass@")}
        measures = summarise(groups, judge) | chances | {"runtime": time.perf_counter() - began}
        return with_logged(measures, logged)

    def _note_best(self, measures: Mapping[str, float]) -> None:
        name = self.args.metric_for_best_model
        value = None if name is None else measures.get(name if name.startswith("eval_") else f"eval_{name}")
        best = self.state.best_metric
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """The model, or its adapter, and the tokenizer in Hugging Face format; other files there stay as they are."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".save-", dir=folder) as temporary:  # renamed in whole, file by file
            self.model.save_pretrained(temporary)
            self.processing_class.save_pretrained(temporary)
            for file in Path(temporary).iterdir():
                file.chmod(0o644)
                os.replace(file, folder / file.name)

    def save_state(self) -> None:
        """`trainer_state.json` in the output folder."""
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))

    def _sync_reference(self) -> None:
        assert self._setup.reference is not None  # beta is above 0: GRPOConfig has seen to it
        self._setup.reference.mix_in(self.args.ref_model_mixup_alpha)

    def _checkpoint(self) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if folder.exists():
            forget(folder)
        self.save_model(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self._saved = folder

    def _keep(self, save: Callable[[Path], Path]) -> None:
        """The rollout is done: put what resumes into the checkpoint that was saved at its end, and delete old ones."""
        folder, self._saved = self._saved, None
        if folder is None:
            return
        done = self.state.global_step
        whole = folder.name == f"checkpoint-{done}" and done % self.args.updates_per_rollout == 0
        if whole and not self.args.save_only_model:
            self.state.save_to_json(str(folder / "trainer_state.json"))
            save(folder)
        prune(folder.parent, self.args.save_total_limit)


def _new_run(parent: Path) -> Path:
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    folder = parent / stamp
    while folder.exists():
        number += 1
        folder = parent / f"{stamp}-{number}"
    return folder
