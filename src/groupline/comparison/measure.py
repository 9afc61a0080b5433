"""How trained models answer held-out problems, and how far they have moved from their start.

Legend: M scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupline.config import Config
from groupline.evaluation import evaluate
from groupline.metrics import bootstrap_interval
from groupline.models.load import load_model
from groupline.models.packing import by_tokens, pack
from groupline.objective import kl_estimate, sequence_sum
from groupline.records import Group
from groupline.runlog import write_json
from groupline.sampling import Engine
from groupline.tasks.source import held_out_problems
from groupline.training.collect import encode_problems
from groupline.training.judges import judges_of
from groupline.training.samplers import load_start
from groupline.training.setup import eval_sampling_of, prompt_limit
from groupline.training.step import Scorer

ROW_TOKENS = 8192  # of a pass that scores answers, unless micro_batch_tokens is set


def measure(job: dict[str, Any]) -> None:
    """Write each model's measures to its file. job: {"config": settings of `eval`, whose model is the start,
    "models": [[folder or the start's own name, file], ...]}.

    Measures are those of `evaluate`, the number of weights, and `kl` (see `kl_to_start`). All models answer the same
    problems with the same draws.
    """
    config = Config(**job["config"])
    loaded = load_start(config)
    start, tokenizer, precision = loaded.model.eval(), loaded.tokenizer, loaded.precision
    prompted, _ = encode_problems(
        held_out_problems(config, config.eval_problems), tokenizer, config, prompt_limit(config, start)
    )
    judges = judges_of(config)
    scorer, _ = Scorer.for_model(start, config.eval_temperature, precision.compute)
    for name, file in job["models"]:
        model = load_model(name, precision.device, config.trust_remote_code).eval()
        engine = Engine(
            model, tokenizer, cache_gib=config.cache_gib, max_rows=config.max_rows, dtype=precision.sampling
        )
        found, groups = evaluate(
            engine, tokenizer, prompted, judges, eval_sampling_of(config), samples=config.eval_samples, seed=config.seed
        )
        engine.release()
        found["parameters"] = sum(p.numel() for p in model.parameters())
        found["bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        found["kl"] = kl_to_start(model, start, groups, scorer, config.micro_batch_tokens or ROW_TOKENS)
        write_json(
            Path(file), {"model": name, "problems": len(prompted), "samples_per_problem": config.eval_samples, **found}
        )
        print(f"{name}: pass@1 {found['pass@1']['value']:.1%}", flush=True)


@torch.no_grad()
def kl_to_start(
    model: nn.Module, start: nn.Module, groups: Sequence[Group], scorer: Scorer, row_tokens: int = ROW_TOKENS
) -> dict[str, Any]:
    """KL(model || start) in nats, estimated on answers that the model drew, at the scorer's temperature.

    {"k1", "k3": {"per_token", "per_answer"}}: means over all tokens, and over answers of their tokens' sums. Both
    estimate the same number without bias; k3 scatters less where the two are close (Schulman 2020). The 95% interval of
    k1 per answer, `k1_bootstrap`, is over problems.
    """
    sums = {name: [] for name in ("k1", "k3")}  # type: dict[str, list[float]]
    tokens = 0
    parts = by_tokens(groups, lambda g: sum(len(r.completion.ids) for r in g.rollouts), row_tokens)
    for part in parts:
        prompts = [g.rollouts[0].completion.prompt_ids for g in part]
        row = pack(prompts, [[r.completion.ids for r in g.rollouts] for g in part], next(model.parameters()).device)
        now, then = (scorer(each, row)[0].double() for each in (model, start))  # [M]
        tokens += len(now)
        for name, each in sums.items():
            estimate = kl_estimate(now, then, name)  # type: ignore[arg-type]
            each += sequence_sum(estimate, row.sequence, row.num_sequences).tolist()
    n = len(groups[0].rollouts)
    by_problem = [sum(sums["k1"][i : i + n]) / n for i in range(0, len(sums["k1"]), n)]
    found: dict[str, Any] = {
        name: {"per_token": sum(each) / tokens, "per_answer": sum(each) / len(each)} for name, each in sums.items()
    }
    return found | {"k1_bootstrap": list(bootstrap_interval(by_problem))}


def load_only(config: Config) -> None:
    """Load the model and its sampler and draw one token: the memory that any method needs at the least."""
    start = load_start(config)
    problems, _ = encode_problems(held_out_problems(config, 1), start.tokenizer, config, None)
    params = eval_sampling_of(config.model_copy(update={"max_completion_length": 1}))
    engine = Engine(start.model.eval(), start.tokenizer, max_rows=1, dtype=start.precision.sampling)
    engine.generate([problems[0].ids], 1, params)
