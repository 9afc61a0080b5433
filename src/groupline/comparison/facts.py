"""From the files of a comparison's parts to one row a method and seed, and to means over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupline.ability import paired_difference
from groupline.comparison.settings import DPO, PAIRS, REWARD_MODEL, RLHF, SFT, CompareConfig
from groupline.metrics import bootstrap_interval, pass_at_k, wilson_interval
from groupline.runlog import read_json, read_jsonl

START, GRPO = "start", "grpo"
AVERAGED = (
    "completion_length", "truncated", "reward", "kl_per_token", "kl_per_answer", "samples", "generated_tokens",
    "trained_tokens", "policy_updates", "other_updates", "seconds", "peak_rss_bytes", "peak_device_bytes",
    "weight_bytes", "gold_solutions", "pairs", "gold_answers",
)  # fmt: skip


def row(config: CompareConfig, seed: int, name: str, folder: Path, stages: Sequence[str]) -> dict[str, Any]:
    """All that is known of a method and a seed.

    pass@k with intervals, reward, length; `kl` to the start; `models` held while the policy is trained, in bytes, and
    their sum `weight_bytes`; `samples`, `generated_tokens`, `trained_tokens`, `policy_updates`, `other_updates` (of the
    reward and value models) and `seconds` including what was made first (`stages`, also in `seconds_by_part`);
    `peak_rss_bytes` of the process that trained the policy, `peak_by_part` of each; `gold_solutions`, `pairs` and
    `gold_answers`, the labels that training read.
    """
    measured = read_json(folder / f"{name}.measured.json")
    found = {"method": name, "seed": seed, **{k: v for k, v in measured.items() if k not in ("model", "seconds")}}
    found["kl_per_token"] = measured["kl"]["k3"]["per_token"]
    found["kl_per_answer"] = measured["kl"]["k1"]["per_answer"]
    if name == START:
        return found
    parts = [*stages, name]
    usage = {part: read_json(folder / f"{part}.usage.json") for part in parts}
    results = {part: read_json(folder / part / "results.json") for part in parts}
    found["seconds_by_part"] = {part: used["seconds"] for part, used in usage.items()}
    found["peak_by_part"] = {part: used["peak_rss_bytes"] for part, used in usage.items()}
    found["seconds"] = sum(found["seconds_by_part"].values())
    found["peak_rss_bytes"] = usage[name]["peak_rss_bytes"]
    found["peak_device_bytes"] = usage[name]["peak_device_bytes"]
    problems = config.steps * config.prompts_per_step
    own = results[name]
    models = own.get("models") or {"policy": {"parameters": measured["parameters"], "bytes": measured["bytes"]}}
    samples = generated = pairs = other = 0
    if PAIRS in results:
        train = results[PAIRS]["train"]
        samples, generated, pairs = train["answers"], train["tokens"], train["pairs"]
    if REWARD_MODEL in results:
        other += results[REWARD_MODEL]["updates"]
    if name in (SFT, DPO):
        updates, trained = own["updates"], own["tokens"]
    else:
        steps, settings = list(read_jsonl(folder / name / "metrics.jsonl")), usage[name]["settings"]
        drawn = sum(int(m["num_completion_tokens"]) for m in steps)
        updates = len(steps) * settings["num_iterations"] * settings["updates_per_pass"]
        groups = sum(settings["prompts_per_step"] + int(m.get("groups/replaced", 0)) for m in steps)
        samples += groups * settings["num_generations"]
        generated, trained = generated + drawn, drawn * settings["num_iterations"]
        other += updates if "value" in models else 0
    judged = name not in (SFT, DPO, RLHF)
    return found | {
        "models": {role: held["bytes"] for role, held in models.items()},
        "weight_bytes": sum(held["bytes"] for held in models.values()),
        "samples": samples,
        "generated_tokens": generated,
        "trained_tokens": int(trained),
        "policy_updates": updates,
        "other_updates": other,
        "gold_solutions": problems if name == SFT else 0,
        "pairs": pairs,
        "gold_answers": problems if judged else 0,
    }


def aggregate(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row a method: means over seeds, and what can be told from chance.

    `mean` and `sd` (over seeds; None with one) of each number. `pass@1` and the k that all have: the mean over seeds
    with its Wilson and bootstrap intervals over problems, each problem's value being its mean over seeds, and `sd`.
    `vs_start`, `vs_grpo`: paired differences of pass@k, over problems, likewise of means over seeds (see
    `paired_difference`): the noise of problems and answers, not that of training, which `sd` shows.
    """
    by = {name: sorted((r for r in rows if r["method"] == name), key=lambda r: r["seed"]) for name in names}
    ks = [int(key.removeprefix("pass@")) for key in rows[0] if key.startswith("pass@")]
    out = []
    for name in names:
        own = by[name]
        found: dict[str, Any] = {"method": name, "seeds": [r["seed"] for r in own], "models": own[0].get("models")}
        for key in AVERAGED:
            values = [r[key] for r in own if r.get(key) is not None]
            if values:
                found[key] = {"mean": statistics.fmean(values), "sd": _sd(values)}
        for k in ks:
            each = _per_problem(own, k)
            found[f"pass@{k}"] = {
                "mean": statistics.fmean(each),
                "sd": _sd([r[f"pass@{k}"]["value"] for r in own]),
                "wilson": list(wilson_interval(min(sum(each), len(each)), len(each))),
                "bootstrap": list(bootstrap_interval(each)),
                "seeds": [r[f"pass@{k}"]["value"] for r in own],
            }
        for key, other in (("vs_start", START), ("vs_grpo", GRPO)):
            if other in by and name not in (START, other):
                found[key] = {
                    f"pass@{k}": paired_difference(_per_problem(by[other], k), _per_problem(own, k)) for k in ks
                }
        out.append(found)
    return out


def _per_problem(own: Sequence[dict[str, Any]], k: int) -> list[float]:
    """pass@k of every problem, its mean over seeds."""
    each = [[pass_at_k(r["samples_per_problem"], c, k) for c in r["right_per_problem"].values()] for r in own]
    return [statistics.fmean(values) for values in zip(*each, strict=True)]


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
