"""The traps of recipes/traps, run.

    python bench/traps.py data              the supervised start's examples, runs/traps/data/empty_think.jsonl
    python bench/traps.py run [PREFIX ...]  the runs whose names begin so (all of them); a finished one is left alone
    python bench/traps.py list [PREFIX ...] the same as commands
    python bench/traps.py show              the figures of docs/traps.md from the runs, and its pictures into docs/images

`run` calls the recipes of recipes/traps as `groupline` does, so each run can be made by hand too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from groupline.cli import main as groupline
from groupline.runlog import read_json

RUNS_IN = Path("runs/traps")
DATA = RUNS_IN / "data" / "empty_think.jsonl"
TEMPERATURES = ("0.3", "0.7", "1.0", "1.3")
GROUP_SIZES = (2, 4, 8, 16)


def runs() -> dict[str, list[str]]:
    """{name: arguments of `groupline`}; a run's folder is runs/traps/NAME."""
    found = {"empty_think_start": ["sft", "empty_think_start.yaml"]}
    for judge in ("naive", "fixed"):
        for seed in (0, 1):
            found[f"empty_think_{judge}_{seed}"] = ["train", f"empty_think_{judge}.yaml", "--seed", str(seed)]
    found["empty_think_light_0"] = ["train", "empty_think_naive.yaml", "--reward_weights", "1.0", "0.3"]
    for size in GROUP_SIZES:
        found[f"groups_{size}"] = ["train", "groups.yaml", "--num_generations", str(size)]
    # 32 answers to the same problems, drawn anew: what p is, and many more groups to count
    found["groups_chance"] = ["train", "groups.yaml", "--num_generations", "32", "--seed", "1"]
    found["groups_32"] = ["train", "groups.yaml", "--num_generations", "32", "--seed", "2"]
    found["groups_8_no_std"] = ["train", "groups.yaml", "--scale_rewards", "none"]
    for temperature in TEMPERATURES:
        for seed in (0, 1):
            found[f"temperature_{temperature}_{seed}"] = [
                "train", "temperature.yaml", "--temperature", temperature, "--seed", str(seed)
            ]  # fmt: skip
    for seed in (0, 1):
        for row in ("grpo", "dr_grpo"):
            found[f"length_{row}_{seed}"] = ["train", "length.yaml", "--objective", row, "--seed", str(seed)]
        for kl, place in (("k3", "loss"), ("k1", "loss"), ("k1", "reward")):
            found[f"kl_{kl}_{place}_{seed}"] = [
                "train", "kl.yaml", "--kl", kl, "--kl_place", place, "--seed", str(seed)
            ]  # fmt: skip
    # not 0: so the reference is kept and the KL is measured
    found["kl_free_0"] = ["train", "kl.yaml", "--beta", "1e-9", "--seed", "0"]
    return {
        name: [call, f"recipes/traps/{recipe}", *more, "--output_dir", str(RUNS_IN / name)]
        for name, (call, recipe, *more) in found.items()
    }


def write_data(path: Path, count: int = 2000) -> None:
    """Built-in problems, each with `plain`, its worked solution without tags, and `empty`, an empty thought and the
    bare answer."""
    from groupline.tasks.arithmetic import generate

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in generate("th", "train", 0, count):
            thought = str(problem.columns["solution"]).removeprefix("<think>").replace("</think>", "")
            row = {
                "prompt": list(problem.prompt), "answer": problem.answer, "plain": thought,
                "empty": f"<think></think>\n{problem.answer}",
            }  # fmt: skip
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def finished(folder: Path) -> bool:
    """Whether a run is whole there: it came to its end, and was not interrupted."""
    results = folder / "results.json"
    return results.exists() and not read_json(results).get("interrupted", False)


def run(name: str, arguments: list[str]) -> None:
    folder = RUNS_IN / name
    if finished(folder):
        print(f"{name}: done already")
        return
    if groupline([*arguments, "--overwrite", "true"]):
        raise SystemExit(f"{name} failed: groupline {' '.join(arguments)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "run", "list", "show"))
    parser.add_argument("names", nargs="*", help="beginnings of run names")
    given = parser.parse_args()
    chosen = {n: a for n, a in runs().items() if not given.names or n.startswith(tuple(given.names))}
    if given.what == "data":
        write_data(DATA)
    elif given.what == "list":
        print("\n".join(f"groupline {' '.join(arguments)}" for arguments in chosen.values()))
    elif given.what == "show":
        from traps_draw import draw
        from traps_show import found, lines

        figures = found(RUNS_IN)
        print("\n".join(lines(figures)))
        print("\n".join(map(str, draw(figures, Path("docs/images")))))
    else:
        if not DATA.exists():
            write_data(DATA)
        for name, arguments in chosen.items():
            run(name, arguments)


if __name__ == "__main__":
    main()
