"""The engine against transformers' own `generate` and against plain forwards of one sequence."""

import math

import pytest
import torch
from tiny import (
    SHARED,
    UNSHARED,
    WINDOW,
    chain_model,
    plain_logprobs,
    random_ids,
    stir,
    tiny_lora,
    tiny_model,
)
from transformers import GPT2Config, GPT2LMHeadModel

from groupline.models.attention import NAME
from groupline.records import SamplingParams
from groupline.sampling import Engine
from groupline.sampling.scheduler import Scheduler

LENGTHS = (3, 17, 1, 9, 5)
NEW = 12
QUIET = {"notify": lambda _: None}


def generated(model, prompt, new=NEW, **settings):
    """Greedy tokens of transformers' own loop, one prompt at a time."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return tuple(out[0, len(prompt) :].tolist())


@torch.no_grad()
def assert_scored(model, answers, tolerance=1e-4):
    """Log-probs of sampled answers are those of a plain forward: of the sampled distribution and of the plain one."""
    for c in (c for own in answers for c in own):
        t = c.params.temperature or 1.0
        plain = plain_logprobs(model, c.prompt_ids, c.ids)
        torch.testing.assert_close(torch.tensor(c.plain_logprobs), plain.float(), rtol=0, atol=tolerance)
        sampled = plain_logprobs(model, c.prompt_ids, c.ids, t) if c.params.temperature else torch.zeros_like(plain)
        torch.testing.assert_close(torch.tensor(c.logprobs), sampled.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", SHARED + UNSHARED)
def test_greedy_answers_are_those_of_transformers(kind):
    model = tiny_model(kind)
    prompts = random_ids(LENGTHS, seed=1)
    engine = Engine(model, max_rows=3, page_size=4, **QUIET)
    assert (engine.unshared_reason is None) == (kind in SHARED)
    answers = engine.generate(prompts, 1, SamplingParams(temperature=0, max_new_tokens=NEW))
    assert [c.ids for [c] in answers] == [generated(model, p) for p in prompts]
    assert [c.prompt_ids for [c] in answers] == [tuple(p) for p in prompts]
    assert_scored(model, answers)
    assert max(LENGTHS) + NEW > 3 * WINDOW  # the sliding window is far smaller than what it slides over


@pytest.mark.parametrize("kind", SHARED + UNSHARED)
def test_sampled_answers_carry_the_log_probs_of_a_plain_forward(kind):
    """More answers than rows, prompts of unequal length, pages of three tokens."""
    model = tiny_model(kind)
    engine = Engine(model, max_rows=4, page_size=3, **QUIET)
    answers = engine.generate(random_ids(LENGTHS[:4], 2), 3, SamplingParams(temperature=0.7, max_new_tokens=9), seed=5)
    assert [len(own) for own in answers] == [3] * 4
    assert all(len(c.ids) == 9 and c.finish_reason == "length" for own in answers for c in own)
    assert_scored(model, answers)


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW, WINDOW + 3])
def test_a_sliding_window_begins_to_hide_in_the_middle_of_an_answer(length):
    """One prompt, answers in step: nothing but the window tells any token from another."""
    model = tiny_model("gemma3")
    [prompt] = random_ids([length], seed=8)
    [own] = Engine(model, page_size=4).generate([prompt], 2, SamplingParams(temperature=0, max_new_tokens=NEW))
    assert [c.ids for c in own] == [generated(model, prompt)] * 2
    assert_scored(model, [own])


def test_filters_renormalise_the_sampled_log_probs():
    model = tiny_model("qwen3")
    params = SamplingParams(top_k=5, max_new_tokens=8)
    for own in Engine(model).generate(random_ids([4, 6]), 4, params):
        for c in own:
            with torch.no_grad():
                ids = torch.tensor([[*c.prompt_ids, *c.ids]])
                logits = model(input_ids=ids).logits[0, len(c.prompt_ids) - 1 : -1]
            best = logits.topk(5, -1)
            place = (best.indices == torch.tensor(c.ids)[:, None]).nonzero()
            assert len(place) == 8  # every token is one of its position's five best
            expected = best.values.log_softmax(-1)[place[:, 0], place[:, 1]]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=1e-4)
            assert all(sampled > plain for sampled, plain in zip(c.logprobs, c.plain_logprobs, strict=True))


def test_prompts_together_score_as_each_alone():
    """Left padding would shift the positions of the short prompt."""
    model = tiny_model("llama")
    prompts = random_ids([3, 17])
    params = SamplingParams(max_new_tokens=10)
    together = Engine(model).generate(prompts, 2, params)
    for prompt, own in zip(prompts, together, strict=True):
        [alone] = Engine(model).generate([prompt], 2, params)
        for a, b in zip(own, alone, strict=True):
            assert a.ids == b.ids
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)


def test_the_first_token_comes_from_the_last_token_of_the_prompt():
    """A model that counts upwards: the log-prob of 8 after [3, 7] is only right from position 1."""
    model = chain_model({i: i + 1 for i in range(30)}, 32)
    [[c]] = Engine(model).generate([[3, 7]], 1, SamplingParams(temperature=0, max_new_tokens=4))
    assert c.ids == (8, 9, 10, 11)
    z = 5.0 * math.sqrt(32)  # the norm brings a one-hot row of width 32 to sqrt(32)
    assert c.plain_logprobs[0] == pytest.approx(-math.log1p(31 * math.exp(-z)), abs=1e-5)


def test_the_policy_is_left_as_it_was():
    model = tiny_model("gemma3").train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    Engine(model).generate([[1, 2, 3]], 2, SamplingParams(max_new_tokens=4))
    assert model.training
    assert model.config._attn_implementation == implementation != NAME
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off_while_sampling():
    policy = tiny_lora("llama", dropout=0.5)
    policy.train()
    answers = Engine(policy).generate([[1, 2, 3], [4]], 2, SamplingParams(max_new_tokens=6))
    policy.eval()
    assert_scored(policy, answers)


# Weights after an update


def test_updated_weights_are_sampled_from_after_load_weights():
    model = tiny_model("qwen3")
    engine = Engine(model)
    prompts, params = random_ids([4, 7]), SamplingParams(temperature=0, max_new_tokens=8)
    first = engine.generate(prompts, 1, params)
    stir(model, 9, size=0.3)
    engine.load_weights(model, version=3)
    second = engine.generate(prompts, 1, params)
    assert [c.policy_version for [c] in first] == [0, 0]
    assert [c.policy_version for [c] in second] == [3, 3]
    assert [c.ids for [c] in first] != [c.ids for [c] in second]
    assert [c.ids for [c] in second] == [generated(model, p, 8) for p in prompts]
    assert_scored(model, second)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "neox", "bloom"])
def test_a_folded_adapter_samples_as_the_adapter_itself(kind):
    policy = tiny_lora(kind)
    engine = Engine(policy, max_rows=3, page_size=4, **QUIET)
    prompts, params = random_ids([5, 2, 9]), SamplingParams(temperature=0, max_new_tokens=8)
    answers = engine.generate(prompts, 1, params)
    with policy.disable_adapter():
        assert [c.ids for [c] in answers] != [generated(policy, p, 8) for p in prompts]
    assert [c.ids for [c] in answers] == [generated(policy, p, 8) for p in prompts]
    assert_scored(policy, answers)
    stir(policy, 4)
    engine.load_weights(policy, version=1)
    assert_scored(policy, engine.generate(prompts, 2, SamplingParams(max_new_tokens=8)))


def test_half_precision_follows_the_policy_too():
    policy = tiny_lora("llama")
    engine = Engine(policy, dtype=torch.bfloat16)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    stir(policy, 3)
    engine.load_weights(policy, version=1)
    answers = engine.generate(random_ids([5, 3]), 2, SamplingParams(max_new_tokens=6))
    assert_scored(policy, answers, tolerance=0.15)  # bf16 keeps 8 bits; logits are a few units large
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


# Models that cannot share


@pytest.mark.parametrize(
    ("kind", "reason"), [("bloom", "AttentionInterface"), ("gemma2", "softcap"), ("mamba", "AttentionInterface")]
)
def test_the_reason_for_falling_back_is_said(kind, reason):
    said = []
    Engine(tiny_model(kind), notify=said.append)
    assert len(said) == 1
    assert "without a shared prompt cache" in said[0]
    assert reason in said[0]


def test_a_fallback_is_printed_by_default(capsys):
    Engine(tiny_model("mamba"))
    assert "without a shared prompt cache: MambaForCausalLM" in capsys.readouterr().out
    Engine(tiny_model("llama"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["bloom", "mamba", "llama"])
def test_the_models_own_generation_settings_are_not_followed_in_silence(kind):
    model = tiny_model(kind)
    expected = Engine(model, **QUIET).generate([[1, 2, 3]], 2, SamplingParams(max_new_tokens=8))
    for key, value in {"repetition_penalty": 3.0, "suppress_tokens": list(range(50)), "top_k": 1, "do_sample": True,
                       "temperature": 0.1, "min_new_tokens": 4, "no_repeat_ngram_size": 1}.items():  # fmt: skip
        setattr(model.generation_config, key, value)
    answers = Engine(model, **QUIET).generate([[1, 2, 3]], 2, SamplingParams(max_new_tokens=8))
    assert answers == expected
    assert model.generation_config.repetition_penalty == 3.0


@pytest.mark.parametrize("kind", ["llama", "bloom", "mamba"])
def test_end_ids_are_ignored_when_asked(kind):
    """The model's own config names the first token of its greedy answer as an end; only `ignore_eos` goes past it."""
    model = tiny_model(kind)
    prompts = random_ids([4, 6, 2])
    free = [generated(model, p) for p in prompts]
    model.generation_config.eos_token_id = free[0][2]
    engine = Engine(model, **QUIET)
    ended = engine.generate(prompts, 2, SamplingParams(temperature=0, max_new_tokens=NEW))
    assert ended[0][0].ids == free[0][: free[0].index(free[0][2]) + 1]
    assert ended[0][0].finish_reason == "stop"
    ignored = engine.generate(prompts, 2, SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True))
    assert [c.ids for own in ignored for c in own] == [ids for ids in free for _ in range(2)]
    assert {c.finish_reason for own in ignored for c in own} == {"length"}
    assert_scored(model, ignored)


