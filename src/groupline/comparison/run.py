"""`groupline compare`: every method trained and measured, each in a process of its own, then one file of numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupline.comparison.facts import START, aggregate, row
from groupline.comparison.settings import STAGES, CompareConfig, evaluation, jobs, needed
from groupline.config import ConfigError, RunSettings
from groupline.runlog import read_json, write_json

RESULTS, TABLE = "compare.json", "compare.md"
INTERRUPTED = 130  # exit status
Say = Callable[[str], None]
Run = Callable[[Path, dict[str, Any]], dict[str, Any]]  # a part and its job -> what the job used, see `run_child`


def run_child(part: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own; {"seconds", "peak_rss_bytes", "peak_device_bytes"} of it.

    Its output goes to <part>.log. RuntimeError if it fails, KeyboardInterrupt if it was interrupted.
    """
    file, log = part.with_name(f"{part.name}.job.json"), part.with_name(f"{part.name}.log")
    write_json(file, job)
    began = time.perf_counter()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "groupline.comparison.child", str(file)], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if child.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{part} failed (exit status {child.returncode}): {lines[-1]}; all it said is in {log}")
    seconds, memory = time.perf_counter() - began, read_json(file.with_suffix(".memory.json"))
    if memory["peak_rss_bytes"] is None:
        memory["peak_rss_bytes"] = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, **memory}


def compare(config: CompareConfig, say: Say = print, run: Run = run_child) -> dict[str, Any]:
    """Train and measure what is not yet in `output_dir`, write compare.json there, and return what it holds.

    A part that is whole there and had the same settings is kept, so an interrupted comparison goes on where it stopped,
    and more seeds or methods can be added to a finished one. Keys: `config`, `budget`, `load` (memory of a process that
    only loads the start), `rows` (one a method and seed, see `facts.row`) and `methods` (see `facts.aggregate`).

    Raises:
        ConfigError: a method does not take its settings; or the folder holds a part with other settings, and
            `overwrite` is off. Nothing has been trained then.
        RuntimeError: a part failed; the message holds its last line and names its log.
    """
    folder = Path(config.output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds files that are not a comparison's; choose another output_dir")
    plan = {seed: jobs(config, seed, folder / f"seed-{seed}") for seed in config.seeds}
    stale = [d for seed, own in plan.items() for d in _stale(folder / f"seed-{seed}", own)]
    measured_with = evaluation(config, 0).model_dump(mode="json")
    if (folder / "config.yaml").exists():
        before = CompareConfig.load(folder / "config.yaml")
        if evaluation(before, 0).model_dump(mode="json") != measured_with:
            stale.append(folder / "config.yaml")
    if stale and not config.overwrite:
        raise ConfigError(
            f"{folder} holds parts of a comparison with other settings ({', '.join(str(d) for d in stale[:3])}); give "
            "another output_dir, or --overwrite True to train those again and keep the rest"
        )
    if folder / "config.yaml" in stale:
        stale += [f for seed in plan for f in (folder / f"seed-{seed}").glob("*.measured.json")]
    for path in stale:
        _remove(path)
    config.model_copy(update={"overwrite": False}).save(folder / "config.yaml")
    load = _part(folder / "load", {"run": "load", "settings": measured_with}, run, say)
    names, rows = [START, *config.methods], []
    for seed, own in plan.items():
        place = folder / f"seed-{seed}"
        for name, (kind, settings) in own.items():
            _part(place / name, {"run": kind, "settings": settings.model_dump(mode="json")}, run, say)
        _measure(config, seed, place, run, say)
        rows += [row(config, seed, name, place, STAGES.get(name, ())) for name in names]
    found = {
        "config": config.model_dump(mode="json"),
        "budget": {
            "problems": config.steps * config.prompts_per_step,
            "samples": config.steps * config.answers_per_step,
            "policy_updates": config.steps,
            "answers_per_update": config.answers_per_step,
            "most_new_tokens": config.steps * config.answers_per_step * config.max_completion_length,
        },
        "load": load,
        "rows": rows,
        "methods": aggregate(rows, names),
    }
    write_json(folder / RESULTS, found)
    return found


def _stale(folder: Path, own: dict[str, tuple[str, RunSettings]]) -> list[Path]:
    """Parts that were made with settings other than these, or from such parts."""
    changed: set[str] = set()
    for name, (_, settings) in own.items():  # in the order in which one needs another
        usage = _usage(folder / name)
        other = usage.exists() and read_json(usage)["settings"] != settings.model_dump(mode="json")
        if other or (usage.exists() and changed & set(needed(name))):
            changed.add(name)
    return [folder / name for name in own if name in changed]


def _remove(part: Path) -> None:
    """A part with all that belongs to it."""
    if part.is_dir():
        shutil.rmtree(part)
    for path in (part, *part.parent.glob(f"{part.name}.*.json"), part.with_suffix(".log")):
        if path.is_file():
            path.unlink()


def _usage(part: Path) -> Path:
    return part.with_name(f"{part.name}.usage.json")


def _part(part: Path, job: dict[str, Any], run: Run, say: Say) -> dict[str, Any]:
    """What the part used, and its settings. Runs it unless that is known, which it is once the part is whole."""
    usage = _usage(part)
    if not usage.exists():
        if part.exists():
            shutil.rmtree(part)  # cut short
        say(f"{part}: {job['run']} ...")
        used = run(part, job)
        say(f"{part}: {used['seconds']:.0f} s, peak {used['peak_rss_bytes'] / 1e6:,.0f} MB")
        write_json(usage, {"settings": job["settings"], **used})
    found: dict[str, Any] = read_json(usage)
    return found


def _measure(config: CompareConfig, seed: int, folder: Path, run: Run, say: Say) -> None:
    """Measure those models of a seed that have not been measured since they were trained, in one process."""
    models = {START: config.model, **{name: str(folder / name / "model") for name in config.methods}}
    files = {name: folder / f"{name}.measured.json" for name in models}
    left = [[models[name], str(file)] for name, file in files.items() if not file.exists()]
    if left:
        say(f"{folder}: measuring {len(left)} models ...")
        settings = evaluation(config, seed).model_dump(mode="json")
        run(folder / "measure", {"run": "measure", "settings": {"config": settings, "models": left}})
