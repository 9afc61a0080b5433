"""`groupline plan`: parts against sizes counted by hand and against the tensors of real steps."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny import group, optimiser_settings, tiny_model

from groupline.batch import make_batch
from groupline.cli import main
from groupline.config import Config
from groupline.models.live import LiveBytes
from groupline.models.load import Precision, resolve_model
from groupline.models.lora import Mirror, add_lora
from groupline.models.reference import Reference
from groupline.models.shapes import load_shapes, shape_of_model
from groupline.objective import OBJECTIVES
from groupline.records import SamplingParams
from groupline.sampling import Engine
from groupline.training.footprint import footprint, passes_of, reference_kind, static_parts
from groupline.training.optim import Optimiser
from groupline.training.planning import device_of, plan, shapes_of
from groupline.training.step import Scorer, train_step

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from floor import shape_of

FP32 = Precision(torch.device("cpu"), torch.float32, False, "")
BF16 = Precision(torch.device("cuda"), torch.bfloat16, False, "")
# The tiny Llama: 101 x 32 embeddings and as large a head, 2 layers of q 32x32, k and v 16x32, o 32x32, three of 48x32,
# two norms of 32; a last norm; 4 inverse frequencies, kept twice.
PRODUCTS = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 48 * 32)
MATRICES = 2 * 101 * 32 + PRODUCTS
NORMS = 5 * 32
BUFFERS = 2 * 4


def settings(**changes):
    common = {"prompts_per_step": 3, "num_generations": 3, "max_completion_length": 9, "beta": 0.0, "eval_problems": 0}
    return Config(**common | {"micro_batch_tokens": 100} | changes)


def static(policy, precision, kind, prepack=False):
    return static_parts(policy, Mirror(policy, precision.sampling), precision, kind, prepack)


def test_parts_of_a_full_fine_tune_by_hand():
    policy = tiny_model("llama")
    s = static(policy, FP32, "frozen copy", prepack=True)
    weights = 4 * (MATRICES + NORMS)
    assert s.weights == weights + 4 * BUFFERS
    assert s.reference == s.weights
    assert s.gradients == weights
    assert s.optimiser == 2 * weights
    assert (s.sampler, s.joined) == (0, 0)  # the policy's own tensors
    assert s.laid_out == 4 * (PRODUCTS + 101 * 32)
    assert s.update == 2 * 4 * 101 * 32  # two temporaries of the largest weight
    assert static(policy, FP32, None).joined == 4 * PRODUCTS  # no layout of oneDNN's: joined copies
    half = static(policy, BF16, None)
    assert half.sampler == 2 * (MATRICES + NORMS)
    assert (half.reference, half.joined, half.update) == (0, 0, weights)


def test_parts_of_an_adapter_by_hand():
    policy = add_lora(tiny_model("llama"), 4)
    s = static(policy, FP32, "adapter off")
    adapter = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert s.gradients == 4 * adapter
    assert s.optimiser == 8 * adapter
    assert s.weights == 4 * (MATRICES + NORMS + BUFFERS + adapter)
    assert s.reference == 0
    assert s.sampler == 4 * PRODUCTS  # folded
    assert s.joined == 0  # they move into what is joined
    assert static(policy, FP32, "starting adapter").reference == 4 * adapter


@pytest.mark.parametrize(("kind", "beta", "lora"), [("frozen copy", 0.1, 0), ("adapter off", 0.1, 4), (None, 0.0, 4)])
def test_the_reference_is_the_one_that_training_makes(kind, beta, lora):
    policy = add_lora(tiny_model("llama"), lora) if lora else tiny_model("llama")
    assert reference_kind(settings(beta=beta, lora_r=lora), policy, beta) == kind
    if kind:
        assert Reference(policy, bool(lora)).kind == kind


@pytest.mark.parametrize(("lora", "tokens"), [(0, 40), (4, 1000)], ids=["full, several micro-batches", "lora, one"])
def test_a_real_step_takes_what_is_predicted(lora, tokens):
    torch.manual_seed(0)
    policy = tiny_model("llama", hidden_size=64, num_hidden_layers=3, scale=1.0)
    policy = add_lora(policy, lora).eval() if lora else policy
    config = settings(micro_batch_tokens=tokens)
    s = static(policy, FP32, None)
    found = footprint(policy, config, FP32, s, passes_of(policy, config, FP32, 11, True), 11, tokens)
    optimiser = Optimiser(policy, optimiser_settings(), 10)
    scorer = Scorer()

    def step():
        groups = [group(str(g), [7] * 11, [[1 + g] * 9, [2] * 9, [3] * 9], [1, 0, 0.25]) for g in range(3)]
        return make_batch(groups, OBJECTIVES["dr_grpo"], budget=9, micro_batch_tokens=tokens)

    train_step(policy, optimiser, step(), OBJECTIVES["dr_grpo"], scorer)  # the moments are there from now on
    moments = [t for entry in optimiser.adam.state.values() for t in entry.values()]
    assert sum(t.nbytes for t in moments if t.dim()) == s.optimiser
    batch = step()
    assert len(batch.micro_batches) == found.micro_batches
    assert max(len(m.row.input_ids) for m in batch.micro_batches) == found.tokens
    given = [
        getattr(m.row, f) for m in batch.micro_batches for f in ("input_ids", "position_ids", "score_at", "targets")
    ]
    with LiveBytes([*policy.parameters(), *policy.buffers(), *moments, *given]) as live:
        peaks = []
        update = optimiser.step

        def watched():
            peaks.append(live.peak)
            live.restart()
            return update()

        optimiser.step = watched
        train_step(policy, optimiser, batch, OBJECTIVES["dr_grpo"], scorer)
    assert found.training - s.held == pytest.approx(peaks[0], rel=0.15)
    assert found.update == pytest.approx(s.held + live.peak, rel=0.15)  # log-probs of the batch are in it too


def test_keys_and_values_by_hand_and_in_a_real_run():
    policy = tiny_model("llama")
    config = settings(prompts_per_step=2, max_completion_length=40)
    found = footprint(
        policy, config, FP32, static(policy, FP32, None), passes_of(policy, config, FP32, 11, True), 11, 100
    )
    slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert found.rows == 6
    assert found.keys_values == (2 * 11 * 2 + 6 * 64) * slot  # the prompts twice, answers in two pages of 32
    assert found.pool == (2 * 32 + 6 * 64) * slot
    engine = Engine(policy, notify=str)
    largest = 0
    from groupline.sampling.cache import DecodePlan

    def held(plan):
        pairs = [*plan._own.values(), *plan._prompt.values()]
        stores = [*plan.prompts.keys.values(), *plan.prompts.values.values()]
        return sum(t.untyped_storage().nbytes() for t in [*(t for p in pairs for t in p), *stores])

    plain = DecodePlan.step

    def step(self):
        nonlocal largest
        largest = max(largest, held(self))
        return plain(self)

    DecodePlan.step = step
    try:
        engine.generate([[1] * 11, [2] * 11], 3, SamplingParams(max_new_tokens=40, ignore_eos=True))
    finally:
        DecodePlan.step = plain
    assert found.keys_values == pytest.approx(largest, rel=0.15)


def test_fewer_answers_at_once_where_the_cache_is_set():
    policy, config = tiny_model("llama"), settings(prompts_per_step=8, max_completion_length=40)
    parts = static(policy, FP32, None), passes_of(policy, config, FP32, 11, True)
    whole = footprint(policy, config, FP32, *parts, 11, 100)
    half = footprint(policy, config.model_copy(update={"cache_gib": whole.pool / 2 / 2**30}), FP32, *parts, 11, 100)
    assert (whole.rows, half.rows) == (24, 12)
    assert half.pool == pytest.approx(whole.pool / 2)


def test_shapes_need_no_weights(tmp_path):
    shutil.copy(Path(resolve_model("builtin")) / "config.json", tmp_path)
    model = load_shapes(str(tmp_path))
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 984_704
    adapted = shapes_of(settings(model=str(tmp_path), lora_r=8))
    read = json.loads((tmp_path / "config.json").read_text())
    assert shape_of_model(adapted) == shape_of(read, lora=8)
    full = shape_of_model(model)
    assert (full.trunk, full.head, full.adapter) == (shape_of(read, 0).trunk, shape_of(read, 0).head, 0)


def test_a_plan_says_what_the_dry_run_says_and_loads_nothing(tmp_path, capsys, monkeypatch):
    args = ["--steps", "2", "--prompts_per_step", "4", "--eval_problems", "4", "--max_completion_length", "32"]
    out = ["--output_dir", str(tmp_path / "run")]
    assert main(["train", "--dry-run", *args, *out]) == 0
    dry = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("groupline.models.load.check_weights", lambda folder: pytest.fail("weights were read"))
    assert main(["plan", *args, *out, "--rate-tflops", "0.05", "--bandwidth-gb-s", "10"]) == 0
    told = capsys.readouterr().out.splitlines()
    parts = [line for line in told if line.split()[0] in ("weights", "optimiser", "activations", "KV", "head", "peak")]
    assert len(parts) == 6
    assert not [line for line in parts if line not in dry]
    (choice,) = [line for line in told if "micro_batch_tokens:" in line]
    tokens = choice.split("micro_batch_tokens: ")[1].split()[0]
    assert any(f"at most {int(tokens):,} row tokens" in line for line in dry)


def test_what_does_not_fit_is_lowered_or_refused_with_what_would_help(tmp_path, capsys):
    config = settings(model="builtin", prompts_per_step=32, num_generations=8, micro_batch_tokens=None, steps=1)
    given = {"rate": 1e11, "bandwidth": 1e10}

    def made(gib):
        device = device_of(config, memory_gib=gib)
        return plan(config, type(device)(device.precision, device.memory, **given), say=str)

    wide, narrow = made(8.0), made(0.1)
    assert wide.fits
    assert narrow.tokens < wide.tokens
    assert narrow.fits
    assert narrow.footprint.needed <= 0.1 * 2**30
    args = ["--rate-tflops", "1", "--bandwidth-gb-s", "10", "--output_dir", str(tmp_path / "run")]
    assert main(["plan", "--memory-gib", "0.01", "--beta", "0.1", *args]) == 1
    told = capsys.readouterr().out
    assert "does NOT fit" in told
    assert "lora_r" in told
    assert "beta: 0" in told


def test_a_gpu_that_is_not_here_needs_its_memory():
    with pytest.raises(ValueError, match="--memory-gib"):
        device_of(settings(), gpu=True)
    device = device_of(settings(), memory_gib=16, gpu=True)
    assert device.precision.compute == torch.bfloat16


def test_seconds_are_those_of_the_floor():
    config = settings(model="builtin", steps=1, micro_batch_tokens=None)
    device = device_of(config)
    found = plan(config, type(device)(device.precision, device.memory, rate=1e9, bandwidth=1e9), say=str)
    parts = ("prefill", "decode", "train", "optimiser")
    assert found.seconds["total"] == pytest.approx(sum(found.seconds[k] for k in parts))
    assert found.seconds["optimiser"] == pytest.approx(28 * 984_704 / 1e9, rel=0.01)


def test_what_vllm_holds_is_said_to_be_left_out():
    config = settings(model="builtin", steps=1)
    words = [plan(c, device_of(c), say=str).text for c in (config, config.model_copy(update={"sampler": "vllm"}))]
    assert ["vLLM's own weights and cache are not in it" in w for w in words] == [False, True]
