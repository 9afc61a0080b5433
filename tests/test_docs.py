"""The documents against the code: every setting stands in docs/config.md with its default, and every link leads somewhere."""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from groupline.comparison.settings import CompareConfig
from groupline.config import Config
from groupline.models.new import NewModel
from groupline.objective import OBJECTIVES
from groupline.rewards.registry import BUILT_IN
from groupline.settings import Settings
from groupline.tasks.task import TASKS
from groupline.training.dpo import DpoConfig
from groupline.training.ppo import PpoConfig
from groupline.training.reward_model import RewardModelConfig
from groupline.training.sft import SftConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ROW = re.compile(r"^\| `(\w+)` \|.*?\| `([^`]*)` \|", re.MULTILINE)


def settings_table(*headings):
    """{setting: default} of the tables under these headings; a later one takes the place of an earlier one."""
    parts = re.split(r"^## ", (ROOT / "docs" / "config.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for heading in headings:
        (part,) = [p for p in parts if p.startswith(heading)]
        found |= {name: json.loads(value) for name, value in ROW.findall(part)}
    return found


@pytest.mark.parametrize(
    ("kind", "headings"),
    [
        (Config, ("Shared by", "`train` and `eval`", "Checkpoints")),
        (PpoConfig, ("Shared by", "`train` and `eval`", "Checkpoints", "`ppo`")),
        (SftConfig, ("Shared by", "Checkpoints", "`sft`")),
        (RewardModelConfig, ("Shared by", "Checkpoints", "Pairs", "`reward-model`")),
        (DpoConfig, ("Shared by", "Checkpoints", "Pairs", "`dpo`")),
        (CompareConfig, ("Shared by", "`compare`")),
    ],
    ids=["train", "ppo", "sft", "reward-model", "dpo", "compare"],
)
def test_every_setting_is_documented_with_its_default(kind: type[BaseModel], headings):
    told = settings_table(*headings)
    known = {n: f.get_default(call_default_factory=True) for n, f in kind.model_fields.items()}
    known = {n: list(d) if isinstance(d, tuple) else d for n, d in known.items()}
    if kind is SftConfig:
        known |= {n: f.default for n, f in NewModel.model_fields.items()}
    assert told == known


@pytest.mark.parametrize("kind", [Config, PpoConfig, SftConfig, RewardModelConfig, DpoConfig])
def test_help_says_what_every_setting_is(kind: type[BaseModel]):
    """`--help` shows the text under a setting, else that of the class it is inherited from: none may be without."""
    told = {}
    for cls in reversed([c for c in kind.__mro__ if issubclass(c, Settings)]):
        (body,) = [n.body for n in ast.parse(inspect.getsource(cls)).body if isinstance(n, ast.ClassDef)]
        for node, after in itertools.pairwise([*body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                told[node.target.id] = after.value.value
    assert not [name for name in kind.model_fields if not told.get(name)]
    assert ("Rollouts" in told["steps"]) == issubclass(kind, Config)


def test_names_that_settings_accept_are_documented():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    readmes = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")]
    rewards = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert not [name for name in (*OBJECTIVES, *TASKS) if f"`{name}`" not in text]
    assert not [name for name in OBJECTIVES for readme in readmes if f"| `{name}` |" not in readme]
    assert not [name for name in BUILT_IN if f"| `{name}` |" not in rewards]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [link for link in links if link and "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_every_test_that_the_page_of_cases_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "cases.md").read_text(encoding="utf-8"))
    assert len(named) > 150
    found = {
        path: {
            n.name for n in ast.parse((ROOT / "tests" / path).read_text("utf-8")).body if isinstance(n, ast.FunctionDef)
        }
        for path in {path for path, _ in named}
    }
    assert not [f"{path}::{name}" for path, name in named if name not in found[path]]


def test_the_page_of_cases_names_a_test_for_every_id():
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| (.*) \|$", text, re.MULTILINE)
    assert all("::" in tests for _, tests in rows)
    ids = [name for name, _ in rows]
    assert len(set(ids)) == len(ids)
    later = set(re.findall(r"\b[A-Z]\d+\b", text.partition("## Of parts that are not built yet")[2]))
    for letter, last in {"N": 19, "M": 13, "R": 17, "D": 5, "G": 5, "S": 3, "L": 5, "E": 2, "X": 6}.items():
        assert {f"{letter}{i}" for i in range(1, last + 1)} <= {*ids, *later}
