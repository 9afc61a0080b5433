"""The command line: `groupline train|ppo|eval|sft|pairs|reward-model|dpo|...`. Thin: parse, call, print."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from groupline import commands
from groupline.arguments import numbers, settings, switch, take
from groupline.config import Config
from groupline.parallel.mesh import Elsewhere, RankLost, is_main, refuse_ranks
from groupline.report.ability import ability_table, write_ability
from groupline.report.comparison import comparison_table, write_comparison
from groupline.runlog import write_json, write_text

USAGE = """groupline: group-relative policy optimisation on rewards that code can check

  groupline train [CONFIG.yaml] [--key value ...]     train with GRPO and its relatives; --dry-run only plans it
  groupline launch [--nproc N] [--ray] CONFIG.yaml [--key value ...]  train in several processes; --help says more
  groupline ppo   [CONFIG.yaml] [--key value ...]     PPO: a value model, and a reward model where one is given
  groupline eval  [CONFIG.yaml | RUN] [--key value ...]  pass@k of a model on held-out problems; --k 1,8,64 says which
                  [--compare BEFORE AFTER] [--out FILE]  of two models: was ability created, or sharpened?
  groupline sft   [CONFIG.yaml] [--key value ...]     supervised fine-tuning on worked answers
  groupline pairs [CONFIG.yaml] [--key value ...]     preference pairs: sampled answers, ordered by the judge
  groupline reward-model [CONFIG.yaml] [--key value ...]  a reward model from preference pairs
  groupline dpo   [CONFIG.yaml] [--key value ...]     direct preference optimisation on pairs
  groupline compare [CONFIG.yaml] [--key value ...]   every method of the family on one task, one budget: one table
  groupline merge ADAPTER FOLDER                      an adapter into its base, as one model
  groupline import-gguf FILE FOLDER                   a GGUF file to Hugging Face format
  groupline doctor RUN [RUN...]                       what a run's figures warn of; exit status 1 if it is broken
  groupline report RUN [RUN...]                       a page of runs: curves, held-out problems, answers, alarms
  groupline report --figures [RUN...] [--out FOLDER]  figures of runs, and of the method, as PNG and SVG
  groupline watch RUN|DIR [--port N] [--no-open]      the page of runs that are going, in the browser
  groupline audit-reward FUNCTION                     what a judge gives to adversarial answers
  groupline probe [CONFIG.yaml] [--key value ...]     the share of groups that would teach, by group size
  groupline plan  [CONFIG.yaml] [--key value ...]     memory by part, seconds a step, budgets that fit; loads no weights
  groupline compat                                    what becomes of each option of TRL's GRPOConfig
  groupline explain [--out FILE] [--lang en|zh]       the method as a page to play with, in the browser

