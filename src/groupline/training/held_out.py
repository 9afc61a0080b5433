"""`groupline eval`: held-out measures of a model as a configuration describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupline.config import Config, ConfigError
from groupline.evaluation import evaluate
from groupline.models.load import choose_precision, load_model, load_tokenizer
from groupline.rewards import reward_notes
from groupline.tasks.source import held_out_problems
from groupline.training.collect import encode_problems
from groupline.training.samplers import sampler_of
from groupline.training.setup import eval_sampling_of, judges_of, prompt_limit


def evaluate_config(config: Config, say: Callable[[str], None] = print) -> dict[str, Any]:
    """pass@k and the rest of `summarise_held_out` for `config.model` on its held-out problems."""
    if config.eval_problems == 0:
        raise ConfigError("eval_problems is 0: there is nothing to evaluate")
    precision = choose_precision(config.device, config.precision)
    model = load_model(config.model, precision.device, config.trust_remote_code)
    tokenizer = load_tokenizer(config.tokenizer or config.model, config.trust_remote_code)
    problems = held_out_problems(config, config.eval_problems)
    prompted, dropped = encode_problems(problems, tokenizer, config, prompt_limit(config, model))
    judges = judges_of(config)
    for note in reward_notes(judges):
        say(note)
    with sampler_of(config, model, tokenizer, precision, say) as engine:
        measured, _ = evaluate(
            engine, tokenizer, prompted, judges, eval_sampling_of(config),
            samples=config.eval_samples, seed=config.seed,
        )  # fmt: skip
    return {"model": config.model, "problems": len(prompted), "dropped": dropped, **measured}
