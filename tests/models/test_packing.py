"""Packed rows, prompts shared, against one padded batch through the whole model: log-probs and every gradient."""

import pytest
import torch
from tiny import (
    SHARED,
    UNSHARED,
    gradients,
    padded_logprobs,
    plain_logprobs,
    random_ids,
    relative_gap,
    tiny_lora,
    tiny_model,
)
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from groupline.models.logprobs import find_head, token_logprobs
from groupline.models.packing import eval_mode, hidden_states, pack, why_not_shared

# Ragged answers, length-1 answers, prompts of unequal length, one prompt of a single token.
PROMPTS = random_ids([9, 1, 14], seed=3)
ANSWERS = [random_ids([4, 1, 7], 4), random_ids([1, 1], 5), random_ids([11, 2, 1, 6], 6)]


def row():
    return pack(PROMPTS, ANSWERS)


def weighted(logp):
    """A scalar in which every token has its own weight, so no gradient can be right by symmetry."""
    return (logp * torch.linspace(-1, 2, len(logp), dtype=logp.dtype)).sum()


def packed_logprobs(model, r, shared=True, temperature=1.0):
    return token_logprobs(hidden_states(model, r, shared), find_head(model), r.targets, temperature)[0]


class ExactNorm(nn.Module):
    """An RMS norm in the precision of its input: the library's own computes in fp32 whatever it is given."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        self.eps = getattr(norm, "variance_epsilon", None) or norm.eps
        self.offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0

    def forward(self, x):
        return (self.offset + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def exact_model(kind, **changes):
    model = tiny_model(kind, dtype=torch.float64, **changes)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, ExactNorm(child))
    return model


def both_gradients(model, shared=True, temperature=1.0):
    """(packed log-probs, padded log-probs, their gradients) of the same weights."""
    out = []
    for logprobs in (lambda: packed_logprobs(model, row(), shared, temperature),
                     lambda: padded_logprobs(model, row(), temperature)):  # fmt: skip
        model.zero_grad()
        logp = logprobs()
        weighted(logp).backward()
        out.append((logp.detach(), gradients(model)))
    (a, ga), (b, gb) = out
    return a, b, ga, gb


def test_a_row_by_hand():
    r = pack([[5, 6, 7], [8]], [[[1, 2, 3], [4]], [[9, 9]]], "cpu")
    assert r.input_ids.tolist() == [5, 6, 7, 1, 2, 8, 9]  # the last token of an answer predicts nothing
    assert r.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert r.score_at.tolist() == [2, 3, 4, 2, 5, 6]
    assert r.targets.tolist() == [1, 2, 3, 4, 9, 9]
    assert r.sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert r.num_sequences == 3


def test_empty_prompts_and_answers_are_refused():
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        pack([[]], [[[1]]])
    with pytest.raises(ValueError, match="an answer has no tokens"):
        pack([[1]], [[[1], []]])
    with pytest.raises(ValueError):
        pack([[1], [2]], [[[1]]])


@pytest.mark.parametrize("kind", SHARED)
def test_packed_gradients_equal_padded_ones(kind):
    model = tiny_model(kind)
    assert why_not_shared(model) is None
    got, expected, g, e = both_gradients(model)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert all(float(x.abs().max()) > 0 for n, x in e.items() if "k_proj.bias" not in n and "query_key_value" not in n)
    assert relative_gap(g, e) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "neox", "phi"])
def test_packed_gradients_equal_padded_ones_in_fp64(kind):
    got, expected, g, e = both_gradients(exact_model(kind), temperature=0.7)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert relative_gap(g, e) < 1e-10


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_packed_adapter_gradients_equal_padded_ones(kind):
    _, _, g, e = both_gradients(tiny_lora(kind))
    assert all("lora_" in n for n in g)
    assert relative_gap(g, e) < 1e-5


@pytest.mark.parametrize("kind", UNSHARED)
def test_models_that_cannot_share_train_on_plain_rows(kind):
    model = tiny_model(kind)
    assert why_not_shared(model) is not None
    got, expected, g, e = both_gradients(model, shared=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert relative_gap(g, e) < 1e-5


@pytest.mark.parametrize("kind", ["llama", *UNSHARED])
def test_plain_rows_score_each_answer_as_if_alone(kind):
    model = tiny_model(kind)
    with torch.no_grad():
        got = packed_logprobs(model, row(), shared=False)
        expected = torch.cat(
            [plain_logprobs(model, p, a) for p, own in zip(PROMPTS, ANSWERS, strict=True) for a in own]
        )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_an_answer_sees_its_prompt_and_itself_and_nothing_else():
    """Changing one answer, or another group's prompt, leaves every other answer's log-probs bit for bit."""
    model = tiny_model("gemma3")
    with torch.no_grad():
        before = packed_logprobs(model, row())
        changed = [[list(a) for a in own] for own in ANSWERS]
        changed[0][2] = [(t + 1) % 101 for t in changed[0][2]]
        prompts = [PROMPTS[0], PROMPTS[1], [(t + 1) % 101 for t in PROMPTS[2]]]
        after = packed_logprobs(model, pack(prompts, changed))
    same = torch.isin(row().sequence, torch.tensor([0, 1, 3, 4]))
    assert torch.equal(before[same], after[same])
    assert not torch.isclose(before[~same], after[~same]).any()


def test_the_order_inside_a_row_changes_nothing():
    model = tiny_model("qwen3")
    with torch.no_grad():
        a = packed_logprobs(model, row())
        b = packed_logprobs(model, pack(PROMPTS[::-1], [own[::-1] for own in ANSWERS[::-1]]))
    parts = [a[row().sequence == s] for s in reversed(range(9))]
    torch.testing.assert_close(torch.cat(parts), b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "BloomForCausalLM does not take its attention from AttentionInterface"),
        ("mamba", "MambaForCausalLM does not take its attention from AttentionInterface"),
        ("gemma2", "Gemma2Attention needs softcap, which packed rows do not carry"),
    ],
)
def test_the_reason_names_the_model_and_what_it_needs(kind, reason):
    assert why_not_shared(tiny_model(kind)) == reason


def test_a_model_that_mixes_tokens_outside_attention_is_found_by_its_numbers():
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp

    class Shift(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x + torch.roll(x, 1, 1) * (torch.arange(x.shape[1]) > 0)[:, None])

    model.model.layers[0].mlp = Shift(mlp)
    assert "packed and plain logits differ" in why_not_shared(model)


def test_a_head_that_is_not_understood_is_refused():
    """Such a model would be sampled from one distribution and trained on another."""
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, out: 2 * out)
    with pytest.raises(ValueError, match="LlamaForCausalLM makes its logits from its last hidden states in a way"):
        why_not_shared(model)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (CohereForCausalLM, CohereConfig(logit_scale=0.25)),
        (GraniteForCausalLM, GraniteConfig(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5)),
    ],
)
def test_heads_that_scale_their_logits(cls, config):
    shape = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    torch.manual_seed(0)
    model = cls(type(config)(**{**config.to_diff_dict(), **shape, **heads})).eval()
    assert find_head(model).scale == 0.25
    assert why_not_shared(model) is None
    with torch.no_grad():
        torch.testing.assert_close(packed_logprobs(model, row()), padded_logprobs(model, row()), rtol=0, atol=1e-5)


def test_the_check_leaves_modes_and_attention_as_they_were():
    policy = tiny_lora("llama", dropout=0.3)
    for name, module in policy.named_modules():
        module.training = "lora_dropout" in name
    before = {n: m.training for n, m in policy.named_modules()}
    implementation = policy.config._attn_implementation
    assert why_not_shared(policy) is None
    assert {n: m.training for n, m in policy.named_modules()} == before
    assert policy.config._attn_implementation == implementation
    inside = []

    def fail():
        with eval_mode(policy):
            inside.extend(m.training for m in policy.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert inside
    assert not any(inside)
    assert {n: m.training for n, m in policy.named_modules()} == before
