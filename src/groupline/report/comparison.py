"""A comparison's table and figure, from its compare.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from groupline.report.figure import BLUE, GREEN, GREY, ORANGE, load_pyplot, save
from groupline.runlog import read_json

ROLES = ("policy", "reference", "value", "reward")
COLOURS = dict(zip(ROLES, (BLUE, GREY, ORANGE, GREEN), strict=True))
NAMES = {
    "start": "start (SFT)", "sft": "SFT, more of it", "ppo": "PPO, code reward", "ppo_reward_model": "reward model + PPO",
    "dpo": "DPO", "rloo": "RLOO", "reinforce": "REINFORCE", "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO",
    "gspo": "GSPO", "bnpo": "BNPO", "cispo": "CISPO",
}  # fmt: skip
MB = 1e6


def comparison_table(found: dict[str, Any]) -> str:
    """Two Markdown tables, what was learnt and what it took, and the notes they need."""
    config, budget = found["config"], found["budget"]
    first, last = _ks(found)
    seeds = ", ".join(map(str, config["seeds"]))
    lines = [
        f"Budget of every method: {budget['problems']:,} problems, {budget['samples']:,} answers of at most "
        f"{config['max_completion_length']} tokens, {budget['policy_updates']} updates of the policy on "
        f"{budget['answers_per_update']} answers each. Seeds {seeds}.",
        f"Held out: {config['eval_problems']} problems, {config['eval_samples']} answers each, the same for all.",
        "",
        f"| method | {first} (Wilson 95%) | sd over seeds | - start (paired 95%) | - GRPO (paired 95%) | {last} | "
        f"{last} - start | KL to start, nats an answer | length |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for m in found["methods"]:
        low, high = m[first]["wilson"]
        cells = [
            NAMES[m["method"]],
            f"{m[first]['mean']:.1%} ({100 * low:.1f} to {100 * high:.1f})",
            "" if m[first]["sd"] is None else f"{100 * m[first]['sd']:.1f}",
            _difference(m.get("vs_start"), first),
            _difference(m.get("vs_grpo"), first),
            f"{m[last]['mean']:.1%}",
            _difference(m.get("vs_start"), last),
            f"{m['kl_per_answer']['mean']:.2f}{_spread(m['kl_per_answer'], 1, '.2f')}",
            f"{m['completion_length']['mean']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "\\* the interval leaves out 0; what has none is within noise. Intervals are over problems, of the mean over "
        "seeds; sd is that of whole trainings.",
        "",
        "| method | human labels | gold answers for the judge | models held: MB of weights | peak memory, MB (above "
        "loading) | answers drawn | new tokens | updates: policy + other | wall time, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for m in found["methods"]:
        if m["method"] == "start":
            continue
        held = ", ".join(f"{role} {size / MB:.1f}" for role, size in m["models"].items())
        other = f" + {m['other_updates']['mean']:.0f}" if m["other_updates"]["mean"] else ""
        cells = [
            NAMES[m["method"]],
            _labels(m),
            f"{m['gold_answers']['mean']:.0f}" if m["gold_answers"]["mean"] else "none",
            f"**{len(m['models'])}**: {held}",
            _peak(m, found["load"]),
            f"{m['samples']['mean']:,.0f}",
            f"{m['generated_tokens']['mean']:,.0f}",
            f"{m['policy_updates']['mean']:.0f}{other}",
            f"{m['seconds']['mean']:.0f}{_spread(m['seconds'], 1, '.0f')}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_notes(found)])


def write_comparison(folder: Path) -> list[Path]:
    """compare.png and compare.svg in the folder: accuracy, the models held, memory and KL, a line a method.

    Raises ImportError naming the extra if matplotlib is missing.
    """
    pyplot = load_pyplot()
    found = read_json(folder / "compare.json")
    first, _ = _ks(found)
    start = next((m for m in found["methods"] if m["method"] == "start"), None)
    methods = [m for m in found["methods"] if m["method"] != "start"]
    places = list(range(len(methods)))[::-1]
    figure, axes = pyplot.subplots(
        1, 4, figsize=(14, 1.6 + 0.42 * len(methods)), width_ratios=(4, 3, 3, 3), sharey=True
    )
    accuracy, models, memory, kl = axes
    for y, m in zip(places, methods, strict=True):
        low, high = m[first]["bootstrap"]
        accuracy.plot([low, high], [y, y], color=BLUE, linewidth=2, alpha=0.5)
        accuracy.plot([m[first]["mean"]], [y], "o", color=BLUE)
        accuracy.plot(m[first]["seeds"], [y] * len(m[first]["seeds"]), "|", color=BLUE, markersize=9)
        for x, role in enumerate(ROLES):
            there = role in m["models"]
            models.plot([x], [y], "s", color=COLOURS[role], markersize=15, fillstyle="full" if there else "none",
                        alpha=1.0 if there else 0.25)  # fmt: skip
        models.text(len(ROLES) - 0.4, y, f"{len(m['models'])}   {_labels(m)}", va="center", fontsize=9)
    if start is not None:
        accuracy.axvline(start[first]["mean"], color=GREY, linestyle=":", label="start")
        accuracy.legend(frameon=False, loc="lower left", fontsize=8)
    names = [NAMES[m["method"]] for m in methods]
    accuracy.set_yticks(places, names)
    accuracy.set_title(f"{first}, held out", fontsize=10)
    accuracy.set_xlabel("line: 95% over problems; ticks: seeds", fontsize=8)
    models.set_title("models held; human labels needed", fontsize=10)
    models.set_xticks(range(len(ROLES)), ROLES, fontsize=8, rotation=30)
    models.set_xlim(-0.6, len(ROLES) + 3.2)
    above = [(_bytes(m) - _bytes_of(found["load"])) / MB for m in methods]
    memory.barh(places, above, color=GREY, height=0.5)
    memory.set_title("peak memory above loading, MB", fontsize=10)
    kl.barh(places, [m["kl_per_answer"]["mean"] for m in methods], color=ORANGE, height=0.5)
    kl.set_title("KL to the start, nats an answer", fontsize=10)
    for axis in axes[1:]:
        axis.tick_params(axis="y", length=0)
    return save(figure, folder / "compare.png", (".png", ".svg"))


def _ks(found: dict[str, Any]) -> tuple[str, str]:
    keys = sorted((k for k in found["methods"][0] if k.startswith("pass@")), key=lambda k: int(k[5:]))
    return keys[0], keys[-1]


def _difference(found: dict[str, Any] | None, key: str) -> str:
    if found is None:
        return ""
    low, high = (100 * x for x in found[key]["bootstrap"])
    return f"{100 * found[key]['value']:+.1f} ({low:+.1f} to {high:+.1f})" + ("" if low <= 0 <= high else " \\*")


def _labels(m: dict[str, Any]) -> str:
    if m["gold_solutions"]["mean"]:
        return f"{m['gold_solutions']['mean']:,.0f} solutions"
    return f"{m['pairs']['mean']:,.0f} pairs" if m["pairs"]["mean"] else "none"


def _spread(found: dict[str, Any], scale: float, form: str) -> str:
    return "" if found["sd"] is None else f" ± {format(scale * found['sd'], form)}"


def _bytes(m: dict[str, Any]) -> float:
    device: dict[str, float] = m.get("peak_device_bytes") or m["peak_rss_bytes"]
    return device["mean"]


def _bytes_of(load: dict[str, Any]) -> float:
    return float(load["peak_device_bytes"] or load["peak_rss_bytes"])


def _peak(m: dict[str, Any], load: dict[str, Any]) -> str:
    return f"{_bytes(m) / MB:,.0f} ({(_bytes(m) - _bytes_of(load)) / MB:+,.0f})"


def _notes(found: dict[str, Any]) -> list[str]:
    notes = [
        "Human labels are what people would have to write: here the judge stands in for them where pairs are ordered.",
        f"Peak memory is that of the process that trained the policy; loading the start alone takes "
        f"{_bytes_of(found['load']) / MB:,.0f} MB. Wall time, answers and tokens include pairs and reward model.",
        "KL is k1 on the trained model's own answers to the held-out problems.",
    ]
    if any(m["method"] == "dpo" for m in found["methods"]):
        notes.append("DPO compares with a reference too, and keeps its log-probs instead of the model.")
    return notes