`groupline train --help` lists every setting. --fast takes a recipe's quicker variant, its `fast_settings`.
"""

C = TypeVar("C", bound=Config)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 unusable input (the message says what to change), 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    known = {
        "train": _train, "ppo": _ppo, "eval": _eval, "sft": _sft, "pairs": _pairs, "reward-model": _reward_model,
        "dpo": _dpo, "compare": _compare, "merge": _merge, "import-gguf": _import_gguf, "compat": _compat,
        "doctor": commands.doctor, "report": commands.report, "watch": commands.watch,
        "audit-reward": commands.audit_reward, "probe": commands.probe, "plan": commands.plan, "launch": commands.launch,
        "explain": _explain,
    }  # fmt: skip
    if args[0] not in known:
        print(f"groupline: there is no command {args[0]!r}; commands: {', '.join(known)}", file=sys.stderr)
        return 2
    if args[0] not in ("explain", "report", "watch"):  # which need none of them
        _quiet_libraries()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop saves the model, as Ctrl-C does
    try:
        if args[0] != "train":
            refuse_ranks(f"groupline {args[0]}")
        return known[args[0]](args[1:])
    except (ValueError, OSError, ImportError, FloatingPointError, RankLost, Elsewhere) as error:
        if os.environ.get("GROUPLINE_TRACEBACK"):
            raise
        if is_main() or isinstance(error, RankLost):  # any other one rank 0 raises too
            print(f"groupline {args[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"groupline {args[0]}: interrupted", file=sys.stderr)
        return 130


def _train(args: Sequence[str]) -> int:
    dry, args = switch(args, "dry-run")
    config = settings(Config, args)
    if dry:
        from groupline.training.dry_run import dry_run

        dry_run(config)
        return 0
    from groupline.training.grpo import train

    return _shown(config, train)


def _ppo(args: Sequence[str]) -> int:
    from groupline.training.ppo import PpoConfig, ppo, ppo_objective

    dry, args = switch(args, "dry-run")
    config = settings(PpoConfig, args)
    if dry:
        from groupline.training.dry_run import dry_run

        dry_run(config, objective=ppo_objective(config))
        return 0
    return _shown(config, ppo)


def _shown(config: C, method: Callable[[C, Callable[[str], None]], dict[str, Any]]) -> int:
    """A run with its progress, figures and table on the screen; the exit status."""
    from groupline.report.curves import write_curves
    from groupline.training.display import Display

    with Display() as display:
        results = method(config, display.say)
    if not is_main():
        return 130 if results["interrupted"] else 0
    run = Path(config.output_dir)
    figures = _figures(lambda: write_curves(run))
    if figures.startswith("no"):
        print(figures)
    print(_table(results, run))
    return 130 if results["interrupted"] else 0


def _eval(args: Sequence[str]) -> int:
    from groupline.training.held_out import KS, compare_models, evaluate_config, is_run, run_settings

    (asked,), rest = take(args, "k", 1)
    (before, after), rest = take(rest, "compare", 2)
    (out,), rest = take(rest, "out", 1)
    ks = numbers("--k", asked) if asked else KS if before else None
    defaults: dict[str, Any] = {}
    if rest and is_run(rest[0]):  # a run's folder: its settings, its trained model
        defaults = run_settings(Path(rest.pop(0)))
    elif before and is_run(after) and not (rest and not rest[0].startswith("-")):
        defaults = run_settings(Path(after))
    config = settings(Config, rest, **defaults)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    found = compare_models(config, before, after, ks or KS, say) if before else evaluate_config(config, say, ks)
    if out:
        write_json(Path(out), found)
        say(_figures(lambda: write_ability(Path(out))))
    if before:
        print(ability_table(found))
    else:
        print(json.dumps({k: v for k, v in found.items() if k != "right_per_problem"}, ensure_ascii=False, indent=1))
    return 0


def _compare(args: Sequence[str]) -> int:
    from groupline.comparison.run import TABLE, compare
    from groupline.comparison.settings import CompareConfig

    config = settings(CompareConfig, args)
    found = compare(config)
    folder, table = Path(config.output_dir), comparison_table(found)
    write_text(folder / TABLE, table + "\n")
    print(_figures(lambda: write_comparison(folder)))
    print(f"\n{table}")
    return 0


def _sft(args: Sequence[str]) -> int:
    from groupline.training.sft import SftConfig, sft

    folder = sft(settings(SftConfig, args))
    results = json.loads((folder.parent / "results.json").read_text(encoding="utf-8"))
    return 130 if results["interrupted"] else 0


def _pairs(args: Sequence[str]) -> int:
    from groupline.training.sampled_pairs import sample_pairs

    sample_pairs(settings(Config, args, output_dir="runs/pairs"))
    return 0


def _reward_model(args: Sequence[str]) -> int:
    from groupline.training.reward_model import RewardModelConfig, reward_model

    return 130 if reward_model(settings(RewardModelConfig, args))["interrupted"] else 0


def _dpo(args: Sequence[str]) -> int:
    from groupline.training.dpo import DpoConfig, dpo

    return 130 if dpo(settings(DpoConfig, args))["interrupted"] else 0


def _import_gguf(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="groupline import-gguf", description="A GGUF file to Hugging Face format.")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(args)
    from groupline.models.gguf import import_gguf

    print(f"saved in {import_gguf(given.file, given.folder)}")
    return 0


def _merge(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="groupline merge", description="A PEFT adapter into its base: one folder in Hugging Face format."
    )
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let the base's folder bring code that runs here"
    )
    given = parser.parse_args(args)
    from groupline.models.merge import merge_adapter

    print(f"saved in {merge_adapter(given.adapter, given.out, given.trust_remote_code)}")
    return 0


def _compat(args: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="groupline compat", description="Every option of TRL's GRPOConfig.").parse_args(args)
    from groupline.trl.options import table

    print(table())
    return 0


def _explain(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="groupline explain", description="The method as one HTML page, offline.")
    parser.add_argument(
        "--out", type=Path, default=Path("explain.html"), help="the file to write (default explain.html)"
    )
    parser.add_argument("--lang", default="en", help="the language it opens in, en or zh; a switch is in the page")
    parser.add_argument("--no-open", action="store_true", help="only write it, open no browser")
    given = parser.parse_args(args)
    from groupline.report.explain import write_explainer

    page = write_explainer(given.out, given.lang)
    print(f"saved in {page}")
    if not given.no_open and not webbrowser.open(page.as_uri()):
        print("no browser was found here; open the file in one")
    return 0


def _figures(write: Callable[[], list[Path]]) -> str:
    """Write them, and say so in one line, or why not: without matplotlib everything else is there all the same."""
    try:
        return f"figures: {', '.join(map(str, write()))}"
    except ImportError as error:
        return f"no figures: {error}"


def _table(results: dict[str, Any], run: Path) -> str:
    held = results["held_out"]
    lines = []
    if held["before"] and held["after"]:
        lines.append(f"\nheld out: {held['problems']} problems, {held['samples_per_problem']} answers each")
        lines.append(f"{'':10}{'before':>8}  {'95% (Wilson)':<16}{'after':>8}  {'95% (Wilson)':<16}")
        for key in (k for k in held["after"] if k.startswith("pass@")):
            cells = []
            for when in ("before", "after"):
                found = held[when][key]
                low, high = found["wilson"]
                cells.append(f"{found['value']:>8.1%}  {f'{low:.1%} to {high:.1%}':<16}")
            lines.append(f"{key:<10}{''.join(cells)}")
        for key, text in (("reward", "reward"), ("completion_length", "length")):
            lines.append(f"{text:<10}{held['before'][key]:>8.2f}  {'':<16}{held['after'][key]:>8.2f}")
    lines.append(
        f"\nlook at   {run / 'figures'} (curves), {run / 'rollouts.jsonl'} (every answer), {run / 'results.json'}"
    )
    lines.append(f"model in  {run / 'model'} (Hugging Face format)")
    lines.append(f"page      groupline report {run} --open")
    return "\n".join(lines)


def _quiet_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    raise SystemExit(main())
