"""`groupline merge`: the sum of base and adapter, in fp32, cast back, as a folder that loads anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupline.cli import main
from groupline.models.load import save_model
from groupline.models.lora import add_lora
from groupline.models.merge import merge_adapter

TARGETS = ("q_proj", "down_proj")


def folders(folder: Path, dtype: torch.dtype = torch.float32, kind: str = "qwen3") -> tuple[Path, Path]:
    """(base, an adapter on it that says something)."""
    save_model(tiny_model(kind, dtype=dtype), tiny_tokenizer(), folder / "base")
    torch.manual_seed(7)
    policy = add_lora(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), 3, 5, targets=TARGETS)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    save_model(
        policy,
        tiny_tokenizer(),
        folder / "adapter",
        card="---\nlibrary_name: peft\n---\n\nOwn words.\n\n## Loading\nx\n",
    )
    return folder / "base", folder / "adapter"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(3, 15)[None]).logits
    return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_logits_are_those_of_base_and_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders(tmp_path)
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 0
    assert f"saved in {tmp_path / 'out'}" in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    both = logits(PeftModel.from_pretrained(plain, str(adapter)))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(merged, both, rtol=0, atol=2e-5)
    assert (both - before).abs().max() > 0.05  # the adapter does say something
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer().chat_template
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card
    assert "Own words." in card
    assert "## Loading" not in card
    assert f"merged into its base `{base}`" in card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_fp32_and_cast_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """W + (alpha / r) B A, by hand in fp64, from the files alone; what has no adapter stays bit for bit."""
    base, adapter = folders(tmp_path, dtype)
    merge_adapter(adapter, tmp_path / "out")
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    low = load_file(adapter / "adapter_model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert old.keys() == new.keys()
    changed = 0
    for name, weight in old.items():
        assert new[name].dtype == dtype
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in low:
            assert torch.equal(new[name], weight)
            continue
        up, down = (low[f"{stem}.lora_{x}.weight"].double() for x in "BA")
        expected = weight.double() + 5 / 3 * up @ down
        torch.testing.assert_close(
            new[name].double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1e-6
        )
        changed += 1
    assert changed == 4


def test_what_cannot_be_merged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders(tmp_path)

    def refused(*args: Any) -> str:
        assert main(["merge", *map(str, args)]) == 2
        return capsys.readouterr().err

    assert "holds no adapter (adapter_config.json)" in refused(base, tmp_path / "out")
    assert "already holds something; give another folder" in refused(adapter, base)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": ""}))
    assert "names no base_model_name_or_path" in refused(adapter, tmp_path / "out")
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "./nowhere"}))
    assert "model ./nowhere is not a folder" in refused(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
