"""Configuration: what is accepted, what is refused, and that every refusal names key and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from groupline.arguments import settings
from groupline.comparison.settings import CompareConfig
from groupline.config import RENAMED, Config, ConfigError, read_yaml
from groupline.training.dpo import DpoConfig
from groupline.training.judges import judges_of
from groupline.training.ppo import PpoConfig
from groupline.training.reward_model import RewardModelConfig
from groupline.training.setup import objective_of
from groupline.training.sft import SftConfig

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    return str(caught.value)


def from_text(tmp_path: Path, text: str) -> Config:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return Config.load(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipes_load(recipe: Path) -> None:
    kinds = {"sft": SftConfig, "ppo": PpoConfig, "dpo": DpoConfig, "reward_model": RewardModelConfig}
    kinds |= {"compare": CompareConfig}
    kind = next((kind for name, kind in kinds.items() if name in recipe.name), Config)
    loaded = kind.load(recipe)
    assert loaded.output_dir != kind().output_dir  # a recipe names its own folder
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    fast, block = values.pop("fast", None), values.pop("fast_settings", {})
    assert bool(block) == (fast is not None)
    if block:
        assert kind.load(recipe, fast=True) == kind(**values | block) != loaded
    for key, value in values.items():
        assert key in loaded.model_fields_set, key
        if isinstance(value, str) and isinstance(getattr(loaded, key), float):
            assert getattr(loaded, key) == float(value)


def test_there_are_recipes() -> None:
    assert {"quickstart.yaml", "builtin_sft_worked.yaml"} <= {p.name for p in RECIPES}


@pytest.mark.parametrize("kind", [Config, PpoConfig, SftConfig])
def test_yaml_and_back(kind: type[Config] | type[SftConfig], tmp_path: Path) -> None:
    changed = {"learning_rate": 3e-7, "lora_r": 8, "lora_targets": ("q_proj", "v_proj"),
               "system_prompt": "คิด: ทีละขั้น\n# no comment",
               "chat_template_kwargs": {"enable_thinking": False}, "max_prompt_length": 300}  # fmt: skip
    if issubclass(kind, Config):
        changed |= {"stop": ("\n\n", "no"), "rewards": ("think_format",), "reward_weights": (0.5,), "beta": 0.0}
    for config in (kind(), kind(**changed)):
        config.save(tmp_path / "new" / "config.yaml")
        assert kind.load(tmp_path / "new" / "config.yaml") == config


def test_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    """Case G1."""
    assert yaml.safe_load("1e-5") == "1e-5"
    config = from_text(tmp_path, "learning_rate: 1e-5\nadam_epsilon: 1e-7\nbeta: 4e-2\nsteps: '20'\n")
    assert (config.learning_rate, config.adam_epsilon, config.beta, config.steps) == (1e-5, 1e-7, 0.04, 20)


def test_truth_values_and_nothing(tmp_path: Path) -> None:
    config = from_text(tmp_path, "log_rollouts: no\noverwrite: yes\ncache_gib: null\nbeta: ~\nscale_rewards: none\n")
    assert (config.log_rollouts, config.overwrite, config.cache_gib, config.beta) == (False, True, None, None)
    assert config.scale_rewards == "none"  # the word, which YAML does not take for null


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    assert from_text(tmp_path, "# nothing yet\n") == Config()


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps: 3\nseed: 4\n")
    config = Config.load(tmp_path / "recipe.yaml", steps=5)
    assert (config.steps, config.seed) == (5, 4)


FAST = "steps: 9\nseed: 4\nfast: {}\nfast_settings:\n  steps: 2\n  learning_rate: 1e-3\n"


def test_a_fast_variant_goes_between_the_recipe_and_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for said, asked, expected in [
        ("false", None, 9), ("true", None, 2), ("false", True, 2), ("true", False, 9), ("true", True, 2),
    ]:  # fmt: skip
        path.write_text(FAST.format(said))
        config = Config.load(path, fast=asked)
        assert (config.steps, config.seed) == (expected, 4)
        assert config.learning_rate == (1e-3 if expected == 2 else 1e-6)
        assert Config.load(path, fast=asked, steps=5).steps == 5
    assert SftConfig.load(path, fast=True).steps == 2
    path.write_text(FAST.partition("fast")[0])
    assert Config.load(path, fast=False).steps == 9


@pytest.mark.parametrize(
    ("text", "fast", "message"),
    [
        ("steps: 3\n", True, "has no fast_settings, so there is no fast variant of it"),
        ("fast: true\n", None, "has no fast_settings"),
        ("fast: {steps: 2}\n", None, "fast is {'steps': 2}; it is true or false, and its settings stand in fast_settings"),
        ("fast_settings: [steps]\n", None, r"fast_settings is \['steps'\]; it must hold settings"),
        ("fast_settings: {stepz: 2}\n", None, "in fast_settings: unknown setting 'stepz'; did you mean 'steps'"),
        ("fast_settings: {fast: true}\n", None, "in fast_settings: unknown setting 'fast'"),
    ],
)  # fmt: skip
def test_fast_settings_that_cannot_be(text: str, fast: bool | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Config.load(tmp_path / "recipe.yaml", fast=fast)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rte", "learning_rate"),
        ("num_generation", "num_generations"),
        ("max_completion_len", "max_completion_length"),
        ("Steps", "steps"),
        ("lora_rank", "lora_r"),
    ],
)
def test_an_unknown_key_gets_the_nearest(key: str, nearest: str) -> None:
    """Case G2."""
    assert refusal(**{key: 1}) == f"unknown setting '{key}'; did you mean '{nearest}'?"


def test_a_key_like_no_other() -> None:
    assert refusal(xyzzy=1) == "unknown setting 'xyzzy'; `--help` lists them all"


@pytest.mark.parametrize("key", RENAMED)
def test_keys_of_other_trainers_are_explained(key: str) -> None:
    message = refusal(**{key: 1})
    assert message.startswith(f"unknown setting '{key}'; here it is ")
    first = message.split("here it is ")[1].split()[0].rstrip(":")
    assert first in Config.model_fields or first == "nothing"


def test_every_problem_is_in_one_message() -> None:
    message = refusal(stepz=1, learning_rate=-1, lr_scheduler_type="cosin", top_p=2)
    for part in (
        "unknown setting 'stepz'; did you mean 'steps'?",
        "learning_rate is -1: Input should be greater than 0",
        "lr_scheduler_type is 'cosin': Input should be 'constant', 'linear' or 'cosine'",
        "top_p is 2: Input should be less than or equal to 1",
    ):
        assert part in message
    message = refusal(num_generations=1, temperature=0, rewards=(), lora_alpha=4)
    for part in ("num_generations is 1", "temperature is 0", "rewards is empty", "lora_alpha is set but lora_r is 0"):
        assert part in message


FLOATS = [
    n for n, f in Config.model_fields.items() if "float" in str(f.annotation) and "tuple" not in str(f.annotation)
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), ".nan", "inf"])
@pytest.mark.parametrize("key", [k for k in FLOATS if k != "chat_template_kwargs"])
def test_no_number_is_infinite_or_undefined(key: str, value: Any) -> None:
    assert f"{key} is " in refusal(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0), ("learning_rate", -1e-5), ("learning_rate", "fast"), ("steps", 0), ("steps", 1.5),
        ("prompts_per_step", 0), ("max_completion_length", 0), ("num_iterations", 0), ("micro_batch_tokens", 0),
        ("beta", -0.1), ("epsilon", 1.0), ("delta", 1.0), ("ddof", 2), ("top_k", -1), ("min_p", 1.1), ("lora_r", -1),
        ("lora_alpha", 0), ("lora_dropout", 1.0), ("precision", "fp8"), ("scale_rewards", "std"), ("adam_beta1", 1.0),
        ("max_grad_norm", -1), ("warmup_steps", -1), ("eval_samples", 0), ("overwrite", "perhaps"), ("stop", "\n"),
        ("long_prompts", "cut"), ("old_logprobs", "none"), ("reward_weights", [float("nan")]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(key: str, value: Any) -> None:
    """Among them case L5, lora_alpha 0."""
    assert refusal(**{key: value}).startswith(f"{key} is {value!r}: " if key != "reward_weights" else "reward_weights")


def test_filters_need_recomputed_log_probs() -> None:
    assert "use old_logprobs: recompute, or no filter" in refusal(old_logprobs="sampler", top_p=0.9)
    assert Config(top_p=0.9, top_k=50).old_logprobs == "recompute"


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['touch hacked']\n",
        "!!python/object/new:os.system ['touch hacked']\n",
        "model: !!python/name:os.system\n",
    ],
)
def test_a_recipe_runs_no_code(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case X3."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not plain YAML: .*python/"):
        from_text(tmp_path, text)
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.yaml"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="there is no file"):
        read_yaml(tmp_path)
    for text, what in (
        ("- a\n- b\n", "holds a list"),
        ("just words\n", "holds a str"),
        ("a: [1\n", "is not plain YAML"),
    ):
        with pytest.raises(ConfigError, match=what):
            from_text(tmp_path, text)


def test_the_objective_follows_the_settings() -> None:
    """A row by name, with what the settings change; what they leave alone stays the row's own."""
    row = objective_of(Config(objective="dapo"))
    assert (row.clip_low, row.clip_high, row.token_weight, row.beta) == (0.2, 0.28, "per_token", 0.0)
    row = objective_of(Config(objective="grpo", epsilon=0.1, beta=0.0, ddof=0, scale_rewards="none"))
    assert (row.clip_low, row.clip_high, row.beta, row.ddof, row.scale) == (0.1, 0.1, 0.0, 0, "none")
    row = objective_of(Config(objective="dapo", epsilon_high=0.5, beta=0.01, delta=4.0))
    assert (row.clip_low, row.clip_high, row.kl, row.beta, row.delta) == (0.2, 0.5, "k3", 0.01, 4.0)
    for changes, part in (
        ({"objective": "reinforce", "epsilon": 0.2}, "clip_low"),
        ({"objective": "cispo", "delta": 3.0}, "delta"),
    ):
        with pytest.raises(ConfigError, match=rf"Objective\.{part} is "):
            objective_of(Config(**changes))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("2e-5", 2e-5), ("1.0e-6", 1e-6), ("1.0e6", 1e6), ("1e6", 1e6), ("0.000001", 1e-6), ("'1e-6'", 1e-6)],
)  # fmt: skip
def test_c61_a_number_in_any_writing(text: str, value: float, tmp_path: Path) -> None:
    assert from_text(tmp_path, f"learning_rate: {text}\n").learning_rate == value
    assert Config(learning_rate=text.strip("'")).learning_rate == value  # as an argument of the command line


