"""A real vLLM server on the CPU, with the built-in model: `make test-vllm`. Left out of `make test`.

GROUPLINE_VLLM_PYTHON names the Python of an environment that has vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from groupline.config import Config
from groupline.models.load import load_model, load_tokenizer, save_model
from groupline.records import Completion, SamplingParams
from groupline.sampling import SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.sampling.vllm_answers import StaleAnswer
from groupline.sampling.vllm_options import VllmOptions
from groupline.training.grpo import train

pytestmark = pytest.mark.vllm
CLOSE = 1e-4  # nats, fp32
ARGS = ("--max-model-len", "512")
PROMPTS = [[5, 6, 7, 8], [40, 41, 42], [100, 7, 9, 11, 13]]


def python() -> str:
    return os.environ["GROUPLINE_VLLM_PYTHON"]


def own_logprobs(model: Any, c: Completion, temperature: float = 1.0) -> list[float]:
    """By an ordinary forward pass of transformers."""
    ids = torch.tensor([[*c.prompt_ids, *c.ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(c.prompt_ids) - 1 : -1].double()
    logp = torch.log_softmax(logits / temperature, -1)
    return [float(row[i]) for row, i in zip(logp, c.ids, strict=True)]


def shake(model: nn.Module, by: float) -> None:
    """Changes every weight by a share of its own size."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + by * torch.randn_like(p))


class Real:
    """One server for all tests of this file that need none of their own, started by the sampler itself."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.model: Any = load_model("builtin").eval()
        self.tokenizer = load_tokenizer("builtin")
        options = VllmOptions(
            python=python(), folder=folder, arguments=ARGS, cache_gib=0.25, max_rows=64, tolerance=CLOSE, timeout=300.0
        )
        self.sampler = VllmSampler(self.model, self.tokenizer, options, self.said.append)
        self.version = 0

    def publish(self) -> None:
        self.version += 1
        self.sampler.load_weights(self.model, self.version)

    def right(self, found: list[list[Completion]], temperature: float = 1.0) -> None:
        """Every answer bears the newest version, and the trainer's own log-probs."""
        for c in (c for answers in found for c in answers):
            assert c.policy_version == self.version
            assert c.logprobs == pytest.approx(own_logprobs(self.model, c, temperature), abs=CLOSE)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    made = Real(tmp_path_factory.mktemp("vllm"))
    try:
        made.sampler.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=1))  # starts it
        yield made
    finally:
        made.sampler.close()


def test_it_starts_and_agrees_with_the_trainer(real: Real) -> None:
    found = real.sampler.generate(PROMPTS, 8, SamplingParams(max_new_tokens=24), seed=1)
    assert [len(answers) for answers in found] == [8, 8, 8]
    real.right(found)
    assert "equal the trainer's within" in real.said[0]
    assert real.sampler.gap is not None
    assert real.sampler.gap < CLOSE


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, max_new_tokens=16),
        SamplingParams(temperature=1.3, max_new_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.0, max_new_tokens=16),
    ],
)
def test_temperature_and_the_plain_models_log_probs(real: Real, params: SamplingParams) -> None:
    found = real.sampler.generate(PROMPTS, 2, params, seed=2)
    for c in (c for answers in found for c in answers):
        assert c.plain_logprobs == pytest.approx(own_logprobs(real.model, c), abs=CLOSE)
        sampled = own_logprobs(real.model, c, params.temperature) if params.temperature else [0.0] * len(c.ids)
        assert c.logprobs == pytest.approx(sampled, abs=CLOSE)
        if params.ignore_eos:
            assert len(c.ids) == 16
        if not params.temperature:
            logits = real.model(input_ids=torch.tensor([[*c.prompt_ids, *c.ids]])).logits[0, len(c.prompt_ids) - 1 : -1]
            assert list(c.ids) == logits.argmax(-1).tolist()


