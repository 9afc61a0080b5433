"""The sampler over a vLLM server, against a fake one that draws from whatever weights really reached it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, fake_vllm
from small import LETTERS, plain_logprobs, twin
from torch import nn

from groupline.models.lora import add_lora
from groupline.records import Completion, SamplingParams
from groupline.sampling import Engine, SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.sampling.vllm_answers import StaleAnswer
from groupline.sampling.vllm_options import VllmOptions

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture
def server(start: Path) -> Iterator[FakeVllm]:
    with fake_vllm(start) as fake:
        yield fake


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def sampler(
    server: FakeVllm, model: nn.Module, tokenizer: Any, tmp_path: Path, said: list[str]
) -> Iterator[VllmSampler]:
    options = VllmOptions(url=server.url, folder=tmp_path / "vllm", timeout=20.0, tolerance=1e-4)
    made = VllmSampler(model, tokenizer, options, said.append)
    yield made
    made.close()


def change(model: nn.Module, by: float = 0.3, part: str = "") -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if part in name:
                p.add_(by * p.abs().mean() * torch.randn_like(p))


def tempered(model: Any, c: Completion) -> list[float]:
    """Log-probs of an answer's tokens at its temperature, by an ordinary pass."""
    logits = model(input_ids=torch.tensor([[*c.prompt_ids, *c.ids]])).logits[0, len(c.prompt_ids) - 1 : -1].detach()
    logp = torch.log_softmax(logits / c.params.temperature, -1)
    return [float(row[i]) for row, i in zip(logp, c.ids, strict=True)]


def test_answers_are_whole_and_their_log_probs_the_models_own(sampler: VllmSampler, model: nn.Module) -> None:
    found = sampler.generate(PROMPTS, 3, PARAMS, seed=1)
    assert [len(answers) for answers in found] == [3, 3, 3]
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for c in answers:
            assert list(c.prompt_ids) == prompt
            assert c.policy_version == 0
            assert c.params == PARAMS
            torch.testing.assert_close(
                torch.tensor(c.logprobs), plain_logprobs(model, prompt, c.ids).detach(), atol=1e-5, rtol=0
            )
            assert c.plain_logprobs == c.logprobs
    assert len({c.ids for answers in found for c in answers}) > 1


