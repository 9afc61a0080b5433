"""groupline and TRL in turn on every workload, in one run: prints ratios, writes docs/benchmarks.json and .md's table.

    make bench                                  everything, in an environment of its own
    python bench/compare.py --workloads W1 W5   some of it; the other results in the file stay

A round runs each workload once in each system (A B, and the next round A B again), every run a process of its own whose
first step is not counted. Medians are over all counted steps of all rounds. The machine's matrix rate and bandwidth are
measured before each round, and the floor is computed from their medians. Results are written after every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from floor import Load, floor, shape_of
from workloads import WORKLOADS, Workload

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- table: written by bench/compare.py -->", "<!-- end of table -->"
ENGINES = ("groupline", "generate", "generate_batch")
Runs = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--engines", nargs="*", choices=WORKLOADS, default=["W1", "W6"], help="rollouts alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="counted steps of a run")
    parser.add_argument("--model", default="runs/smollm2/start", help="`make start-model` makes it")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of benchmarks.json and benchmarks.md")
    args = parser.parse_args()
    if not Path(args.model, "config.json").exists() and set(args.workloads) | set(args.engines) != {"W5"}:
        raise SystemExit(f"{args.model} holds no model: run `make start-model`, or name another with --model")
    machine: Runs = []
    runs: dict[tuple[str, str], Runs] = {}
    for number in range(1, args.rounds + 1):
        machine.append(run("machine.py"))
        for name in args.workloads:
            for system, script in (("ours", "ours.py"), ("peer", "trl_peer.py")):
                result = run(script, name, "--model", args.model, "--steps", str(args.steps))
                runs.setdefault((name, system), []).append(result)
                print(f"round {number} {name} {system}: {result['seconds']['step']:.2f} s", flush=True)
            write(args, machine, runs)
        for name in args.engines:
            for system in ENGINES:
                result = run("engines.py", system, name, "--model", args.model, "--repeats", str(args.steps))
                runs.setdefault((name, system), []).append(result)
                print(f"round {number} {name} {system}: {result['seconds']['step']:.2f} s", flush=True)
            write(args, machine, runs)
    print((args.docs / "benchmarks.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0])


def run(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON line that a script of this folder prints last. What it says on stderr is shown if it fails."""
    done = subprocess.run([sys.executable, HERE / script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def write(args: argparse.Namespace, machine: Runs, runs: Mapping[tuple[str, str], Runs]) -> None:
    """Bring the two files up to date with what has run; what has not keeps its entry."""
    path: Path = args.docs / "benchmarks.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    facts = {k: statistics.median(m[k] for m in machine) for k in ("matrix_gflops", "blas_gflops", "bandwidth_gb_s")}
    facts |= {k: machine[-1][k] for k in ("cpu", "cores", "memory_gib", "threads", "versions")}
    results["machine"] = facts
    for section in ("workloads", "engines"):
        results.setdefault(section, {})
    when = {"date": time.strftime("%Y-%m-%d"), "rounds": len(machine)}
    for name in WORKLOADS:
        if (name, "peer") in runs:
            entry = compare(WORKLOADS[name], runs[name, "ours"], runs[name, "peer"], facts, args.model)
            rates = {k: facts[k] for k in ("matrix_gflops", "bandwidth_gb_s")}
            results["workloads"][name] = entry | rates | when
        if (name, ENGINES[-1]) in runs:
            entry = {system: summary(runs[name, system]) for system in ENGINES}
            for system in ENGINES[1:]:
                entry[f"speedup_over_{system}"] = round(entry[system]["step"] / entry["groupline"]["step"], 2)
            results["engines"][name] = entry | when
    results["workloads"] = {n: results["workloads"][n] for n in WORKLOADS if n in results["workloads"]}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = args.docs / "benchmarks.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(results)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def summary(results: Runs) -> dict[str, Any]:
    """Medians over all counted steps of all runs, and the largest peak memory."""
    rows = [row for result in results for row in result["rows"]]
    seconds = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return seconds | {
        "steps": [round(row["step"], 3) for row in rows],
        "peak_gib": max(result["peak_gib"] for result in results),
        "loaded_gib": max(result["loaded_gib"] for result in results),
    }


def compare(work: Workload, ours: Runs, peer: Runs, machine: Mapping[str, Any], model: str) -> dict[str, Any]:
    """One workload's entry in the file."""
    if ours[0]["new_tokens"] != peer[0]["new_tokens"]:
        raise SystemExit(f"{work.name}: {ours[0]['new_tokens']} new tokens here, {peer[0]['new_tokens']} there")
    mine, theirs = summary(ours), summary(peer)
    prompt = ours[0]["prompt_tokens"] / work.prompts
    load = Load(prompt, work.prompts, work.lengths, work.trained_groups, work.beta > 0)
    rate, bandwidth = machine["matrix_gflops"] * 1e9, machine["bandwidth_gb_s"] * 1e9
    least = floor(shape_of(config_of(work, model), work.lora), load, rate, bandwidth)
    speedup, share = theirs["step"] / mine["step"], mine["peak_gib"] / theirs["peak_gib"]
    ratio = mine["step"] / least["total"]
    return {
        "speedup": round(speedup, 2),
        "floor_ratio": round(ratio, 2),
        "peak_gib": {"ours": mine["peak_gib"], "peer": theirs["peak_gib"], "share": round(share, 3)},
        "met": {
            "speedup": speedup >= work.target,
            "peak": None if work.peak_limit is None else share <= work.peak_limit,
            "floor": None if work.floor_limit is None else ratio <= work.floor_limit,
        },
        "target": {"speedup": work.target, "peak_share": work.peak_limit, "floor_ratio": work.floor_limit},
        "ours": mine,
        "peer": theirs,
        "floor": {name: round(seconds, 3) for name, seconds in least.items()},
        "prompt_tokens": round(prompt, 1),
        "answer_tokens": list(work.lengths),
        "prompts": work.prompts,
        "dead_groups": work.dead_groups,
        "lora": work.lora,
        "beta": work.beta,
    }


def config_of(work: Workload, model: str) -> dict[str, Any]:
    folder = Path(model)
    if work.tiny:
        from groupline.models.load import resolve_model

        folder = Path(resolve_model("builtin"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def table(results: Mapping[str, Any]) -> str:
    """Markdown: workloads, phases, rollouts, machine."""
    m, out = results["machine"], []
    out += ["", "| | prompt x answer x G x prompts | groupline | TRL | faster | asked | peak GiB | of TRL's | over the floor |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, r in results["workloads"].items():
        w, met = WORKLOADS[name], r["met"]
        peak, ratio = f"{r['peak_gib']['share']:.2f}", f"{r['floor_ratio']:.2f}"
        out.append(
            f"| {name} {w.what} | {shape(r)} | {r['ours']['step']:.2f} s | {r['peer']['step']:.2f} s | "
            f"**{r['speedup']:.2f}x**{mark(met['speedup'])} | {w.target:g}x | {r['peak_gib']['ours']:.2f} / "
            f"{r['peak_gib']['peer']:.2f} | {peak}{mark(met['peak'])} | {ratio}{mark(met['floor'])} |"
        )
    out += ["", "Seconds by phase, groupline / TRL:", "", "| | generate | reward | reference | forward | backward | optimiser |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, r in results["workloads"].items():
        cells = (phases(r, p) for p in ("generate", "reward", "reference", "forward", "backward", "optimiser"))
        out.append(f"| {name} | {' | '.join(cells)} |")
    if results["engines"]:
        out += [
            "",
            "The rollout alone:",
            "",
            "| | groupline | `model.generate` | `generate_batch` |",
            "|---|---|---|---|",
        ]
        for name, r in results["engines"].items():
            cells = [f"{r['groupline']['step']:.2f} s"]
            cells += [f"{r[s]['step']:.2f} s ({r[f'speedup_over_{s}']:.2f}x)" for s in ENGINES[1:]]
            out.append(f"| {name} | {' | '.join(cells)} |")
    v = ", ".join(f"{name} {number}" for name, number in m["versions"].items())
    out += ["", f"Machine: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['threads']} threads; "
            f"{m['matrix_gflops']:.0f} GFLOP/s by the best product there is (BLAS alone: {m['blas_gflops']:.0f}), "
            f"{m['bandwidth_gb_s']:.1f} GB/s. Versions: {v}.", ""]  # fmt: skip
    return "\n".join(out) + "\n"


def shape(r: Mapping[str, Any]) -> str:
    lengths: Sequence[int] = r["answer_tokens"]
    even = min(lengths) == max(lengths)
    answer = f"{lengths[0]}" if even else f"{min(lengths)} to {max(lengths)}"
    return f"{r['prompt_tokens']:.0f} x {answer} x {len(lengths)} x {r['prompts']}"


def phases(r: Mapping[str, Any], phase: str) -> str:
    return f"{r['ours'][phase]:.2f} / {r['peer'][phase]:.2f}"


def mark(met: bool | None) -> str:
    return " (missed)" if met is False else ""


if __name__ == "__main__":
    main()