def test_filters_leave_their_tokens_out_and_the_rest_sums_to_one(real: Real) -> None:
    """One token each of 64 answers under top_k 3: its log-prob is that of the three most probable, renormalised."""
    [answers] = real.sampler.generate(PROMPTS[:1], 64, SamplingParams(top_k=3, max_new_tokens=1), seed=4)
    logits = real.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].detach()
    top = logits.topk(3)
    expected = dict(zip(top.indices.tolist(), torch.log_softmax(top.values, -1).tolist(), strict=True))
    for c in answers:
        assert c.logprobs[0] == pytest.approx(expected[c.ids[0]], abs=CLOSE)


def test_answers_end_where_the_engines_would(real: Real) -> None:
    """At the first end-of-sequence token or the token that completes a stop string, and the ids include it."""
    params = SamplingParams(max_new_tokens=40, stop=("1", "23", "\n"))
    found = real.sampler.generate(PROMPTS, 16, params, seed=3)
    real.right(found)
    kinds = set()
    for c in (c for answers in found for c in answers):
        texts = [real.tokenizer.decode(list(c.ids[:k])) for k in range(len(c.ids) + 1)]
        assert not any(s in text for s in params.stop for text in texts[:-1])
        assert not any(i in real.sampler.eos_ids for i in c.ids[:-1])
        if c.ids[-1] in real.sampler.eos_ids:
            assert (c.finish_reason, c.stop_string) == ("stop", None)
            kinds.add("eos")
        elif c.stop_string is not None:
            assert c.stop_string in texts[-1]
            kinds.add("string")
        else:
            assert (c.finish_reason, len(c.ids)) == ("length", 40)
    assert kinds >= {"string"}


def test_the_same_seed_gives_the_same_answers(real: Real) -> None:
    params = SamplingParams(max_new_tokens=12)
    one = real.sampler.generate(PROMPTS, 4, params, seed=9, keys=["a", "b", "c"])
    two = real.sampler.generate(PROMPTS[::-1], 4, params, seed=9, keys=["c", "b", "a"])[::-1]
    assert [[c.ids for c in own] for own in one] == [[c.ids for c in own] for own in two]


def test_weights_really_change_there(real: Real) -> None:
    """The log-probs of one and the same answer, before and after; a long prompt's cached keys are not used again."""
    long = [(13 * i) % 1500 + 3 for i in range(300)]  # more than a block of the prefix cache
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    [[before]] = real.sampler.generate([long], 1, greedy)
    assert before.plain_logprobs == pytest.approx(own_logprobs(real.model, before), abs=CLOSE)
    for by in (0.02, 0.0, 0.1):  # changed, handed over again unchanged, changed
        shake(real.model, by)
        real.publish()
        [[after]] = real.sampler.generate([long], 1, greedy)
        assert after.plain_logprobs == pytest.approx(own_logprobs(real.model, after), abs=CLOSE)
        real.right(real.sampler.generate(PROMPTS, 4, SamplingParams(max_new_tokens=16)))
    assert after.policy_version == 3
    gaps = [abs(a - b) for a, b in zip(before.plain_logprobs, own_logprobs(real.model, before), strict=True)]
    assert max(gaps) > 0.01


def test_a_version_that_is_not_the_policys_is_refused(real: Real) -> None:
    client = real.sampler._client
    assert client is not None
    client.label("17")  # as if another trainer had been here
    with pytest.raises(StaleAnswer, match=rf"drawn by weights of version '17'; asked was '{real.version}'"):
        real.sampler.generate(PROMPTS, 2, SamplingParams(max_new_tokens=4))
    client.label(str(real.version))
    real.right(real.sampler.generate(PROMPTS, 2, SamplingParams(max_new_tokens=4)))


