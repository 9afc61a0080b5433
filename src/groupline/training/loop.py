"""What the loops on given answers share: batches, updates with their log and checkpoints, and the end."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from groupline.models.load import save_model
from groupline.models.lora import is_peft
from groupline.runlog import JsonlWriter, write_json
from groupline.training.loop_resume import Keeper, Progress
from groupline.training.optim import NonFinite
from groupline.training.run import ROWS, begin, begin_again, clear_unsaved
from groupline.training.sinks import Sinks
from groupline.training.trainee import Say, Trainee, UpdateSettings

METRICS = ROWS[0]
T = TypeVar("T")


def batches(examples: Sequence[T], size: int, steps: int, seed: int) -> Iterator[list[T]]:
    """`steps` batches in a new order every epoch; an epoch's incomplete rest opens the next one."""
    draw = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            epoch = list(range(len(examples)))
            draw.shuffle(epoch)
            order += epoch
        yield [examples[i] for i in order[:size]]
        order = order[size:]


def run_updates(
    config: UpdateSettings,
    examples: Sequence[T],
    update: Callable[[list[T]], Mapping[str, float]],
    measure: Callable[[], dict[str, Any] | None],
    say: Say,
    line: Callable[[Mapping[str, float]], str],
    told: Sinks,
    keeper: Keeper,
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
    """Claim the run's folder, make every update, log each in metrics.jsonl and to the sinks, say one in twenty, and
    save checkpoints; or do what is left of that after the keeper's checkpoint.

    measure: held-out measures of the model as it is. line: an update's facts in words. Returns what happened (updates
    made, the first and the last facts, tokens, seconds, whether Ctrl-C ended it early), and the measures before and
    after. NonFinite names the checkpoint to go back to.
    """
    found = keeper.found
    so_far = keeper.restore(found, say) if found else Progress(before=measure())
    if config.resume is True and found is None:
        clear_unsaved(Path(config.output_dir))
    folder = begin_again(config, told, found.state["files"]) if found else begin(config, told)
    keeper.log = log = JsonlWriter(folder / METRICS)
    began = time.perf_counter() - so_far.seconds
    interrupted, every = False, max(1, config.steps // 20)
    try:
        with told.ending():
            order = batches(examples, config.batch_size, config.steps, config.seed)
            for step, batch in enumerate(islice(order, so_far.step, None), so_far.step + 1):
                row = dict(update(batch))
                so_far.seconds = time.perf_counter() - began
                so_far.add(step, row)
                log.write({"step": step, **row, "seconds": so_far.seconds})
                told.log(step, row)
                if step % every == 0 or step == 1:
                    say(f"step {step}/{config.steps}  {line(row)}  {so_far.seconds:.0f} s")
                keeper.after_step(step, so_far.kept())
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted after {so_far.step} updates: saving the model as it is")
    except NonFinite as error:
        raise NonFinite(f"{error}; {keeper.words()}") from error
    finally:
        log.close()
    done = {
        "updates": so_far.step,
        "examples": len(examples),
        "batch_size": config.batch_size,
        "tokens": so_far.tokens,
        "seconds": time.perf_counter() - began,
        "interrupted": interrupted,
        "first": so_far.rows[0] if so_far.rows else None,
        "last": so_far.rows[-1] if so_far.rows else None,
    }
    return done, so_far.before, measure()


def finish(config: UpdateSettings, trainee: Trainee, results: dict[str, Any], say: Say) -> Path:
    """Write the model and then results.json; returns the model's folder. A caller's own adapter stays unmerged."""
    folder, model = Path(config.output_dir), trainee.model
    if is_peft(model) and config.merge_adapter:
        own = trainee.passed_in and not config.lora_r  # their adapter, which goes on being one
        model = (copy.deepcopy(model) if own else model).merge_and_unload()
    save_model(model.eval(), trainee.tokenizer, folder / "model")
    write_json(folder / "results.json", results)
    say(f"model saved in {folder / 'model'}")
    return folder / "model"