def test_one_request_a_prompt_asks_for_all_its_answers(sampler: VllmSampler, server: FakeVllm) -> None:
    sampler.generate(PROMPTS[:1], 1, PARAMS)
    server.asked.clear()
    sampler.generate(PROMPTS, 4, SamplingParams(max_new_tokens=3, top_k=7, top_p=0.9, min_p=0.01, temperature=1.5))
    bodies = [body for path, body in server.asked if body["sampling_params"]["n"] == 4]
    assert sorted(body["token_ids"] for body in bodies) == sorted(PROMPTS)
    for body in bodies:
        asked = body["sampling_params"]
        assert {k: asked[k] for k in ("max_tokens", "top_k", "top_p", "min_p", "temperature")} == {
            "max_tokens": 3, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5,
        }  # fmt: skip
    assert len({body["sampling_params"]["seed"] for body in bodies}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampled_and_plain_log_probs_where_they_differ(
    sampler: VllmSampler, model: nn.Module, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=5)
    [answers] = sampler.generate(PROMPTS[:1], 2, params)
    for c in answers:
        expected = [0.0] * len(c.ids) if temperature == 0 else tempered(model, c)
        assert c.logprobs == pytest.approx(expected, abs=1e-5)
        assert c.plain_logprobs == pytest.approx(plain_logprobs(model, c.prompt_ids, c.ids).tolist(), abs=1e-5)


def test_an_answer_ends_where_the_engines_does(sampler: VllmSampler, model: nn.Module, tokenizer: Any) -> None:
    """The engine, forced by the drawn tokens, would have ended each answer with its last token and no earlier."""
    params = SamplingParams(max_new_tokens=20, stop=LETTERS[:6])
    found = [c for answers in sampler.generate(PROMPTS, 16, params, seed=3) for c in answers]
    eos = Engine(twin(model), tokenizer, notify=lambda line: None).eos_ids
    kinds = set()
    for c in found:
        text = tokenizer.decode(list(c.ids))
        before = tokenizer.decode(list(c.ids[:-1]))
        assert not any(i in eos for i in c.ids[:-1])
        assert not any(s in before for s in params.stop)
        if c.ids[-1] in eos:
            assert (c.finish_reason, c.stop_string) == ("stop", None)
            kinds.add("eos")
        elif c.stop_string is not None:
            assert c.finish_reason == "stop"
            assert c.stop_string in text
            kinds.add("string")
        else:
            assert (c.finish_reason, len(c.ids)) == ("length", 20)
            kinds.add("length")
    assert "string" in kinds


def test_tokens_after_the_end_are_dropped(sampler: VllmSampler, server: FakeVllm) -> None:
    sampler.generate(PROMPTS, 1, PARAMS)
    server.faults.add("longer")
    for answers in sampler.generate(PROMPTS, 4, PARAMS):
        for c in answers:
            assert len(c.ids) <= PARAMS.max_new_tokens
            assert len(c.logprobs) == len(c.ids)


def test_draws_depend_on_seed_and_key_alone(sampler: VllmSampler) -> None:
    once = sampler.generate(PROMPTS, 2, PARAMS, seed=5, keys=["a", "b", "c"])
    again = sampler.generate(PROMPTS[::-1], 2, PARAMS, seed=5, keys=["c", "b", "a"])
    assert [[c.ids for c in a] for a in once] == [[c.ids for c in a] for a in again[::-1]]
    other = sampler.generate(PROMPTS, 2, PARAMS, seed=6, keys=["a", "b", "c"])
    assert [[c.ids for c in a] for a in once] != [[c.ids for c in a] for a in other]


def test_groups_are_handed_over_when_they_are_complete(sampler: VllmSampler) -> None:
    seen: dict[int, list[Completion]] = {}
    found = sampler.generate(PROMPTS, 2, PARAMS, on_group=seen.__setitem__)
    assert seen == dict(enumerate(found))


def test_new_weights_reach_the_server(sampler: VllmSampler, server: FakeVllm, model: nn.Module, tmp_path: Path) -> None:
    [[before]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
    old = plain_logprobs(model, before.prompt_ids, before.ids)
    change(model)
    sampler.load_weights(model, 4)
    [[after]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
    assert after.policy_version == 4
    assert server.version == "4"
    new = plain_logprobs(model, after.prompt_ids, after.ids)
    assert after.logprobs == pytest.approx(new.tolist(), abs=1e-5)
    assert (plain_logprobs(model, before.prompt_ids, before.ids) - old).abs().max() > 0.05
    paths = [p for p in server.paths() if "generate" not in p]
    sync = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/reset_prefix_cache", "/resume"]  # fmt: skip
    assert paths == ["/init_weight_transfer_engine", *sync, *sync]
    assert [p.name for p in (tmp_path / "vllm").iterdir()] == ["weights-4"]  # the one before is gone
    sampler.close()
    assert not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("by_adapter", [False, True])
def test_it_sleeps_between_a_rollout_and_the_next_weights(
    server: FakeVllm, model: nn.Module, tokenizer: Any, start: Path, by_adapter: bool
) -> None:
    """The fake drops its weights at level 2, and refuses whatever needs memory that is given back."""
    policy = add_lora(model, 4).eval() if by_adapter else model
    options = VllmOptions(url=server.url, sleep=True, base=str(start) if by_adapter else None, rank=4, timeout=20.0)
    sampler = VllmSampler(policy, tokenizer, options, lambda line: None)
    before = sampler.generate([[5, 6, 7]], 2, SamplingParams(max_new_tokens=4), seed=1)
    sampler.release()
    sampler.release()
    assert server.asleep == {"weights", "kv_cache"}
    assert sampler.generate([[5, 6, 7]], 2, SamplingParams(max_new_tokens=4), seed=1) == before
    sampler.release()
    change(policy, part="lora_" if by_adapter else "")
    sampler.load_weights(policy, 1)
    assert not server.asleep
    sampler.generate([[5, 6, 7]], 2, SamplingParams(max_new_tokens=4), seed=1)
    slept = [path for path in server.paths() if path.startswith(("/sleep", "/wake_up"))]
    level = 1 if by_adapter else 2
    assert slept == [f"/sleep?level={level}", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"] * 2
    sampler.close()


def test_weights_wait_for_a_server_that_is_not_needed_yet(
    sampler: VllmSampler, server: FakeVllm, model: nn.Module, said: list[str]
) -> None:
    change(model)
    sampler.load_weights(model, 9)
    assert server.asked == []
    [[c]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
    assert c.policy_version == 9
    assert c.logprobs == pytest.approx(plain_logprobs(model, c.prompt_ids, c.ids).tolist(), abs=1e-5)
    assert "equal the trainer's within" in said[0]


def test_the_adapter_alone_is_handed_over(
    server: FakeVllm, model: nn.Module, tokenizer: Any, start: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    policy = add_lora(model, 4).eval()
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2)
    options = VllmOptions(url=server.url, folder=tmp_path / "vllm", base=str(start), rank=4, tolerance=1e-4)
    sampler = VllmSampler(policy, tokenizer, options, lambda line: None)
    for version in (0, 1):
        sampler.load_weights(policy, version)
        [[c]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
        assert c.policy_version == version
        assert c.logprobs == pytest.approx(plain_logprobs(policy, c.prompt_ids, c.ids).tolist(), abs=1e-5)
        change(policy, part="lora_")
    assert sorted(server.engines) == ["", "policy-1"]
    assert "/update_weights" not in server.paths()
    files = {p.name for p in (tmp_path / "vllm" / "adapter-1").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    sampler.close()


def test_a_folded_adapter_is_handed_over_as_whole_weights(
    server: FakeVllm, model: nn.Module, tokenizer: Any, tmp_path: Path
) -> None:
    policy = add_lora(model, 4).eval()
    change(policy)
    options = VllmOptions(url=server.url, folder=tmp_path / "vllm", tolerance=1e-4)
    sampler = VllmSampler(policy, tokenizer, options, lambda line: None)
    [[c]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
    assert c.logprobs == pytest.approx(plain_logprobs(policy, c.prompt_ids, c.ids).tolist(), abs=1e-5)
    sampler.close()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("ignores_weights", r"has version 2, but the log-prob of a token"),
        ("ignores_version", r"says its weights are version '0' after version '2'"),
        ("update_weights", r"/update_weights answered 400: .*no such weight"),
        ("keeps_prompts", r"cached prompts of the old weights remain"),
        ("raw_logprobs", r"without\s+--logprobs-mode processed_logprobs"),
        ("start_weight_update", r"/start_weight_update answered 400"),
    ],
)
def test_a_failed_sync_is_an_error_and_stays_one(
    sampler: VllmSampler, server: FakeVllm, model: nn.Module, fault: str, named: str
) -> None:
    sampler.generate(PROMPTS[:1], 1, PARAMS)
    change(model)
    server.faults.add(fault)
    with pytest.raises(SamplerError, match=named):
        sampler.load_weights(model, 2)
    with pytest.raises(SamplerError, match=named):  # no answer from the old weights either
        sampler.generate(PROMPTS[:1], 1, PARAMS)
    server.faults.clear()
    [[c]] = sampler.generate(PROMPTS[:1], 1, PARAMS)
    assert c.policy_version == 2


@pytest.mark.parametrize(
    ("fault", "kind", "named"),
    [
        ("other_version", StaleAnswer, r"drawn by weights of version '7'; asked was '0'"),
        ("two_versions", StaleAnswer, r"drawn by weights of version '0', '0'"),
        ("aborts", SamplerError, r"ended for 'abort'"),
        ("one_short", SamplerError, r"2 answers were asked for, and 1 came"),
        ("nan", SamplerError, r"without a finite log-prob"),
    ],
)
def test_answers_that_are_not_what_was_asked_are_refused(
    sampler: VllmSampler, server: FakeVllm, fault: str, kind: type[SamplerError], named: str
) -> None:
    sampler.generate(PROMPTS[:1], 1, PARAMS)
    server.faults.add(fault)
    with pytest.raises(kind, match=named):
        sampler.generate(PROMPTS, 2, PARAMS)


def test_a_server_of_others_that_dies_is_named(sampler: VllmSampler, server: FakeVllm) -> None:
    sampler.generate(PROMPTS[:1], 1, PARAMS)
    server.die_after = 1
    with pytest.raises(SamplerError, match="the server at vllm_url is gone"):
        sampler.generate(PROMPTS, 2, PARAMS)


def test_no_server_at_the_address(model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    options = VllmOptions(url="http://127.0.0.1:9", folder=tmp_path / "vllm")
    sampler = VllmSampler(model, tokenizer, options)
    with pytest.raises(SamplerError, match=r"no vLLM server answers at http://127.0.0.1:9/health"):
        sampler.generate(PROMPTS, 1, PARAMS)
    sampler.close()


def test_calls_that_no_sampler_could_answer(sampler: VllmSampler, server: FakeVllm) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        sampler.generate([[1], []], 1, PARAMS)
    with pytest.raises(ValueError, match=r"passes the\s+model's limit"):
        sampler.generate([[1] * 5000], 1, PARAMS)
    assert server.asked == []
