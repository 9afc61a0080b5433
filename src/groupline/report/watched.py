"""The runs below a folder, as `groupline watch` may show them: only what lies in that folder, found by looking there.

A name that a browser sends is only ever compared with the names found, so no path is made from it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupline.report.data import ROLLOUTS, RunReader, labels
from groupline.runlog import finite

DEEP = 3  # folders below the one given in which runs are looked for
READ = ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl", "results.json", "config.yaml", "plan.txt")


class Watched:
    """folder: a run, or a folder of runs. Safe to call from several threads."""

    def __init__(self, folder: Path, rollouts: int = ROLLOUTS) -> None:
        """ValueError if there is no such folder. It may be empty still."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name a run's folder, or one that holds runs")
        self.root = folder.resolve()
        self.rollouts = rollouts
        self._readers: dict[str, RunReader] = {}
        self._made: dict[str, tuple[str, bytes]] = {}  # name -> (stamp, data) as last made
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Name -> folder of every run, by name: its path below the root, or the root's own name.

        Links to folders are not followed, and a run one of whose files is a link out of the root is left out.
        """
        found = {}
        for place, folders, files in os.walk(self.root):
            here = Path(place)
            depth = len(here.relative_to(self.root).parts)
            if "metrics.jsonl" in files:
                name = self.root.name if depth == 0 else here.relative_to(self.root).as_posix()
                if self._all_inside(here):
                    found[name] = here
            if "metrics.jsonl" in files or depth == DEEP:
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
        return dict(sorted(found.items()))

    def listed(self) -> list[dict[str, str]]:
        """[{id, label, changed}] of every run; `changed` differs once there is something new of it."""
        runs = self.runs()
        told = zip(runs.items(), labels(list(runs.values())), strict=True)
        return [{"id": name, "label": label, "changed": stamp(folder)} for (name, folder), label in told]

    def data(self, name: str) -> bytes:
        """A run's data as JSON, made anew when its files have changed.

        KeyError for a name that is not among `runs`; ValueError if its files are broken.
        """
        folder = self.runs()[name]
        with self._lock:
            now = stamp(folder)  # before reading: what is written meanwhile makes another stamp
            if name in self._made and self._made[name][0] == now:
                return self._made[name][1]
            reader = self._readers.setdefault(name, _Confined(folder, self.root))
            told = reader.data(self.rollouts) | {"id": name, "folder": name}
            made = json.dumps(finite(told), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            self._made[name] = now, made
            return made

    def _all_inside(self, run: Path) -> bool:
        """Whether each file that is read of a run lies below the root, links followed."""
        return all(inside(run / name, self.root) for name in READ)


class _Confined(RunReader):
    """Reads a run's folder, and no tokenizer that lies elsewhere."""

    def __init__(self, folder: Path, root: Path) -> None:
        super().__init__(folder)
        self.root = root

    def _tokenizers(self, settings: Mapping[str, Any]) -> Iterable[Path]:
        package = Path(__file__).resolve().parents[1]  # the built-in model's tokenizer
        for file in super()._tokenizers(settings):
            if inside(file, self.root) or inside(file, package):
                yield file


def inside(path: Path, root: Path) -> bool:
    """Whether a path, links followed, is below a resolved root; it need not exist."""
    return path.resolve().is_relative_to(root)


def stamp(run: Path) -> str:
    """What a run's files were last: their sizes and times, in hexadecimal."""
    parts = []
    for name in READ:
        try:
            found = (run / name).stat()
        except FileNotFoundError:
            parts.append("-")
        else:
            parts.append(f"{found.st_size:x}.{found.st_mtime_ns:x}")
    return "_".join(parts)
