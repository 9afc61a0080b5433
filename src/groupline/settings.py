"""Typed, frozen settings and their YAML form: errors name key, value and remedy, every problem in one message."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from groupline.runlog import write_text

# Keys of other trainers, and what takes their place here.
RENAMED = {
    "max_prompt_lenght": "max_prompt_length",
    "per_device_train_batch_size": "prompts_per_step (prompts, not answers) and micro_batch_tokens (memory only)",
    "gradient_accumulation_steps": "micro_batch_tokens: micro-batches follow from it and never change the gradient",
    "generation_batch_size": "prompts_per_step",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "loss_type": "objective",
    "use_liger_kernel": "nothing: logits are never held whole",
    "bf16": "precision",
    "fp16": "precision",
    "reward_funcs": "rewards",
    "max_new_tokens": "max_completion_length",
    "group_size": "num_generations",
    "dataset_name": "train_file: hub:owner/name",
    "columns": "prompt_column and answer_column",
    "clip_range": "epsilon",
    "kl_coef": "beta",
}

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")  # each also the name of its extra and of what it imports

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction01 = Annotated[float, Field(gt=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run; the message lists every problem found."""


class Settings(BaseModel):
    """Typed, frozen settings. Unknown keys are refused with the nearest valid one, every problem in one message."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        known = type(self).model_fields
        problems = [explain_unknown(key, known) for key in values if key not in known]
        kinds = {key: str(field.annotation) for key, field in known.items()}
        truths = [k for k, v in values.items() if isinstance(v, bool) and "bool" not in kinds.get(k, "bool")]
        # YAML's yes and no would pass for 1 and 0.
        problems += [f"{k} is {values[k]}: a truth value, and it takes none" for k in truths]
        try:
            super().__init__(**{k: v for k, v in values.items() if k in known and k not in truths})
        except ValidationError as error:
            problems += map(_explain, error.errors())
        if problems:
            raise ConfigError("; ".join(problems)) from None

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Self:
        """From a YAML file. Numbers such as 1e-5, which YAML reads as text, are converted by the key's type.

        changes: settings over the file's; `fast=True` first lays its block `fast_settings` over it (see `read_recipe`).
        """
        fast = changes.pop("fast", None)
        values = read_recipe(Path(path), cls.model_fields, fast) | changes
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{error} (settings of {path})") from None

    def save(self, path: Path) -> None:
        """Written whole or not at all."""
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


class VllmSettings(Settings):
    """What draws the answers of a run, and a vLLM server where that does."""

    sampler: Literal["engine", "vllm"] = "engine"
    """What draws the answers: the engine in this process, or vLLM."""
    staleness: int = Field(default=0, ge=0)
    """Most updates by which the weights that draw a step's answers may be older than those it trains; 0: none."""
    sampler_correction: Literal["auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "auto"
    )
    """Importance weights where the sampler's log-probs differ from the trainer's by more than rounding; auto:
    token_truncate for a vLLM server or with staleness, none for the engine."""
    sampler_correction_cap: Annotated[float, Field(gt=1)] = 3.0
    """Largest importance weight; beyond it a token, or answer, is held at it or left out."""
    vllm_mode: Literal["server", "colocate"] = "server"
    """A server beside the trainer, or vLLM in the trainer's own process, which must then have it installed."""
    vllm_sleep: bool | None = None
    """vLLM gives its memory back while the trainer trains (takes a GPU); by default in mode colocate on a GPU."""
    vllm_url: str | None = None
    """A server that runs already; by default one is started for the run and ended with it."""
    vllm_python: str | None = None
    """Python of the environment that has vLLM, for the server that is started; `python` by default."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
    vllm_sync: Literal["auto", "weights", "adapter"] = "auto"
    """What is handed to the server after a step: all weights, or the LoRA adapter alone where that can be."""
    vllm_tolerance: float | None = Field(default=None, gt=0)
    """Most that the server's log-probs may differ from the trainer's after weights were handed over, in nats."""
    vllm_start_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Most seconds until a server that is started can answer."""
    vllm_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Most seconds that one request may take."""
    vllm_restarts: int = Field(default=1, ge=0)
    """How often in a run a server that died is started again."""

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.sampler == "engine":
            ours = {k: f.default for k, f in VllmSettings.model_fields.items() if k.startswith("vllm_")}
            idle = [k for k, default in ours.items() if getattr(self, k) != default]
            if idle:
                raise ValueError(
                    "; ".join(f"{k} is set, but the sampler is the engine; set sampler: vllm" for k in idle)
                )
        if self.vllm_mode == "colocate":
            served = [k for k in ("vllm_url", "vllm_python") if getattr(self, k) is not None]
            if served:
                raise ValueError(f"{', '.join(served)} is for a server, and vllm_mode is colocate; leave it out")
            if self.staleness:
                raise ValueError(
                    "staleness needs something that draws while the trainer works, and vllm_mode is colocate; use "
                    "vllm_mode: server, or staleness: 0"
                )
        if self.vllm_sleep and self.staleness:
            raise ValueError("vllm_sleep and staleness exclude each other: what draws meanwhile cannot sleep")
        return self


def tracker_names(given: Any) -> tuple[str, ...]:
    """Names of trackers from one name or several, as Hugging Face takes them: "none" is none, "all" those installed.

    Raises:
        ValueError: there is no such tracker; the message names the nearest.
    """
    names = tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)
    if "none" in names and len(names) > 1:
        raise ValueError(f"report_to is {', '.join(map(str, names))}; none stands alone")
    for name in names:
        if name not in (*TRACKERS, "all", "none"):
            near = difflib.get_close_matches(str(name), TRACKERS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"there is no tracker {name!r}; the nearest is {near!r}. Accepted are {', '.join(TRACKERS)}, all (those "
                "installed) and none"
            )
    return () if "none" in names else names


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must hold settings, one `key: value` a line")
    return {str(key): value for key, value in values.items()}


def read_recipe(path: Path, known: Collection[str], fast: bool | None = None) -> dict[str, Any]:
    """The settings of a recipe, which may hold a quicker variant of itself: a block `fast_settings` of settings that
    take the place of those beside it where `fast` is true, in the recipe or as the argument, which goes first.

    known: the settings there are. Neither of the two keys is in what is returned.

    Raises:
        ConfigError: the two are not of that kind; a key in the block is unknown, used or not; there is no block to use.
    """
    values = read_yaml(path)
    chosen, block = values.pop("fast", False), values.pop("fast_settings", None)
    if not isinstance(chosen, bool):
        raise ConfigError(f"{path}: fast is {chosen!r}; it is true or false, and its settings stand in fast_settings")
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f"{path}: fast_settings is {block!r}; it must hold settings, one `key: value` a line")
    unknown = [explain_unknown(str(key), known) for key in block or () if key not in known]
    if unknown:
        raise ConfigError(f"{path}: in fast_settings: {'; '.join(unknown)}")
    if not (chosen if fast is None else fast):
        return values
    if block is None:
        raise ConfigError(f"{path} has no fast_settings, so there is no fast variant of it")
    return values | {str(key): value for key, value in block.items()}


def explain_unknown(key: str, known: Iterable[str]) -> str:
    if key in RENAMED:
        return f"unknown setting {key!r}; here it is {RENAMED[key]}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; `--help` lists them all")


def _explain(error: Any) -> str:
    loc = error["loc"]  # after the key itself come the keys within a nested model, or the member of a union
    nested = loc[:1] == ("new_model",)
    key = ".".join(str(part) for part in (loc if nested else loc[:1]))
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{key} is {error['input']!r}: {message}" if key else message
