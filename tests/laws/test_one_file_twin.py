"""`examples/one_file_grpo.py` against the library: the same rewards give the same advantages, and the same recorded
answers the same loss and gradient, one on padded rows with the prompt repeated, the other on packed rows.

Legend: S answers, P prompt and T answer tokens, padded.
"""

import ast
import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupline.batch import make_batch
from groupline.config import Config
from groupline.models.new import NewModel, new_model, new_tokenizer
from groupline.objective import BNPO, DR_GRPO, GRPO, group_advantages, policy_loss
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.tasks.arithmetic import generate
from groupline.training.optim import Optimiser
from groupline.training.step import Scorer, train_step

FILE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"
VOCABULARY, END, PAD = 40, 39, 0
PROMPTS = ((3, 7, 9, 2, 11), (5, 8))  # of different lengths, so that left padding is put to the test
LENGTHS = ((4, 1, 6, 3), (2, 6, 5, 6))
REWARDS = ((1.3, 0.3, 0.0, 1.0), (0.0, 1.3, 0.3, 0.3))
BUDGET, TEMPERATURE = 6, 0.8


@pytest.fixture(scope="module")
def twin():
    spec = importlib.util.spec_from_file_location("one_file_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=END,
        pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def recorded():
    """Answers of the lengths above: shorter than the budget they end with END, else they are cut."""
    draw = torch.Generator().manual_seed(2)
    out = []
    for own in LENGTHS:
        ids = [torch.randint(1, END, (n,), generator=draw).tolist() for n in own]
        out.append([[*i[:-1], END] if len(i) < BUDGET else i for i in ids])
    return out


def jitter(kind):
    """Old or reference log-probs: how far each token's lies from the policy's, per answer [length]."""
    draw = torch.Generator().manual_seed(kind)
    return [0.3 * torch.randn(n, generator=draw, dtype=torch.float64) for own in LENGTHS for n in own]


def library_batch(row):
    """The recorded answers as the library trains on them, over several micro-batches."""
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=BUDGET)
    groups = []
    for b, (prompt, answers) in enumerate(zip(PROMPTS, recorded(), strict=True)):
        rollouts = []
        for ids, reward in zip(answers, REWARDS[b], strict=True):
            zeros, reason = (0.0,) * len(ids), "stop" if ids[-1] == END else "length"
            completion = Completion(prompt, tuple(ids), zeros, zeros, reason, params)
            rollouts.append(Rollout(completion, "", {"r": reward}, reward))
        groups.append(Group(Problem(str(b), "?"), tuple(rollouts)))
    batch = make_batch(groups, row, budget=BUDGET, micro_batch_tokens=16)
    assert len(batch.micro_batches) > 1
    return batch


def library(model, row):
    """(loss, gradients, log-probs of each answer) by make_batch, Scorer and policy_loss."""
    batch = library_batch(row)
    scorer = Scorer(TEMPERATURE, shared=True)
    old, ref = jitter(3), jitter(4)
    model.zero_grad()
    total, each = 0.0, {}
    for micro in batch.micro_batches:
        logp, _ = scorer(model, micro.row)
        now = logp.detach()
        per_token, _ = policy_loss(
            logp,
            now + torch.cat([old[i] for i in micro.answers]),
            micro.advantages,
            row,
            sequence=micro.row.sequence,
            num_sequences=micro.row.num_sequences,
            ref_logp=now + torch.cat([ref[i] for i in micro.answers]) if row.beta else None,
        )
        loss = (micro.weights * per_token).sum()
        loss.backward()
        total += loss.item()
        each |= {i: now[micro.row.sequence == place] for place, i in enumerate(micro.answers)}
    return total, gradients(model), each


def padded(twin):
    """The same answers as the file lays them out: prompts padded on the left, answers on the right."""
    width = max(map(len, PROMPTS))
    rows = [[PAD] * (width - len(p)) + list(p) for p, own in zip(PROMPTS, LENGTHS, strict=True) for _ in own]
    prompt_seen = torch.tensor([[int(t != PAD) for t in row] for row in rows])
    answers = torch.tensor([i + [PAD] * (BUDGET - len(i)) for own in recorded() for i in own])
    trained = twin.answer_mask(answers, [END])
    ids = torch.cat([torch.tensor(rows), answers], 1)
    return twin.Rollout(ids, torch.cat([prompt_seen, trained.long()], 1), trained, [])


