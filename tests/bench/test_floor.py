"""The benchmark's floor against counts made another way, and its workloads against the issue's own numbers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import compare  # noqa: E402
from floor import Load, floor, shape_of  # noqa: E402
from workloads import WORKLOADS, reward_of  # noqa: E402

SMOLLM = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def test_weights_are_those_of_the_model():
    model = tiny_model("llama")
    shape = shape_of(model.config.to_dict(), lora=0)
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}
    layers = sum(size for n, size in matrices.items() if ".layers." in n)
    assert shape.trunk == layers
    assert shape.head == model.config.vocab_size * model.config.hidden_size
    assert shape.trainable == sum(matrices.values())
    assert shape_of(SMOLLM, 16).adapter == 30 * 16 * (
        (576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 2 + (1536 + 576)
    )


def test_a_step_by_hand():
    shape = shape_of(SMOLLM, 16)
    load = Load(prompt=10, prompts=1, lengths=(3, 2), trained_groups=1, reference=True)
    rate, bandwidth = 1e9, 1e18  # bytes cost nothing
    seconds = floor(shape, load, rate, bandwidth)
    pair = 4 * 30 * 9 * 64
    trunk, head = shape.trunk, shape.head
    assert seconds["prefill"] == pytest.approx((2 * trunk * 10 + 2 * head + pair * 50) / rate)
    # Token 1 of both answers is fed, then token 2 of the longer one.
    decode = 2 * (trunk + head) * 3 + pair * (2 * 11 + 12)
    assert seconds["decode"] == pytest.approx(decode / rate)
    tokens, scored = 10 + 2 + 1, 5
    pairs = 50 + (2 * 10 + 2) + (10 + 0.5)
    assert seconds["reference"] == pytest.approx((2 * trunk * tokens + 2 * head * scored + pair * pairs) / rate)
    train = 4 * (trunk * tokens + head * scored) + 6 * shape.adapter * tokens + 3.5 * pair * pairs
    assert seconds["train"] == pytest.approx(train / rate)
    assert seconds["total"] == pytest.approx(sum(v for k, v in seconds.items() if k != "total"))
    idle = floor(shape, Load(10, 1, (3, 2), trained_groups=0, reference=False), rate=1e18, bandwidth=1e9)
    assert idle["train"] == idle["reference"] == 0
    keys = 2 * 30 * 3 * 64 * 4 * ((10 + 2) + (10 + 2))  # bytes read in the two decode steps
    assert idle["decode"] == pytest.approx((2 * 4 * (trunk + head) + keys) / 1e9)


def test_workloads_ask_what_they_should():
    targets = {name: w.target for name, w in WORKLOADS.items()}
    assert targets == {"W1": 2.5, "W2": 8, "W3": 3, "W4": 2, "W5": 5, "W6": 4}
    w6 = WORKLOADS["W6"]
    assert (min(w6.lengths), max(w6.lengths), sum(w6.lengths) / 8) == (16, 256, 64)
    w3 = WORKLOADS["W3"]
    rewards = [reward_of(w3, i) for i in range(w3.answers)]
    groups = torch.tensor(rewards).view(4, 8)
    assert (groups.std(1) == 0).tolist() == [True, True, False, False]
    assert w3.trained_tokens == 2 * 8 * 64
    assert WORKLOADS["W1"].trained_tokens == 4 * 8 * 64


def test_a_comparison_is_written_and_what_did_not_run_stays(tmp_path):
    def result(step, peak):
        row = dict.fromkeys(("generate", "reward", "reference", "forward", "backward", "optimiser"), step / 6)
        row |= {"step": step}
        return {"rows": [row], "peak_gib": peak, "loaded_gib": 1.0, "new_tokens": 2048, "prompt_tokens": 300}

    machine = [{
        "matrix_gflops": 100.0, "blas_gflops": 80.0, "bandwidth_gb_s": 30.0, "cpu": "a CPU", "cores": 2,
        "memory_gib": 8, "threads": 2, "versions": {"torch": "0"},
    }]  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOLLM))
    (tmp_path / "benchmarks.json").write_text(json.dumps({"workloads": {}, "engines": {}, "note": "kept"}))
    (tmp_path / "benchmarks.md").write_text(f"before\n{compare.BEGIN}\nold\n{compare.END}\nafter\n")

    class Args:
        docs, model = tmp_path, str(tmp_path / "model")

    runs = {("W1", "ours"): [result(20.0, 3.0), result(30.0, 2.0)], ("W1", "peer"): [result(70.0, 9.0)]}
    compare.write(Args, machine, runs)
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    entry = found["workloads"]["W1"]
    assert found["note"] == "kept"
    assert entry["speedup"] == 2.8
    assert entry["peak_gib"] == {"ours": 3.0, "peer": 9.0, "share": 0.333}
    assert entry["met"] == {"speedup": True, "peak": True, "floor": entry["floor_ratio"] <= 1.6}
    assert entry["floor_ratio"] == pytest.approx(25 / entry["floor"]["total"], abs=0.01)
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "**2.80x**" in page
    assert "old" not in page
