"""`groupline probe`: how many groups would teach, before a run is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb
from typing import Any

from groupline.config import Config, ConfigError
from groupline.metrics import bootstrap_interval
from groupline.parallel.mesh import refuse_ranks
from groupline.records import Group
from groupline.rewards import reward_notes
from groupline.tasks.source import training_problems
from groupline.training.collect import collect, encode_problems
from groupline.training.judges import judges_of
from groupline.training.samplers import load_start, sampler_of
from groupline.training.setup import prompt_limit, sampling_of
from groupline.training.summary import summarise

SIZES = (2, 4, 8, 16)


def chance_of_signal(rewards: Sequence[float | None], size: int) -> float:
    """Chance that a group of `size` answers has unequal rewards, without bias, from at least `size` scored answers.

    1 - sum over the values v of C(n_v, size) / C(n, size): of all groups that could be taken from the answers, the
    share that is not equal throughout. Answers that no function scored teach nothing and are left out.

    Raises:
        ValueError: size is below 2.
    """
    if size < 2:
        raise ValueError(f"size is {size}; a group has at least 2 answers")
    counts = Counter(r for r in rewards if r is not None)
    n = sum(counts.values())
    if n < size:
        return 0.0
    return 1 - sum(comb(c, size) for c in counts.values()) / comb(n, size)


def expected_signal(groups: Sequence[Group], sizes: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By group size: the mean chance over problems, with a bootstrap 95% interval over them."""
    found = {}
    for size in sizes:
        values = [chance_of_signal([r.reward for r in g.rollouts], size) for g in groups]
        found[size] = {"value": sum(values) / len(values), "bootstrap": list(bootstrap_interval(values))}
    return found


def probe(
    config: Config,
    *,
    samples: int = 16,
    problems: int = 50,
    sizes: Sequence[int] = SIZES,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Draws `samples` answers to each of the first `problems` training problems, as the run would, and says what groups
    of each size could be expected to teach. Nothing is trained and nothing is written.

    Raises:
        ConfigError: there are fewer samples than the largest group, which could then not be told.
    """
    refuse_ranks("probe")
    if samples < max(sizes):
        raise ConfigError(f"samples is {samples}, and groups of {max(sizes)} are asked about; draw at least as many")
    judges = judges_of(config)
    asked = training_problems(config, problems)[:problems]
    start = load_start(config)
    prompted, dropped = encode_problems(asked, start.tokenizer, config, prompt_limit(config, start.model))
    for note in reward_notes(judges):
        say(note)
    with sampler_of(config, start, say) as engine:
        groups, seconds = collect(
            prompted, engine, start.tokenizer, judges, samples, sampling_of(config), seed=config.seed, label="probe"
        )
    summary = summarise(groups, judges[0].name)
    return {
        "problems": len(prompted),
        "dropped": dropped,
        "samples": samples,
        "accuracy": summary["accuracy"],
        "reward": summary["reward"],
        "completion_length": summary["completions/mean_length"],
        "truncated": summary["completions/clipped_ratio"],
        "never_right": summary["groups/all_wrong"],
        "always_right": summary["groups/all_right"],
        "expected_signal": expected_signal(groups, sizes),
        "seconds": seconds,
    }


def table(found: dict[str, Any]) -> str:
    """What `probe` found, to be read."""
    lines = [
        f"{found['problems']} problems x {found['samples']} answers: right {found['accuracy']:.1%}, never right "
        f"{found['never_right']:.0%}, always right {found['always_right']:.0%}, length {found['completion_length']:.1f}, "
        f"cut off {found['truncated']:.1%}",
        "",
        f"{'group':>5}  {'groups that teach':>17}  {'95% (bootstrap)':<16}  {'answers for one that teaches':>28}",
    ]
    for size, share in found["expected_signal"].items():
        low, high = share["bootstrap"]
        cost = f"{size / share['value']:.1f}" if share["value"] else "-"
        lines.append(f"{size:>5}  {share['value']:>17.1%}  {f'{low:.1%} to {high:.1%}':<16}  {cost:>28}")
    return "\n".join(lines)
