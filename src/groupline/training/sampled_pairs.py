"""`groupline pairs`: preference pairs from a model's own answers, ordered by what judges them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupline.config import Config, ConfigError
from groupline.parallel.mesh import refuse_ranks
from groupline.records import Pair, Problem
from groupline.runlog import write_json, write_text
from groupline.sampling import Sampler
from groupline.tasks.pairs import pairs_of_groups
from groupline.tasks.source import held_out_problems, training_problems
from groupline.training.collect import collect, encode_problems
from groupline.training.judges import judges_of
from groupline.training.run import check_unused, claim
from groupline.training.samplers import load_start, sampler_of
from groupline.training.setup import prompt_limit, sampling_of

FILES = {"train": "train.jsonl", "held_out": "held_out.jsonl"}


def sample_pairs(config: Config, say: Callable[[str], None] = print) -> dict[str, list[Pair]]:
    """{"train": pairs, "held_out": pairs}, also written to `output_dir` as JSONL, with counts in results.json.

    `steps` x `prompts_per_step` training problems and `eval_problems` held-out ones are answered `num_generations` times
    by `config.model`, as `train` would sample and judge them; each whose rewards differ gives a pair, its best answer
    before its worst (see `pairs_of_groups`).
    ConfigError: no training problem gave a pair.
    """
    refuse_ranks("sample_pairs")
    check_unused(config)
    start = load_start(config)
    judges = judges_of(config)

    def sampled(engine: Sampler, problems: Sequence[Problem], label: str) -> tuple[list[Pair], dict[str, Any]]:
        found: list[Pair] = []
        prompted, dropped = encode_problems(problems, start.tokenizer, config, prompt_limit(config, start.model))
        seconds, tokens = 0.0, 0
        for at in range(0, len(prompted), config.prompts_per_step):
            groups, spent = collect(
                prompted[at : at + config.prompts_per_step], engine, start.tokenizer, judges, config.num_generations,
                sampling_of(config), seed=config.seed, label=f"pairs/{label}",
            )  # fmt: skip
            found += pairs_of_groups(groups, config.seed)
            seconds += sum(spent.values())
            tokens += sum(len(r.completion.ids) for g in groups for r in g.rollouts)
        say(f"{label}: {len(found)} pairs from {len(prompted)} problems, {seconds:.0f} s")
        counts = {"problems": len(prompted), "dropped": dropped, "pairs": len(found)}
        return found, {
            **counts,
            "answers": len(prompted) * config.num_generations,
            "tokens": tokens,
            "seconds": seconds,
        }

    problems = {
        "train": training_problems(config, config.steps * config.prompts_per_step),
        "held_out": held_out_problems(config, config.eval_problems),
    }
    pairs: dict[str, list[Pair]] = {}
    results: dict[str, Any] = {"method": "pairs", "model": config.model, "seed": config.seed}
    with sampler_of(config, start, say) as engine:
        for split, own in problems.items():
            pairs[split], results[split] = sampled(engine, own, split)
    if not pairs["train"]:
        raise ConfigError(
            f"the rewards of all {config.num_generations} answers are equal for each of {len(problems['train'])} "
            "training problems, so no answer is preferred; use more problems or more num_generations"
        )
    folder = claim(config)
    for split, file in FILES.items():
        write_pairs(folder / file, pairs[split])
    write_json(folder / "results.json", results)
    say(f"pairs in {folder / FILES['train']} and {folder / FILES['held_out']}")
    return pairs


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """One JSON object a line, whole or not at all; `read_pairs` gives the same pairs back."""
    write_text(path, "".join(json.dumps(pair.to_json(), ensure_ascii=False) + "\n" for pair in pairs))
