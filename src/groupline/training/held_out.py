"""`groupline eval`: held-out measures of a model as a configuration describes it, and of two models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupline.ability import compare_ability
from groupline.config import Config, ConfigError, read_yaml
from groupline.evaluation import evaluate
from groupline.rewards import reward_notes
from groupline.tasks.source import held_out_problems
from groupline.training.collect import encode_problems
from groupline.training.judges import judges_of
from groupline.training.samplers import load_start, sampler_of
from groupline.training.setup import eval_sampling_of, prompt_limit

KS = (1, 2, 4, 8, 16, 32, 64)


def evaluate_config(
    config: Config, say: Callable[[str], None] = print, ks: Sequence[int] | None = None
) -> dict[str, Any]:
    """pass@k and the rest of `summarise_held_out` for `config.model` on its held-out problems.

    ks: by default the powers of two up to `eval_samples`, which is raised to the largest of them.
    """
    if ks is not None:
        config = config.model_copy(update={"eval_samples": max(config.eval_samples, *ks)})
    if config.eval_problems == 0:
        raise ConfigError("eval_problems is 0: there is nothing to evaluate")
    start = load_start(config)
    problems = held_out_problems(config, config.eval_problems)
    prompted, dropped = encode_problems(problems, start.tokenizer, config, prompt_limit(config, start.model))
    judges = judges_of(config)
    for note in reward_notes(judges):
        say(note)
    with sampler_of(config, start, say) as engine:
        measured, _ = evaluate(
            engine, start.tokenizer, prompted, judges, eval_sampling_of(config),
            samples=config.eval_samples, ks=ks, seed=config.seed,
        )  # fmt: skip
    counted = {"problems": len(prompted), "dropped": dropped, "samples": config.eval_samples}
    return {"model": config.model, **counted, **measured}


def run_settings(run: Path) -> dict[str, Any]:
    """Settings under which a run's trained model is measured: the run's own, and its model in place of its start."""
    given = {k: v for k, v in read_yaml(run / "config.yaml").items() if k in Config.model_fields}
    return {**given, "model": trained_model(str(run)), "lora_r": 0, "lora_alpha": None}


def trained_model(name: str) -> str:
    """The model's folder inside a run's folder; other names (a model's folder, a hub id, "builtin") unchanged."""
    return str(Path(name) / "model") if is_run(name) else name


def is_run(name: str) -> bool:
    return (Path(name) / "config.yaml").is_file()


def compare_models(
    config: Config, before: str, after: str, ks: Sequence[int] = KS, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """What `compare_ability` says of two models on the configuration's held-out problems, with what was compared.

    before, after: as `model`, or a run's folder for the model it trained. Each answers every problem max(ks) times, or
    `eval_samples` times if that is more, with the same draws. Reward, length and share truncated of both are under
    `measures`.
    """
    models = {"before": before, "after": after}
    measured = {}
    for when, name in models.items():
        settings = config.model_copy(update={"model": trained_model(name), "lora_r": 0, "lora_alpha": None})
        measured[when] = evaluate_config(settings, say, ks)
        say(f"{when}: {name}: pass@1 {measured[when]['pass@1' if 1 in ks else f'pass@{min(ks)}']['value']:.1%}")
    right = {when: m.pop("right_per_problem") for when, m in measured.items()}
    kept = ("reward", "completion_length", "truncated", "seconds")
    return {
        "models": models,
        "seed": config.seed,
        "temperature": config.eval_temperature,
        "judge": measured["after"]["judge"],
        **compare_ability(right["before"], right["after"], measured["after"]["samples"], ks),
        "measures": {when: {k: m[k] for k in kept} for when, m in measured.items()},
        "right_per_problem": right,
    }