@pytest.mark.parametrize("text", ["abc", "no", "yes", "null", ".nan", ".inf", "-1e-6"])
def test_c61_what_is_no_rate_is_refused_by_key_and_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^learning_rate is .*\(settings of .*recipe\.yaml\)$"):
        from_text(tmp_path, f"learning_rate: {text}\n")


@pytest.mark.parametrize("key", ["steps", "learning_rate", "seed", "lora_alpha", "model"])
def test_c61_a_truth_value_is_no_number(key: str) -> None:
    """YAML reads `yes` as true, which would otherwise pass for 1."""
    assert refusal(**{key: True}) == f"{key} is True: a truth value, and it takes none"


def test_reward_timeouts_from_yaml_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("rewards: [think_format, correct_number]\nreward_timeouts: [null, 2]\n")
    assert [r.timeout for r in judges_of(Config.load(file))] == [None, 2.0]
    given = settings(Config, [str(file), "--reward-timeouts", "1.5", "None", "--report-to", "mlflow", "wandb"])
    assert (given.reward_timeouts, given.report_to) == ((1.5, None), ("mlflow", "wandb"))
    assert settings(Config, ["--report-to", "none"]).report_to == ()
    with pytest.raises(ConfigError, match=r"2 rewards but 1 reward_timeouts; give one for each, or null"):
        Config(rewards=("a", "b"), reward_timeouts=(1.0,))
    with pytest.raises(ConfigError, match=r"reward_timeouts is .*greater than 0"):
        Config(reward_timeouts=(0.0,))