# Bad input


def test_bad_requests_name_what_is_wrong():
    engine = Engine(tiny_model("llama"))
    with pytest.raises(ValueError, match="1 prompts with n=0"):
        engine.generate([[1]], 0)
    with pytest.raises(ValueError, match="0 prompts with n=2"):
        engine.generate([], 2)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate([[1], []], 1, SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match=r"prompt 1 has 100 tokens; with 29 new ones .* limit of 128 positions"):
        engine.generate([[1], [1] * 100], 1, SamplingParams(max_new_tokens=29))
    with pytest.raises(ValueError, match=r"stop strings need a tokenizer"):
        engine.generate([[1]], 1, SamplingParams(stop=("a",), max_new_tokens=4))
    with pytest.raises(ValueError, match="1 keys for 2 prompts"):
        engine.generate([[1], [2]], 1, SamplingParams(max_new_tokens=4), keys=["a"])


def test_the_last_position_can_be_used():
    [[c]] = Engine(tiny_model("llama")).generate([[1] * 100], 1, SamplingParams(max_new_tokens=28))
    assert len(c.ids) == 28


def test_a_cache_too_small_for_one_answer_is_refused():
    engine = Engine(tiny_model("llama"), page_size=4, cache_gib=5 * 1024 / 2**30)  # 5 pages of 4 tokens of 256 bytes
    with pytest.raises(ValueError, match=r"prompt of 9 tokens .* needs 6 cache pages of 4 tokens and the cache has 5"):
        engine.generate([[1] * 9], 1, SamplingParams(max_new_tokens=12))
    engine = Engine(tiny_model("llama"), page_size=4, cache_gib=1000 / 2**30)
    with pytest.raises(ValueError, match="not even one page of 4 tokens"):
        engine.generate([[1]], 1, SamplingParams(max_new_tokens=1))


