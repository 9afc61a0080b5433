"""Every run of bench/traps.py is of a recipe that loads, and asks for what its name says."""

import json
import sys
from pathlib import Path

import pytest

from groupline.cli import settings
from groupline.config import Config, ConfigError
from groupline.training.judges import judges_of
from groupline.training.ppo import PpoConfig
from groupline.training.setup import objective_of
from groupline.training.sft import SftConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import traps  # noqa: E402


def config_of(name):
    call, recipe, *more = traps.runs()[name]
    return settings(SftConfig if call == "sft" else Config, [str(ROOT / recipe), *more])


@pytest.mark.parametrize("name", traps.runs())
def test_each_run_is_of_a_recipe_that_loads(name):
    config = config_of(name)
    assert config.output_dir == f"runs/traps/{name}"
    if isinstance(config, Config):
        assert judges_of(config)[0].name == "correct_number"
        objective_of(config)


def test_every_recipe_is_run():
    assert {Path(a[1]).name for a in traps.runs().values()} == {p.name for p in ROOT.glob("recipes/traps/*.yaml")}


@pytest.mark.parametrize(
    ("name", "kl", "place"),
    [("kl_k3_loss_0", "k3", "loss"), ("kl_k1_loss_0", "k1", "loss"), ("kl_k1_reward_1", "k1", "reward")],
)
def test_the_penalty_is_the_one_named(name, kl, place):
    row = objective_of(config_of(name))
    assert (row.kl, row.kl_place, row.beta) == (kl, place, 0.3)


def test_kl_settings_lie_over_the_row():
    """Without them each row keeps its own; a row without a KL gets k3 in the loss from beta alone."""
    found = {
        (name, beta, kl): objective_of(Config(objective=name, beta=beta, kl=kl))
        for name, beta, kl in (("rloo", None, None), ("dr_grpo", 0.1, None), ("dr_grpo", 0.1, "k2"))
    }
    assert [(o.kl, o.kl_place) for o in found.values()] == [("k1", "reward"), ("k3", "loss"), ("k2", "loss")]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"kl": "k1", "beta": 0.0},
            r"^kl would change nothing, as beta is 0 \(as set\); set beta above 0, or leave it out",
        ),
        ({"kl_place": "reward", "objective": "dr_grpo"}, r"^kl_place would .* beta is 0 \(the default of dr_grpo\)"),
        ({"kl": "k3", "kl_place": "loss", "beta": 0.0}, r"^kl and kl_place would .* leave them out"),
    ],
)
def test_settings_of_a_penalty_without_weight_are_refused(changes, what):
    with pytest.raises(ConfigError, match=what):
        objective_of(Config(**changes))


def test_ppo_has_its_own_penalty():
    assert PpoConfig(kl="k1", kl_place="reward").kl == "k1"
    for changes in ({"kl": "k3"}, {"kl_place": "loss"}):
        with pytest.raises(ConfigError, match="PPO takes k1 from the reward, token by token; leave them out"):
            PpoConfig(**changes)


def test_data_of_the_start(tmp_path):
    traps.write_data(tmp_path / "new" / "data.jsonl", count=3)
    for row in map(json.loads, (tmp_path / "new" / "data.jsonl").read_text(encoding="utf-8").splitlines()):
        assert row["empty"] == f"<think></think>\n{row['answer']}"
        assert row["plain"].splitlines()[-1] == row["answer"]
        assert "think>" not in row["plain"]


def test_a_run_that_was_interrupted_is_not_finished(tmp_path):
    assert not traps.finished(tmp_path)
    (tmp_path / "results.json").write_text('{"interrupted": true}')
    assert not traps.finished(tmp_path)
    (tmp_path / "results.json").write_text('{"interrupted": false}')
    assert traps.finished(tmp_path)
