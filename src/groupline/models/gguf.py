"""A GGUF file -> a folder in Hugging Face format. Needs the extra `gguf`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.models.load import save_model


def import_gguf(file: Path, folder: Path) -> Path:
    """Dequantise `file` to fp32 with transformers' reader and save model and tokenizer in `folder`."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("reading GGUF needs the gguf package: pip install 'groupline[gguf]'") from error
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    with file.open("rb") as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    source, name = str(file.parent), file.name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # What was read is marked as quantised, which forbids saving it, though its tensors are plain by now.
    if getattr(read.config, "quantization_config", None) is not None:
        del read.config.quantization_config
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    save_model(model, tokenizer, folder)
    return folder
