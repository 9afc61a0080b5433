"""The loop: sample groups, judge them, weigh them against each other, update, publish the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from groupline.config import Config
from groupline.evaluation import evaluate
from groupline.models.memory import peaks
from groupline.parallel.mesh import join
from groupline.records import Group
from groupline.rewards import RunState
from groupline.sampling.choose import NonFiniteLogits
from groupline.sampling.sampler import Elsewhere
from groupline.training.ahead import Ahead, staleness_facts, waiting_of
from groupline.training.alarming import Alarms
from groupline.training.checkpoint import Checkpoint
from groupline.training.collect import Prompted, collect
from groupline.training.correction import verdict
from groupline.training.hooks import Hooks
from groupline.training.method import Method
from groupline.training.optim import NonFinite
from groupline.training.redraw import Drawn, draw_groups, others
from groupline.training.resume import Keeper, find_checkpoint, origin_of, restore
from groupline.training.run import RunFolder, check_unused, clear_unsaved, results_json, results_row
from groupline.training.setup import Setup, prepare
from groupline.training.sharing import NoFolder, check_alike, finish, open_folder, share_model
from groupline.training.sinks import Sink, Sinks, open_sinks
from groupline.training.summary import summarise, with_logged
from groupline.training.token_log import token_rows

Say = Callable[[str], None]


def train(config: Config, say: Say = print, sinks: Sequence[Sink] = (), **given: Any) -> dict[str, Any]:
    """Run GRPO as `config` says, write the run folder, and return what results.json holds.

    sinks: trackers of the caller's own (`groupline.Sink`), beside those of `report_to`. given: `model`, `tokenizer`,
    `rewards` (a list of `Reward`), `problems`, `held_out` (`Problem`s, dicts or a `datasets.Dataset`) in place of what
    the configuration names. Ctrl-C ends training early with a loadable model and whole files. With `resume` the run in
    `output_dir` goes on from a checkpoint; what is given must then be what it was first given. Started by torchrun, its
    processes share one run: rank 0 writes and speaks, and all return the same.
    """
    with join(config) as world:
        say, told = say if world.main else _nothing, Sinks()

        def look() -> Checkpoint | None:
            nonlocal told
            told = open_sinks(config.report_to, sinks, say)
            found = find_checkpoint(config, say)
            if config.resume is False:
                check_unused(config)
            return found

        found = world.from_main(look, "looking at the run's folder")
        placed = config.model_copy(update={"device": world.device(config.device)})
        setup = world.agreed(lambda: prepare(placed, say, **given), "preparing")
        share_model(setup, world)
        return run(config, setup, say, found=found, sinks=told)


def _nothing(line: str) -> None:
    """What ranks say that do not speak."""


def run(
    config: Config,
    setup: Setup,
    say: Say = print,
    hooks: Hooks | None = None,
    found: Checkpoint | None = None,
    sinks: Sinks | None = None,
    method: Method | None = None,
) -> dict[str, Any]:
    """The loop on what `prepare` made of `config`; otherwise as `train`.

    hooks: called at its moments, and may end it. found: the checkpoint to go on from. method: GRPO's by default.
    """
    hooks, method, world = hooks or Hooks(), method or Method(), setup.world
    if found is None:
        results, origin = results_json(config, setup), origin_of(setup)
    else:
        results, origin = restore(found, setup, method, say)
    check_alike(world, origin)
    results["models"] = method.models(setup)
    plan = setup.plan + method.plan()
    if config.resume is True and found is None and world.main:
        clear_unsaved(Path(config.output_dir))
    files = found.state["files"] if found else None
    waiting = waiting_of(found.state.get("ahead", ()), setup.stream.prompted) if found else {}
    ahead = Ahead(partial(_draw, setup), setup.engine, config.staleness, config.steps, waiting)
    with open_folder(world, config, files, plan, sinks) as folder, closing(ahead):
        keeper = Keeper(setup, folder, method, origin, ahead, found.folder if found else None)
        alarms = Alarms(setup, folder, say, results["held_out"]["history"])
        say(plan)
        if world.size > 1 and isinstance(setup.engine, Elsewhere):  # which ranks start together
            setup.engine.stand_by()
        try:
            if found is None:
                results["held_out"]["before"] = _held_out(setup, folder, results, step=0)
                alarms.held_out(0, results["held_out"]["before"])
            for step in range(found.step if found else 0, config.steps):
                metrics = _step(setup, folder, step, hooks, method, ahead)
                results["steps"].append(results_row(metrics))
                say(setup.line(metrics) + method.words(metrics))
                fresh = not metrics.get("sampling/staleness/max")  # of older weights the difference says nothing
                if config.sampler == "vllm" and step == (found.step if found else 0) and fresh:
                    say(verdict(metrics, config))
                alarms.step(metrics)
                world.stop_if_asked()
                stop = world.from_main(lambda: hooks.stop or alarms.stop, "whether to go on")
                last = step + 1 == config.steps or stop
                if last or (config.eval_every and (step + 1) % config.eval_every == 0):
                    measured = _held_out(setup, folder, results, step=step + 1)
                    results["held_out"]["after"] = measured
                    alarms.held_out(step + 1, measured)
                results |= alarms.results()
                keeper.after_step(step + 1, results)
                hooks.rollout_done(partial(_save, keeper, step + 1, results, hooks))
                if last:
                    break
        except KeyboardInterrupt:
            results["interrupted"] = True
            say(f"interrupted after {len(results['steps'])} steps: saving the model as it is")
        except NonFinite as error:
            results["error"] = str(error)
            if hooks.keeps_model:
                if world.main:
                    method.save(setup, folder.path)
                finish(folder, setup, results)
                saved = f"the weights as the last good update left them are in {folder.path / 'model'}"
                raise NonFinite(f"{error}; {saved}; {keeper.words()}") from error
            finish(folder, setup, results, keep_model=False)
            raise
        except NonFiniteLogits as error:  # the weights themselves are bad, so they are not saved
            raise NonFiniteLogits(f"{error}; {keeper.words()}") from error
        if hooks.keeps_model and world.main:
            method.save(setup, folder.path)
        finish(folder, setup, results, hooks.keeps_model)
        return world.from_main(lambda: results, "the results")


def _save(keeper: Keeper, step: int, results: dict[str, Any], hooks: Hooks, into: Path) -> Path:
    return keeper.write(into, step, results, hooks.kept())


def _step(
    setup: Setup, folder: RunFolder | NoFolder, step: int, hooks: Hooks, method: Method, ahead: Ahead
) -> dict[str, Any]:
    config, world, began = setup.config, setup.world, time.perf_counter()
    hooks.update_begin()
    world.now("generating", step + 1)
    drawn = ahead.take(step)
    waited = time.perf_counter() - began
    groups, seconds, logged = drawn.groups, drawn.seconds, drawn.logged
    setup.engine.release()
    world.now("weighing")
    start = time.perf_counter()
    groups = method.scored(setup, groups)
    scored = time.perf_counter()
    batch, told = method.batch(setup, groups, step)
    seconds["reward"] += scored - start
    seconds["reference"] = time.perf_counter() - scored
    hooks.rollout_end(groups, batch)
    start = time.perf_counter()
    summary = summarise([*groups, *drawn.replaced], setup.rewards[0].name)  # of all that was drawn: no chosen few
    if config.dynamic_sampling:
        summary["groups/replaced"] = float(len(drawn.replaced))
        summary["groups/trained_with_signal"] = sum(g.has_signal for g in groups) / len(groups)
    if config.staleness:
        summary |= staleness_facts(groups, step)
    setup.tokens_seen += int(summary["num_prompt_tokens"] + summary["num_completion_tokens"])
    summary |= {"num_tokens": setup.tokens_seen} | told
    facts: dict[str, float] = {}
    world.now("training")
    for number, part in enumerate(part for _ in range(config.num_iterations) for part in batch.updates()):
        if number:
            hooks.update_begin()
        facts = method.update(setup, part)
        hooks.update_end(facts if number else with_logged(facts | summary, logged))
        if hooks.stop:
            break
    asked = time.perf_counter()
    ahead.settle()  # a draw that runs ends with the weights that it began with
    if config.staleness:
        start += (waits := time.perf_counter() - asked)
        seconds["waiting"] = waited + waits
    world.now("publishing weights")
    with world.exchange("the weights for sampling"):
        setup.engine.load_weights(setup.policy, version=step + 1)
    seconds["train"] = time.perf_counter() - start
    total = time.perf_counter() - began
    metrics = facts | summary
    tokens = metrics["num_completion_tokens"]
    metrics |= {
        "step": step + 1,
        "epoch": (step + 1) * config.prompts_per_step / len(setup.stream.prompted),
        "step_time": total,
        "answers_skipped": batch.skipped,
        "micro_batches": batch.total,
        "row_tokens": batch.row_tokens,
        "tokens_per_second": tokens / total,
        "generated_tokens_per_second": tokens / max(seconds["generate"], 1e-9),
    }
    metrics |= {f"time/{name}": spent for name, spent in seconds.items()} | peaks(setup.precision.device)
    metrics = with_logged(metrics, logged)
    idle = [0.0] * sum(len(g.rollouts) for g in drawn.replaced)
    logged_groups = config.log_tokens if config.log_rollouts else 0
    by_token = token_rows(batch, groups, setup.objective, logged_groups, whole=world.size == 1)
    folder.log(metrics, [*groups, *drawn.replaced], batch.advantages.tolist() + idle, by_token)
    return metrics


def one_step(setup: Setup, folder: RunFolder | NoFolder, step: int) -> dict[str, Any]:
    """GRPO's step number `step` (from 0) with no run around it, for measurements; its row of metrics.jsonl."""
    ahead = Ahead(partial(_draw, setup), setup.engine, 0, setup.config.steps)
    return _step(setup, folder, step, Hooks(), Method(), ahead)