def filled(pieces, trained):
    """Per-answer values laid out as [S, T], 0 at padding."""
    out = torch.zeros(trained.shape, dtype=torch.float64)
    out[trained] = torch.cat(pieces)
    return out


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (GRPO, {"beta": 0.04}),
        (GRPO.replace(clip_low=0.1, clip_high=0.28, beta=0.0), {"clip_low": 0.1, "clip_high": 0.28}),
        (DR_GRPO, {"scale": "none", "weight": "per_budget"}),
        (BNPO, {"weight": "per_token"}),
    ],
    ids=["grpo", "grpo wide clip", "dr_grpo", "per_token"],
)
def test_loss_and_gradient_are_the_library_s(twin, model, row, settings):
    expected, expected_grad, each = library(model, row)
    s = twin.Settings(model="", group=len(LENGTHS[0]), max_new_tokens=BUDGET, temperature=TEMPERATURE, **settings)
    data = padded(twin)
    rewards = torch.tensor([r for group in REWARDS for r in group], dtype=torch.float64)
    advantages = twin.group_advantages(rewards, s.group, s.scale)
    weights = twin.token_weights(data.trained, s.weight, s.max_new_tokens)
    model.zero_grad()
    total = 0.0
    for part in (slice(0, 3), slice(3, 8)):
        logp = twin.token_logprobs(model, data.ids[part], data.seen[part], data.trained[part], s.temperature)
        own = [each[i] for i in range(8)][part]
        torch.testing.assert_close(logp.detach(), filled(own, data.trained[part]), rtol=1e-6, atol=1e-6)
        old, ref = (
            logp.detach() + filled(jitter(kind)[part], data.trained[part]) for kind in (3, 4)
        )  # the same distance from the policy's own
        loss = twin.policy_loss(logp, old, ref if s.beta else None, advantages[part], weights[part], s)
        loss.backward()
        total += loss.item()
    assert abs(expected) > 1e-3, "the case must not be one where the loss vanishes"
    assert total == pytest.approx(expected, rel=1e-6)
    grad = gradients(model)
    assert float((grad - expected_grad).norm() / expected_grad.norm()) < 1e-6


def test_several_passes_over_one_rollout_are_the_library_s(twin, model):
    """Old log-probs kept from the first pass, a reference, micro-batches that add up, clipping of the norm."""
    reference, one, other = (copy.deepcopy(model) for _ in range(3))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.02)
    batch, scorer = library_batch(GRPO), Scorer(TEMPERATURE, shared=True)
    for micro in batch.micro_batches:
        with torch.no_grad():
            micro.ref_logp = scorer(reference, micro.row)[0]
    # A large epsilon keeps Adam from blowing rounding up to a whole step where a gradient is near 0.
    optimiser = Optimiser(one, Config(learning_rate=1e-2, adam_epsilon=1e-2, max_grad_norm=0.5), updates=3)
    for _ in range(3):
        facts = train_step(one, optimiser, batch, GRPO, scorer)

    settings = {"max_new_tokens": BUDGET, "temperature": TEMPERATURE, "beta": 0.04, "max_grad_norm": 0.5}
    s = twin.Settings(model="", group=len(LENGTHS[0]), num_iterations=3, micro_batch=3, **settings)
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    advantages = twin.group_advantages(torch.tensor(REWARDS, dtype=torch.float64).flatten(), s.group)
    norm = twin.update(other, reference, adam, padded(twin), advantages, s)

    assert facts["clip_ratio/region_mean"] > 0, "the case must clip"
    assert norm == pytest.approx(facts["grad_norm"], rel=1e-5)
    moved = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, one, other)]
    assert float((moved[2] - moved[1]).norm() / (moved[1] - moved[0]).norm()) < 1e-5


@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_are_the_library_s(twin, scale):
    rewards = torch.tensor([1.5, 0.3, 0.5, 1.5, 0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    got = twin.group_advantages(rewards, 4, scale)
    torch.testing.assert_close(got, group_advantages(rewards, 4, scale=scale), rtol=1e-12, atol=1e-12)
    assert got[4:8].tolist() == [0.0] * 4


def test_the_end_of_an_answer_is_trained_on_and_what_follows_is_not(twin):
    mask = twin.answer_mask(
        torch.tensor([[5, END, PAD, PAD], [6, 7, 8, 9], [END, END, 4, END], [3, 38, 2, 1]]), [38, END]
    )
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]


def test_the_file_s_judges_give_the_built_in_task_s_solutions_full_marks(twin):
    for problem in generate("en", count=200):
        text = problem.columns["solution"]
        assert twin.correct(text, int(problem.answer)) == twin.well_formed(text) == 1.0


@pytest.mark.parametrize(
    ("text", "right", "formed"),
    [
        ("<think>3 + 4 = 7</think>\n7", 1.0, 1.0),
        ("<think></think>\n7", 1.0, 0.0),
        ("<think>7", 0.0, 0.0),
        ("so it is 7", 1.0, 0.0),
        ("<think>7</think>\n1,007", 0.0, 1.0),
        ("<think>7</think>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_judges(twin, text, right, formed):
    assert (twin.correct(text, 7), twin.well_formed(text)) == (right, formed)


def test_the_file_stands_alone_and_is_short():
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 250
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else
            [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}


def test_two_steps_of_the_whole_loop(twin, tmp_path, capsys):
    problems = generate("en", count=60)
    texts = [m["content"] for p in problems for m in p.prompt] + [p.columns["solution"] for p in problems]
    tokenizer = new_tokenizer(texts, 320)
    shape = NewModel(vocab_size=320, hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1, head_dim=8)
    new_model(shape, tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"steps": 2, "prompts": 2, "group": 3, "max_new_tokens": 5, "num_iterations": 2, "micro_batch": 4}
    twin.main([str(tmp_path), "--beta", "0.04", *(str(x) for k, v in options.items() for x in (f"--{k}", v))])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert all(name in lines[0] for name in ("reward", "signal", "length", "grad"))