def test_a_diverged_model_is_named_and_not_sampled_from():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    engine = Engine(tiny_model("llama"))
    engine.model.lm_head = model.lm_head
    engine.load_weights(model, version=1)
    with pytest.raises(ValueError, match=r"logits are not finite in rows \[0, 1\].*diverged"):
        engine.generate([[1, 2], [3]], 1, SamplingParams(max_new_tokens=4))


def test_every_prompt_is_prefilled_once(monkeypatch):
    prefilled = []
    schedule = Scheduler.schedule

    def spy(self):
        step = schedule(self)
        prefilled.extend(p.index for p in step.prompts)
        return step

    monkeypatch.setattr(Scheduler, "schedule", spy)
    Engine(tiny_model("llama"), max_rows=2).generate(random_ids([4, 5, 6]), 6, SamplingParams(max_new_tokens=3))
    assert prefilled == [0, 1, 2]


def test_c20_absolute_positions_do_not_depend_on_the_neighbours():
    """Case M3 with GPT-2, whose positions are learnt: prompts of 3 and 17 tokens together score as each alone."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    prompts = random_ids([3, 17])
    together = Engine(model, **QUIET).generate(prompts, 4, SamplingParams(max_new_tokens=NEW), keys=[0, 1])
    assert_scored(model, together, 1e-5)
    for key, prompt in enumerate(prompts):
        [alone] = Engine(model, **QUIET).generate([prompt], 4, SamplingParams(max_new_tokens=NEW), keys=[key])
        assert [c.ids for c in alone] == [c.ids for c in together[key]]
