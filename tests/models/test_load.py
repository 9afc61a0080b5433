"""Number formats chosen from the device, and models in and out of folders."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tiny import plain_logprobs, tiny_lora, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from groupline.models import load
from groupline.models.load import choose_precision, load_model, load_tokenizer, resolve_model, save_model
from groupline.models.lora import is_peft

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU of this compute capability. Asking torch for bf16 support is a mistake: it emulates."""

    def wrong(*_):
        raise AssertionError("is_bf16_supported says yes where bf16 is only emulated")

    def install(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", wrong)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return install


@pytest.mark.parametrize(
    ("capability", "compute", "scaled"),
    [
        ((7, 5), FP16, True),  # T4
        ((7, 0), FP16, True),  # V100
        ((8, 0), BF16, False),  # A100
        ((8, 9), BF16, False),
        ((9, 0), BF16, False),
        ((12, 0), BF16, False),
        ((6, 1), FP32, False),  # fp16 at 1/64 of the fp32 rate
        ((6, 0), FP32, False),
        ((5, 2), FP32, False),
    ],
)
def test_precision_follows_the_compute_capability(gpu, capability, compute, scaled):
    gpu(capability)
    for device in ("auto", "cuda"):
        precision = choose_precision(device)
        assert (precision.device.type, precision.compute, precision.scale_gradients) == ("cuda", compute, scaled)
        assert "compute capability {}.{}".format(*capability) in str(precision)  # the reason is said


def test_a_t4_gets_fp16_with_scaling_and_sdpa_and_the_plan_says_why(gpu):
    gpu((7, 5))
    assert str(choose_precision()) == (
        "cuda, float16 with gradient scaling, attention by SDPA (compute capability 7.5 has fp16 units and no bf16 units: "
        "torch.cuda.is_bf16_supported() says yes here, but counts emulation; FlashAttention 2 needs 8.0)"
    )
    assert choose_precision().sampling == FP16
    assert "is_bf16_supported" not in str(choose_precision("cuda", "fp32"))  # as asked needs no reason


def test_models_are_loaded_with_sdpa(folder):
    assert load_model(str(folder)).config._attn_implementation == "sdpa"


def test_a_cpu_computes_in_fp32_even_beside_a_gpu(gpu):
    assert choose_precision("cpu").compute == FP32
    gpu((9, 0))
    precision = choose_precision("cpu")
    assert (precision.device.type, precision.compute, precision.scale_gradients) == ("cpu", FP32, False)
    assert str(precision) == "cpu, float32 (a cpu device: half precision is emulated and slower)"


def test_no_gpu_means_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_precision().device.type == "cpu"
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no CUDA device"):
        choose_precision("cuda")


def test_a_precision_that_is_asked_for_is_used(gpu):
    gpu((7, 5))
    for name, dtype, scaled in (("fp32", FP32, False), ("fp16", FP16, True), ("bf16", BF16, False)):
        precision = choose_precision("auto", name)
        assert (precision.compute, precision.scale_gradients, precision.why) == (dtype, scaled, "as asked")
    with pytest.raises(ValueError, match="precision is 'fp8'; it must be one of auto, fp32, fp16, bf16"):
        choose_precision("cpu", "fp8")
    with pytest.raises(ValueError, match="device is 'gpu'; it must be"):
        choose_precision("gpu")


# Folders


def score(model):
    with torch.no_grad():
        return plain_logprobs(model, [1, 2, 3], [4, 5, 6, 7])


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    save_model(tiny_model("qwen3"), tiny_tokenizer(), path)
    return path


def test_a_model_goes_out_and_comes_back(folder):
    model = load_model(str(folder))
    assert torch.equal(score(model), score(tiny_model("qwen3")))
    tokenizer = load_tokenizer(str(folder))
    text = "the answer is 12\n\n"
    assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert list(folder.parent.iterdir()) == [folder]  # no temporary folder is left


def test_weights_in_half_precision_are_loaded_in_fp32(tmp_path):
    save_model(tiny_model("llama", dtype=BF16), tiny_tokenizer(), tmp_path / "half")
    model = load_model(str(tmp_path / "half"))
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert torch.equal(model.lm_head.weight, tiny_model("llama").lm_head.weight.bfloat16().float())


def test_saving_replaces_what_was_there(folder):
    (folder / "stale").mkdir()
    (folder / "stale" / "file").write_text("old")
    save_model(tiny_model("qwen3", seed=5), tiny_tokenizer(), folder)
    assert torch.equal(score(load_model(str(folder))), score(tiny_model("qwen3", seed=5)))
    assert not (folder / "stale").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_an_adapter_folder_gives_base_and_adapter_trainable(tmp_path):
    save_model(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    policy = tiny_lora("llama")
    policy.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    save_model(policy, tiny_tokenizer(), tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter")).eval()
    assert is_peft(loaded)
    torch.testing.assert_close(score(loaded), score(policy), rtol=0, atol=1e-5)
    trained = {n for n, p in loaded.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in policy.named_parameters() if p.requires_grad}
    assert load_tokenizer(str(tmp_path / "adapter"))("the")["input_ids"] == tiny_tokenizer()("the")["input_ids"]


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_saved_folder_loads_unchanged_elsewhere(tmp_path, size):
    """In transformers alone, whole or sharded: weights, tokenizer, chat template, generation config."""
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], max_new_tokens=9)
    save_model(model, tokenizer, tmp_path / "model", card="# A card\n", max_shard_size=size)
    files = {p.name for p in (tmp_path / "model").iterdir()}
    shards = sorted(f for f in files if f.endswith(".safetensors"))
    assert (len(shards) > 2 and "model.safetensors.index.json" in files) == (size == "20KB")
    assert files >= {"README.md", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert not [f for f in files if f.endswith((".bin", ".pt"))]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(score(again.eval()), score(model))
    assert (again.generation_config.eos_token_id, again.generation_config.max_new_tokens) == ([2, 7], 9)
    chat = [{"role": "user", "content": "12 + 3"}]
    texts = [
        t.apply_chat_template(chat, tokenize=False)
        for t in (AutoTokenizer.from_pretrained(tmp_path / "model"), tokenizer)
    ]
    assert texts[0] == texts[1]
    assert torch.equal(score(load_model(str(tmp_path / "model"))), score(model))


def test_a_name_that_is_no_folder_is_a_hub_id():
    assert resolve_model("someone/model") == "someone/model"
    assert Path(resolve_model("builtin")).name == "builtin"


@pytest.mark.parametrize("read", [load_model, load_tokenizer])
def test_a_path_that_is_not_there_is_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model \./nowhere is not a folder in Hugging Face format"):
        read("./nowhere")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"weights\.bin is not a folder"):
        read(str(file))


def test_a_folder_without_a_config_says_what_it_holds(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json; it holds nothing"):
        load_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"has no config.json; it holds notes.txt"):
        load_model(str(tmp_path))


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors weights"):
        load_model(str(folder))


def test_a_folder_without_a_tokenizer_names_the_remedies(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer .* copy the base model's .* or name one with"):
        load_tokenizer(str(folder))


class Trap:
    """What a hostile pickle does when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_in_place_of_safetensors_is_refused_by_name(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match=rf"holds {name}, a pickle, which can run code .* save_pretrained"):
        load_model(str(folder))
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_beside_or_called_safetensors_is_not_read(folder, tmp_path):
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (folder / "pytorch_model.bin").write_bytes(trap)
    assert torch.equal(score(load_model(str(folder))), score(tiny_model("qwen3")))
    (folder / "model.safetensors").write_bytes(trap)
    with pytest.raises(Exception, match=r"(?i)header"):
        load_model(str(folder))
    assert not (tmp_path / "sprung").exists()


def test_a_hub_id_is_loaded_under_the_same_rules(monkeypatch):
    """There is no folder to look into, so transformers itself is told to take neither pickles nor code."""
    asked = {}

    def from_pretrained(name, **settings):
        asked.update(settings, name=name)
        return tiny_model("llama")

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_model("someone/model")
    assert asked == {"name": "someone/model", "use_safetensors": True, "trust_remote_code": False, "dtype": FP32}


def test_an_adapter_in_a_pickle_is_refused(tmp_path):
    save_model(tiny_model("llama"), tiny_tokenizer(), tmp_path / "base")
    policy = tiny_lora("llama")
    policy.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    save_model(policy, tiny_tokenizer(), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match=r"adapter_model\.bin, a pickle"):
        load_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "sprung").exists()


def test_a_folder_with_code_of_its_own_is_refused_unless_allowed(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "strange.Strange", "AutoModelForCausalLM": "strange.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(str(folder))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_torn_weights_file_is_named(tmp_path, cut):
    folder = tmp_path / "torn"
    shutil.copytree(resolve_model("builtin"), folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-cut])
    with pytest.raises(
        ValueError, match=r"model\.safetensors is not a whole safetensors file .* save or copy it again"
    ):
        load_model(str(folder))
