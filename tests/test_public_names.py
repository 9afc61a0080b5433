"""The public names: sorted, complete, light to import, and with the signatures that others rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import groupline

RELIED_ON = {
    "BNPO", "CISPO", "Config", "DAPO", "DR_GRPO", "Engine", "GRPO", "GRPOConfig", "GRPOTrainer", "GSPO", "Objective",
    "REINFORCE", "RLOO",
    "PpoConfig", "SamplingParams", "evaluate", "group_advantages", "kl", "pass_at_k", "ppo", "rewards", "train",
    "wilson_interval",
}  # fmt: skip


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sorted_and_complete() -> None:
    shouting = [n for n in groupline.__all__ if n.isupper()]
    classes = [n for n in groupline.__all__ if n[0].isupper() and not n.isupper()]
    rest = [n for n in groupline.__all__ if not n[0].isupper()]
    assert groupline.__all__ == sorted(shouting) + sorted(classes) + sorted(rest)  # the order that ruff asks for
    assert set(groupline.__all__) == {*groupline._HOMES, "__version__"}
    assert set(groupline.__all__) >= RELIED_ON
    assert dir(groupline) == sorted(groupline.__all__)


def test_every_name_resolves_to_what_its_home_holds() -> None:
    for name, home in groupline._HOMES.items():
        value = getattr(groupline, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
            assert value.__module__.startswith(home), (name, value.__module__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = groupline.trian


def test_import_is_light() -> None:
    heavy = "[m for m in ('torch', 'transformers', 'peft', 'numpy', 'pydantic') if m in sys.modules]"
    assert python(f"import sys, groupline; print({heavy})") == "[]"


def test_the_command_line_starts_without_torch() -> None:
    heavy = "[m for m in ('torch', 'transformers', 'peft', 'numpy', 'matplotlib', 'starlette') if m in sys.modules]"
    assert python(f"import sys, groupline.cli; print({heavy})") == "[]"


def test_names_stay_what_they_are_once_submodules_are_loaded() -> None:
    """A loaded submodule becomes an attribute of its package; none may take a public name's place."""
    code = (
        "import groupline.training.grpo, groupline.evaluation, groupline.rewards, groupline.objective.kl, groupline\n"
        "print(groupline.train is groupline.training.grpo.train, groupline.evaluate is groupline.evaluation.evaluate,\n"
        "      groupline.rewards.__name__, groupline.kl.__name__)"
    )
    assert python(code) == "True True groupline.rewards groupline.objective.kl"


def names(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any], list[str]]:
    """(parameters in order, defaults, those that must be named)."""
    found = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in found if p.default is not p.empty}
    return [p.name for p in found], defaults, [p.name for p in found if p.kind is p.KEYWORD_ONLY]


def test_signatures() -> None:
    settings = ["scale", "baseline", "ddof", "eps"]
    assert names(groupline.group_advantages) == (
        ["rewards", "group_size", *settings],
        {"scale": "group", "baseline": "mean", "ddof": 1, "eps": 1e-4},
        settings,
    )
    assert names(groupline.pass_at_k) == (["n", "c", "k"], {}, [])
    assert names(groupline.wilson_interval) == (["successes", "trials", "confidence"], {"confidence": 0.95}, [])
    for estimator in (groupline.kl.k1, groupline.kl.k2, groupline.kl.k3):
        assert names(estimator)[0][:2] == ["logp", "ref_logp"]
    assert names(groupline.train)[0][0] == "config"
    assert names(groupline.ppo) == names(groupline.train)
    for judge in ("correct_number", "think_format", "language_share", "extract_number"):
        assert callable(getattr(groupline.rewards, judge))
    assert names(groupline.rewards.extract_number)[0][0] == "text"
