"""Weights and tokenizer in, from a Hugging Face folder, a hub id or the built-in model; Hugging Face format out."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.runlog import fsync

BUILTIN = "builtin"
VALUE_HEAD = "value_head.safetensors"  # stands in the folder of a value model alone


@dataclass(frozen=True)
class Precision:
    """Number formats of a run and the reason for them. Trainable weights and optimiser state stay fp32."""

    device: torch.device
    compute: torch.dtype
    scale_gradients: bool
    why: str

    @property
    def sampling(self) -> torch.dtype | None:
        """Type of the sampler's own copy of the weights; None: it shares the fp32 ones."""
        return None if self.compute == torch.float32 else self.compute

    def __str__(self) -> str:
        scaled = " with gradient scaling" if self.scale_gradients else ""
        format_ = str(self.compute).removeprefix("torch.")
        kernel = ", attention by SDPA" if self.device.type == "cuda" else ""
        return f"{self.device}, {format_}{scaled}{kernel} ({self.why})"


def choose_precision(device: str = "auto", compute: str = "auto") -> Precision:
    """Choose from the device itself: `torch.cuda.is_bf16_supported()` also says yes where bf16 is only emulated."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it must be cpu, cuda, cuda:1 or auto") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds no CUDA device here; use cpu, or auto")
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if compute != "auto":
        if compute not in dtypes:
            raise ValueError(f"precision is {compute!r}; it must be one of auto, {', '.join(dtypes)}")
        return Precision(where, dtypes[compute], compute == "fp16", "as asked")
    if where.type != "cuda":
        return Precision(where, torch.float32, False, f"a {where.type} device: half precision is emulated and slower")
    major, minor = torch.cuda.get_device_capability(where)
    if major >= 8:
        return Precision(where, torch.bfloat16, False, f"compute capability {major}.{minor} has bf16 units")
    if major == 7:
        why = (
            f"compute capability {major}.{minor} has fp16 units and no bf16 units: torch.cuda.is_bf16_supported() says "
            "yes here, but counts emulation; FlashAttention 2 needs 8.0"
        )
        return Precision(where, torch.float16, True, why)
    return Precision(where, torch.float32, False, f"compute capability {major}.{minor} has no fast half precision")


def resolve_model(name: str) -> str:
    """Folder of the built-in model for "builtin"; other names unchanged. Tells folders apart from hub ids."""
    if name == BUILTIN:
        return str(Path(__file__).parent / "builtin")
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise FileNotFoundError(f"model folder {name} has no config.json; it holds {found}")
    elif path.exists() or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"model {name} is not a folder in Hugging Face format (config.json and safetensors)")
    return name


def load_model(name: str, device: torch.device | str = "cpu", trust_remote_code: bool = False) -> nn.Module:
    """A causal LM in fp32 from a folder, a hub id or "builtin". Weights must be safetensors: pickles run code.

    A folder that holds a PEFT adapter gives its base model with the adapter on it, trainable.
    """
    source = resolve_model(name)
    if Path(source).is_dir():
        check_weights(Path(source))
    settings = adapter_settings(Path(source))
    if settings is not None:
        base = load_model(settings["base_model_name_or_path"], device, trust_remote_code)
        with warnings.catch_warnings():  # peft asks for an attribute that transformers is renaming
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted: nn.Module = PeftModel.from_pretrained(base, source, is_trainable=True).to(device)
        return adapted
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} did not load as a PyTorch model")
    return model.to(device)


def adapter_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the PEFT adapter that a model folder holds; None if it holds none."""
    file = folder / "adapter_config.json"
    found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return found


def check_weights(folder: Path, value: bool = False) -> None:
    """Raises ValueError for a torn safetensors file or a pickle in its place, FileNotFoundError for no weights.

    value: whether it may be a value model's, which has no head for tokens or scores; otherwise ValueError for that too.
    """
    if not value and (folder / VALUE_HEAD).exists():
        raise ValueError(
            f"{folder} holds a value model of PPO: it has no head for tokens or scores; PPO's setting value_model takes "
            "it, and load_value_model loads it"
        )
    weights = sorted(folder.glob("*.safetensors"))
    for file in weights:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole safetensors file ({error}): its copy or save was cut short; save or copy it again"
            ) from None
    if weights:
        return
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if pickles:
        raise ValueError(
            f"model folder {folder} holds {pickles[0]}, a pickle, which can run code when loaded; "
            "save the model with save_pretrained (safetensors) and load that"
        )
    raise FileNotFoundError(f"model folder {folder} has no *.safetensors weights")


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a model. Errors name the folder and the remedy."""
    source = resolve_model(name)
    path = Path(source)
    if path.is_dir() and not any((path / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError(
            f"model folder {name} has no tokenizer (tokenizer.json); copy the base model's tokenizer files into it, "
            "or name one with the `tokenizer` setting"
        )
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def end_ids(model: Any, tokenizer: Any = None) -> frozenset[int]:
    """Every id that ends an answer: all of the generation config's and the tokenizer's end-of-sequence ids."""
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is not None:
            ids.update(int(i) for i in (value if isinstance(value, (list, tuple)) else [value]))
    return frozenset(ids)


def save_model(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    card: str | None = None,
    max_shard_size: str = "5GB",
    also: Callable[[Path], None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write model (or adapter) and tokenizer in Hugging Face format: all files first, then renamed into place.

    card: text of README.md. max_shard_size: a model that is larger is written as several safetensors files and an index.
    also: writes further files into the folder that it is given. weights: in place of the model's own, under its names.
    A kill leaves either the earlier folder or the new one whole, the earlier one at worst under the name
    `.<name>-<random>-old`; what such a kill left behind is removed by the next save.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        if folder.exists() or not leftover.name.endswith("-old"):
            shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    os.chmod(temporary, 0o755)
    own = {} if weights is None else {"state_dict": dict(weights)}
    if isinstance(model, PeftModel):
        model.save_pretrained(str(temporary), **own)
    else:
        _make_savable(model)
        model.save_pretrained(temporary, max_shard_size=max_shard_size, **own)  # type: ignore[operator]
    tokenizer.save_pretrained(temporary)
    if also is not None:
        also(temporary)
    if card is not None:
        (temporary / "README.md").write_text(card, encoding="utf-8")
    for file in temporary.iterdir():
        os.chmod(file, 0o644)  # safetensors writes files that only their owner may read
        fsync(file)
    fsync(temporary)
    if folder.exists():
        old = temporary.with_name(f"{temporary.name}-old")
        os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old)
    else:
        os.replace(temporary, folder)
    fsync(folder.parent)


def _make_savable(model: Any) -> None:
    """transformers reads a generation config with a temperature and without `do_sample`, and refuses to save it: a run
    would end in that error. Saying that it samples is the remedy which transformers names.
    """
    own = getattr(model, "generation_config", None)
    if own is None or own.do_sample:
        return
    try:
        own.validate(strict=True)
    except ValueError:
        own.do_sample = True