def test_weights_that_do_not_arrive_are_noticed(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server loads an old folder under the new version's label: only its log-probs can tell."""
    save_model(real.model, real.tokenizer, tmp_path / "old")
    client = real.sampler._client
    assert client is not None
    update = client.update
    monkeypatch.setattr(
        client, "update", lambda info, version, begin: update({"folder": str(tmp_path / "old")}, version, begin)
    )
    shake(real.model, 0.05)
    with pytest.raises(SamplerError, match="the log-prob of a token it drew"):
        real.publish()
    monkeypatch.undo()
    real.right(real.sampler.generate(PROMPTS, 2, SamplingParams(max_new_tokens=4)))


def test_a_folder_without_some_weights_is_refused(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    save_model(real.model, real.tokenizer, tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, file)
    client = real.sampler._client
    assert client is not None
    update = client.update
    monkeypatch.setattr(
        client, "update", lambda info, version, begin: update({"folder": str(tmp_path / "part")}, version, begin)
    )
    with pytest.raises(SamplerError, match=r"lacks [12] weights of the model: model.*norm"):
        real.publish()
    monkeypatch.undo()
    real.publish()
    real.right(real.sampler.generate(PROMPTS, 2, SamplingParams(max_new_tokens=4)))


def test_a_server_killed_in_a_rollout(real: Real) -> None:
    """It is started again with the newest weights; answers that had come are kept, the others are drawn."""
    process = real.sampler.server.process
    assert process is not None
    complete: list[int] = []

    def kill() -> None:
        while len(complete) < 2:
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    prompts = [[5 + i, 6, 7] for i in range(60)]
    lengths = SamplingParams(max_new_tokens=100)
    found = real.sampler.generate(prompts, 8, lengths, seed=5, on_group=lambda prompt, own: complete.append(prompt))
    assert [list(own[0].prompt_ids) for own in found] == prompts
    assert sorted(complete) == list(range(60))
    assert any("starting it again" in line for line in real.said)
    assert real.sampler.server.process is not process
    real.right(found)


def settings(folder: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "sampler": "vllm", "vllm_python": python(), "vllm_args": ARGS, "vllm_tolerance": CLOSE, "cache_gib": 0.25,
        "max_rows": 64, "output_dir": str(folder), "steps": 3, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 48, "eval_problems": 4, "eval_samples": 2, "beta": 0.0,
    }  # fmt: skip
    return Config(**given | changes)


@pytest.mark.parametrize("lora", [{"learning_rate": 1e-4}, {"lora_r": 8, "learning_rate": 1e-3}], ids=["full", "lora"])
def test_a_run_on_the_built_in_model(tmp_path: Path, lora: dict[str, Any]) -> None:
    said: list[str] = []
    results = train(settings(tmp_path / "run", **lora), said.append)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < CLOSE
        assert row["sampling/corrected_share"] == 0
    assert any("rounding, nothing is corrected" in line for line in said)
    drawn = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    assert [row["policy_version"] for row in drawn] == [0] * 16 + [1] * 16 + [2] * 16
    assert results["held_out"]["after"]["policy_version"] == 3
    log = (tmp_path / "run" / "vllm" / "server.log").read_text("utf-8")
    assert ("--enable-lora" in log) == ("lora_r" in lora)
    assert sum(row["grad_norm"] > 0 for row in rows) > 0


def test_a_run_drawn_ahead(tmp_path: Path) -> None:
    """Staleness 1: each step is drawn by the weights before the newest, in a thread."""
    asked = settings(tmp_path / "run", staleness=1, learning_rate=1e-4, eval_every=1)
    train(asked, lambda line: None)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    drawn = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()]
    assert [row["policy_version"] for row in drawn] == [0] * 16 + [0] * 16 + [1] * 16
    assert [row["sampling/staleness/max"] for row in rows] == [0, 1, 1]
    assert rows[0]["sampling/sampling_logp_difference/max"] < CLOSE < rows[1]["sampling/sampling_logp_difference/max"]
    assert 0 < rows[1]["sampling/effective_sample_share"] <= 1
