"""An adapter's folder and its base -> one model's folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from groupline.models.load import check_weights, load_tokenizer, resolve_model, save_model


def merge_adapter(adapter: Path, out: Path, trust_remote_code: bool = False) -> Path:
    """Merge a PEFT adapter into its base and save the result in `out`; returns `out`.

    Sums are in fp32; each weight is then cast back to the format it has in the base, so what the adapter does not touch
    stays bit for bit. Raises FileNotFoundError if `adapter` holds no adapter, FileExistsError if `out` holds anything.
    """
    settings_file = adapter / "adapter_config.json"
    if not settings_file.is_file():
        raise FileNotFoundError(f"{adapter} holds no adapter (adapter_config.json), so there is nothing to merge")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} already holds something; give another folder for the merged model")
    name = json.loads(settings_file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{settings_file} names no base_model_name_or_path; write the base's folder or hub id there")
    source = resolve_model(name)
    for folder in (Path(source), adapter):
        if folder.is_dir():
            check_weights(folder)
    base: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", trust_remote_code=trust_remote_code, use_safetensors=True
    )
    merged = merge(base, adapter)
    tokenizer = load_tokenizer(str(adapter), trust_remote_code)
    save_model(merged, tokenizer, out, card=_card(adapter, name))
    return out


def merge(base: nn.Module, adapter: Path) -> nn.Module:
    """The adapter's sum with `base`, whose weights it takes over: computed in fp32, in the base's formats."""
    formats = {name: p.dtype for name, p in base.named_parameters()}
    with warnings.catch_warnings():  # peft asks for an attribute that transformers is renaming
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = PeftModel.from_pretrained(base.float(), str(adapter))
    merged: Any = adapted.merge_and_unload(safe_merge=True)  # safe: refuses a sum that is not finite
    for name, p in merged.named_parameters():
        p.data = p.data.to(formats.get(name, p.dtype))
    kinds = set(formats.values())
    if len(kinds) == 1:
        merged.config.dtype = kinds.pop()  # what `dtype="auto"` will load it as
    return merged.eval()  # type: ignore[no-any-return]


def _card(adapter: Path, base: str) -> str:
    told = f"The adapter `{adapter.name}` merged into its base `{base}`: summed in fp32, in the base's number format."
    own = adapter / "README.md"
    if not own.is_file():
        return f"---\nbase_model: {json.dumps(base)}\nlibrary_name: transformers\n---\n\n{told}\n"
    text = own.read_text(encoding="utf-8").replace("library_name: peft", "library_name: transformers", 1)
    return text.partition("\n## Loading\n")[0].rstrip() + f"\n\n## Merged\n\n{told}\n"
