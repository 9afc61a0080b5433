"""Data flows one way: each line of LINES may import only the lines above it (and its own)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import groupline

LINES = (
    ("records", "runlog", "objective", "metrics", "ability", "alarms"),
    ("settings", "config", "chat"),
    ("tasks", "rewards"),
    ("models", "parallel"),
    ("sampling",),
    ("batch", "training", "evaluation", "comparison"),
    ("report",),
    ("trl", "arguments", "cli", "commands", "__main__"),
)
LINE_OF = {part: number for number, line in enumerate(LINES) for part in line}
SOURCE = Path(groupline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            assert node.module is not None
            if node.module == "groupline":
                yield from (f"groupline.{alias.name}" for alias in node.names)
            else:
                yield node.module


def own_parts(file: Path) -> set[str]:
    """Parts of groupline that a file imports."""
    return {name.split(".")[1] for name in imports(file) if name.startswith("groupline.")}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_file_imports_only_its_own_line_and_those_above(file: Path) -> None:
    if file == SOURCE / "__init__.py":  # imports on use; for type checkers it names everything
        return
    part = part_of(file)
    assert part in LINE_OF, f"{part} has no line in the import order"
    below = {other for other in own_parts(file) if LINE_OF[other] > LINE_OF[part]}
    assert not below, f"{part} may not import {sorted(below)}"


def test_the_objective_imports_torch_and_nothing_else() -> None:
    for file in (SOURCE / "objective").glob("*.py"):
        outside = {n for n in imports(file) if n.split(".")[0] not in {"torch", *sys.stdlib_module_names}}
        assert all(n.startswith("groupline.objective") for n in outside), (file.name, outside)


@pytest.mark.parametrize("name", ["scheduler.py", "blocks.py"])
def test_scheduling_is_bookkeeping_without_torch(name: str) -> None:
    allowed = {"groupline.sampling.blocks", "groupline.sampling.scheduler"}
    outside = {n for n in imports(SOURCE / "sampling" / name) if n.split(".")[0] not in sys.stdlib_module_names}
    assert outside <= allowed


def test_reports_read_files_and_only_the_command_line_knows_them() -> None:
    readers = {part_of(file) for file in FILES if "report" in own_parts(file)}
    assert readers <= {"report", "cli", "commands"}
    for file in (SOURCE / "report").rglob("*.py"):
        assert own_parts(file) <= {"report", "records", "runlog", "objective", "metrics", "alarms"}, file.name


def test_no_file_holds_two_things() -> None:
    long = {str(f.relative_to(SOURCE)): n for f in FILES if (n := len(f.read_text("utf-8").splitlines())) > 300}
    assert not long
