"""The model card of a run: README.md of the saved model's folder, in the Hugging Face hub's form."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml

from groupline.config import Config
from groupline.models.lora import is_peft
from groupline.training.setup import Setup

# Not what was done
PLACE = {"output_dir", "overwrite", "resume", "save_steps", "save_total_limit", "log_rollouts", "log_tokens"}


def config_hash(config: Config) -> str:
    """SHA-256 of the settings that say what was done, as sorted JSON."""
    settings = {k: v for k, v in config.model_dump(mode="json").items() if k not in PLACE}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def model_card(setup: Setup, results: dict[str, Any]) -> str:
    """Base, data, rewards, settings' hash and the held-out table, as Markdown under YAML metadata."""
    c, adapter = setup.config, is_peft(setup.policy)
    base = base_of(setup)
    about: dict[str, Any] = {
        "base_model": base,
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["groupline", setup.objective.name, *(["lora"] if adapter else [])],
    }
    kind = "A LoRA adapter for" if adapter else "Trained from"
    o = setup.objective
    rows = [
        ("base", f"`{base}`"),
        ("data", _data(setup)),
        ("rewards", _rewards(setup)),
        ("objective", f"`{o.name}`, beta {o.beta:g}"),
        (
            "steps",
            f"{len(results['steps'])} of {c.steps}, {c.prompts_per_step} prompts x {c.num_generations} answers each",
        ),
        ("learning rate", f"{c.learning_rate:g}, {c.lr_scheduler_type}"),
        ("number format", str(setup.precision)),
        ("seed", str(c.seed)),
        ("settings (SHA-256)", f"`{config_hash(c)}`"),
    ]
    lines = [
        "---", yaml.safe_dump(about, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# {kind} {base}", "",
        f"Trained with groupline: {_method(setup)}.", "",
        "| what | value |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows), "",
        "## Held-out problems", "", *_evaluation(results), "",
        "## Loading", "", "```python", *_loading(base, adapter), "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def base_of(setup: Setup) -> str:
    """The name that the weights came from; of a model that was passed in, the one it carries."""
    if not setup.passed_in:
        return setup.config.model
    inner = setup.policy.get_base_model() if is_peft(setup.policy) else setup.policy  # type: ignore[operator]
    return str(getattr(getattr(inner, "config", None), "_name_or_path", "")) or "a model passed in"


def _method(setup: Setup) -> str:
    if setup.objective.name == "ppo":
        return "proximal policy optimisation (PPO) with a value model"
    return "group-relative policy optimisation on rewards that code can check"


def _rewards(setup: Setup) -> str:
    """The judges; where a reward model's score took their place, that."""
    model = getattr(setup.config, "reward_model", None)
    if model is not None:
        return f"the score of the reward model `{model}`"
    return ", ".join(f"{r.weight:g} x `{r.name}`" for r in setup.rewards)


def _data(setup: Setup) -> str:
    c = setup.config
    source = f"`{c.train_file}`" if c.train_file else f"task `{c.task}`, data seed {c.data_seed}"
    return f"{len(setup.stream.prompted)} problems ({source})"


def _evaluation(results: dict[str, Any]) -> list[str]:
    held = results["held_out"]
    when = [name for name in ("before", "after") if held[name]]
    if not when:
        return ["Not measured."]
    keys = [k for k in held[when[0]] if k.startswith("pass@")]
    cells = {name: [_share(held[name][k]) for k in keys] for name in when}
    table = [f"| {k} | {' | '.join(cells[name][i] for name in when)} |" for i, k in enumerate(keys)]
    table.append(f"| mean length, tokens | {' | '.join(format(held[n]['completion_length'], '.1f') for n in when)} |")
    head = [f"| measure | {' | '.join(f'{name} training' for name in when)} |", "|---" * (len(when) + 1) + "|"]
    told = f"{held['problems']} problems, {held['samples_per_problem']} answers each; 95% intervals are Wilson's."
    return [told, "", *head, *table]


def _share(found: dict[str, Any]) -> str:
    low, high = found["wilson"]
    return f"{found['value']:.1%} ({low:.1%} to {high:.1%})"


def _loading(base: str, adapter: bool) -> list[str]:
    if adapter:
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}")',
            'model = PeftModel.from_pretrained(base, "FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        ]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