def _draw(setup: Setup, step: int) -> Drawn:
    """The step's groups, those without signal replaced where `dynamic_sampling` says so."""
    config = setup.config
    rounds, count = config.dynamic_sampling, config.prompts_per_step

    def draw(prompted: Sequence[Prompted], label: str) -> tuple[list[Group], dict[str, float], dict[str, float]]:
        logged: dict[str, float] = {}
        groups, seconds = collect(
            prompted,
            setup.engine,
            setup.tokenizer,
            setup.rewards,
            config.num_generations,
            setup.sampling,
            seed=config.seed,
            label=label,
            state=_state(setup, step),
            log=logged.update,
            world=setup.world,
        )
        return groups, seconds, logged

    more = partial(others(setup.stream.prompted, config.seed, rounds, count), step)
    return draw_groups(draw, setup.stream.take(step, count), more, rounds, f"step {step}")


def _state(setup: Setup, step: int) -> RunState:
    """What reward functions are told of the run after `step` steps."""
    epoch = step * setup.config.prompts_per_step / len(setup.stream.prompted)
    return RunState(global_step=step, max_steps=setup.config.steps, epoch=epoch)


def _held_out(setup: Setup, folder: RunFolder | NoFolder, results: dict[str, Any], step: int) -> dict[str, Any] | None:
    if not setup.held_out:
        return None
    config = setup.config
    setup.world.now("held-out problems", step)
    measured, groups = evaluate(
        setup.engine,
        setup.tokenizer,
        setup.held_out,
        setup.rewards,
        setup.eval_sampling,
        samples=config.eval_samples,
        seed=config.seed,
        state=_state(setup, step),
        world=setup.world,
    )
    folder.log_held_out(step, groups, measured)
    results["held_out"]["history"].append({"step": step, "pass@1": measured["pass@1"]["value"]})
    return measured
