"""Commands that look at runs, judges and starts, and the launcher. Thin: parse, call, print.

`groupline doctor|report|watch|audit-reward|probe|plan|launch`.
"""

from __future__ import annotations

import argparse
import json
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupline.arguments import settings
from groupline.config import Config, ConfigError


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


def report(args: Sequence[str]) -> int:
    """A page of runs; or, with --figures, pictures of them and of the method."""
    parser = argparse.ArgumentParser(
        prog="groupline report",
        description="One HTML page of a run, or of several laid over one another, from their files; or its figures.",
    )
    parser.add_argument("run", type=Path, nargs="*", help="a run's folder, finished or going; --figures needs none")
    parser.add_argument("--figures", action="store_true", help="figures as PNG and SVG in place of the page")
    parser.add_argument(
        "--out", type=Path,
        help="the file to write (default report.html in the first run's folder), or the figures' folder (default figures)",
    )  # fmt: skip
    parser.add_argument(
        "--rollouts", type=int, metavar="N", help="most answers of a run whose texts are in the page (default 1600)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    given = parser.parse_args(args)
    if given.figures:
        if given.open or given.rollouts is not None:
            raise ValueError("--open and --rollouts concern the page, and --figures writes none; leave them out")
        return _report_figures(given.run, given.out or Path("figures"))
    from groupline.report.data import ROLLOUTS
    from groupline.report.page import write_report

    page = write_report(given.run, given.out, ROLLOUTS if given.rollouts is None else given.rollouts)
    print(f"saved in {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if given.open and not webbrowser.open(page.as_uri()):
        print("no browser was found here; open the file in one")
    return 0


def _report_figures(runs: Sequence[Path], folder: Path) -> int:
    from groupline.report.figures import write_figures

    for path in write_figures(runs, folder, print):
        print(path)
    return 0


def watch(args: Sequence[str]) -> int:
    """Until it is interrupted."""
    parser = argparse.ArgumentParser(
        prog="groupline watch", description="The report of runs that are going on, in the browser of this machine."
    )
    parser.add_argument("folder", type=Path, help="a run's folder, or one that holds runs")
    parser.add_argument("--port", type=int, default=None, help="of 127.0.0.1 (default 8501); 0 takes a free one")
    parser.add_argument("--no-open", action="store_true", help="only serve, open no browser")
    given = parser.parse_args(args)
    from groupline.report import watch as served

    served.watch(given.folder, served.PORT if given.port is None else given.port, not given.no_open)
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


def plan(args: Sequence[str]) -> int:
    """1 where the run does not fit. The rest of the arguments are settings of the run."""
    parser = argparse.ArgumentParser(prog="groupline plan", add_help=False)
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--rate-tflops", type=float)
    parser.add_argument("--bandwidth-gb-s", type=float)
    parser.add_argument("--gpu", action="store_true")
    given, rest = parser.parse_known_args(args)
    from groupline.arguments import settings
    from groupline.config import Config
    from groupline.training.planning import device_of, with_rates
    from groupline.training.planning import plan as make

    config = settings(Config, rest)
    device = with_rates(device_of(config, given.memory_gib, given.gpu), given.rate_tflops, given.bandwidth_gb_s)
    return 0 if make(config, device).fits else 1


def launch(args: Sequence[str]) -> int:
    """`train` in several processes, by torchrun or as Ray actors. The recipe is read here first, to refuse it once."""
    from groupline.parallel.launch_ray import STRATEGIES, RayOptions, launch_ray

    parser = argparse.ArgumentParser(
        prog="groupline launch",
        description="`groupline train CONFIG.yaml [--key value ...]` in several processes.",
        usage="groupline launch [--nproc N] [--max-restarts R] [--ray] CONFIG.yaml [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="processes (default: one for each GPU there is, else 1)")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="R", help="times the job starts again when one dies (default 0)"
    )
    parser.add_argument("--ray", action="store_true", help="as Ray actors; without it torchrun, on this machine")
    parser.add_argument(
        "--address", help="a Ray cluster, auto or HOST:PORT (default: one on this machine, for this run)"
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="on as few machines as possible (PACK, the default) or as many (SPREAD)"
    )
    given, rest = parser.parse_known_args(args)
    for name, value, least in (("nproc", given.nproc, 1), ("max-restarts", given.max_restarts, 0)):
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}; it must be at least {least}")
    config = settings(Config, rest)
    if not given.ray:
        if given.address or given.strategy:
            raise ConfigError("--address and --strategy are for Ray; add --ray, or leave them out")
        if given.max_restarts and not config.resume:
            raise ConfigError(
                "torchrun starts the same command again, which then finds a run in its folder: give --resume as well, "
                "or --ray, which adds it by itself"
            )
        import torch

        from groupline.parallel.launch import torchrun

        command = torchrun(rest, given.nproc or torch.cuda.device_count() or 1, given.max_restarts)
        os.execv(command[0], command)
    options = RayOptions(given.nproc, given.max_restarts, given.address, given.strategy or "PACK")
    return launch_ray(rest, Path(config.output_dir), config.device, options)
