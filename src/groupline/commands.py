"""Commands that look at runs, judges and starts: `groupline doctor|report|audit-reward|probe`. Thin: parse, call, print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def doctor(args: Sequence[str]) -> int:
    """1 where the run is broken."""
    parser = argparse.ArgumentParser(
        prog="groupline doctor", description="What a run's figures warn of, with the evidence and what to do."
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="a run's folder, finished or going, or TRL's trainer_state.json or its folder"
    )
    given = parser.parse_args(args)
    from groupline.report.doctor import diagnose

    found = [diagnose(run) for run in given.run]
    print("\n\n".join(one.text() for one in found))
    return 1 if any(one.verdict == "broken" for one in found) else 0


def figures(args: Sequence[str]) -> int:
    """The figures of runs, and those that need none."""
    parser = argparse.ArgumentParser(
        prog="groupline report", description="Figures of runs as PNG and SVG; two of them need no run."
    )
    parser.add_argument("run", type=Path, nargs="*", help="a run's folder, finished or going")
    parser.add_argument("--figures", action="store_true", required=True, help="write the figures")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="the folder to write (default figures)")
    given = parser.parse_args(args)
    from groupline.report.figures import write_figures

    for path in write_figures(given.run, given.out, print):
        print(path)
    return 0


def audit_reward(args: Sequence[str]) -> int:
    """1 where the function accepts what it should not, or the other way round."""
    parser = argparse.ArgumentParser(
        prog="groupline audit-reward", description="What a reward function gives to adversarial answers."
    )
    parser.add_argument("function", help="a built-in name, package.module.function, or path/to/file.py:function")
    parser.add_argument(
        "--kind", choices=("correctness", "format"), help="what it judges; by default the format if it is called so"
    )
    parser.add_argument("--gold", type=int, default=42, help="the right answer, of two digits or more")
    parser.add_argument("--prompt", help="the question")
    parser.add_argument(
        "--column", action="append", default=[], metavar="NAME=VALUE", help="a further column; VALUE is JSON, or text"
    )
    given = parser.parse_args(args)
    from groupline.rewards.audit import Kind, audit, table
    from groupline.rewards.registry import get_reward

    function, name = get_reward(given.function), given.function.rpartition(":")[2].rpartition(".")[2]
    kind: Kind = given.kind or ("format" if "format" in name else "correctness")
    asked: dict[str, Any] = {"gold": given.gold, "columns": dict(map(_column, given.column))}
    if given.prompt is not None:
        asked["prompt"] = given.prompt
    findings = audit(function, name, kind=kind, **asked)
    print(f"{given.function}, as a judge of {'the format' if kind == 'format' else 'correctness'}\n")
    print(table(findings))
    return 1 if any(f.verdict.startswith("false") for f in findings) else 0


def _column(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--column is {text!r}; write it as NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def probe(args: Sequence[str]) -> int:
    """Its own options are --samples, --problems and --groups; the rest are settings of a run."""
    parser = argparse.ArgumentParser(prog="groupline probe", add_help=False)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--groups", type=lambda text: tuple(int(x) for x in text.split(",")), default=None)
    given, rest = parser.parse_known_args(args)
    from groupline.arguments import settings
    from groupline.config import Config
    from groupline.training.probe import SIZES, probe, table

    sizes = given.groups or SIZES
    config = settings(Config, rest)
    print(table(probe(config, samples=given.samples, problems=given.problems, sizes=sizes)))
    return 0
