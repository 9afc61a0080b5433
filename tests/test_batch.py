"""Groups -> Batch: which token is trained with which advantage and weight, and how rows are cut."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import completion, group

from groupline.batch import (
    FEWEST,
    MOST,
    UNKNOWN,
    activation_bytes,
    choose_tokens,
    make_batch,
    rewards_tensor,
)
from groupline.models.memory import free_memory
from groupline.objective import BNPO, DAPO, DR_GRPO, GRPO, RLOO
from groupline.records import Group, Problem, Rollout

PLAIN = GRPO.replace(beta=0.0)


def groups(*specs):
    """specs: (prompt length, answer lengths, rewards). Every answer is made of its own number, 100 and up."""
    made, number = [], 100
    for b, (length, lengths, rewards) in enumerate(specs):
        answers = []
        for n in lengths:
            answers.append([number] * n)
            number += 1
        made.append(group(f"g{b}", [b + 1] * length, answers, rewards))
    return made


def tokens(batch):
    """{answer number: [(advantage, weight) of each of its tokens]}, read from the token ids alone."""
    seen = {}
    for micro in batch.micro_batches:
        for target, a, w in zip(
            micro.row.targets.tolist(), micro.advantages.tolist(), micro.weights.tolist(), strict=True
        ):
            seen.setdefault(target, []).append((a, w))
    return seen


def test_one_step_by_hand():
    """Rewards 1, 0 and 0, 0, 1, 1 in groups of... two groups of two; GRPO weighs 1 / (answers x length)."""
    batch = make_batch(groups((3, [2, 4], [1, 0]), (2, [1, 5], [0, 3])), PLAIN, budget=8, micro_batch_tokens=100)
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    b = 1.5 / (math.sqrt(4.5) + 1e-4)
    expected = {100: (a, 1 / 8, 2), 101: (-a, 1 / 16, 4), 102: (-b, 1 / 4, 1), 103: (b, 1 / 20, 5)}
    got = tokens(batch)
    assert got.keys() == expected.keys()
    for number, (advantage, weight, length) in expected.items():
        assert len(got[number]) == length
        for pair in got[number]:
            assert pair == pytest.approx((advantage, weight), rel=1e-6)
    assert batch.lengths.tolist() == [2, 4, 1, 5]
    assert batch.skipped == 0
    assert batch.row_tokens == 3 + 1 + 3 + 2 + 0 + 4


def test_the_sampled_ids_and_log_probs_are_trained_on_as_they_are():
    """Ids whose text would be tokenised otherwise: nothing is decoded and encoded again."""
    rollouts = [
        Rollout(completion([5, 6], ids, logprobs=logprobs), "text", {}, reward)
        for ids, logprobs, reward in (([7, 7, 7], [-0.1, -0.2, -0.3], 1.0), ([8, 9], [-0.4, -0.5], 0.0))
    ]
    batch = make_batch([Group(Problem("p", ""), tuple(rollouts))], PLAIN, budget=4, micro_batch_tokens=50)
    [micro] = batch.micro_batches
    assert micro.row.prompts == ((5, 6),)
    assert micro.row.targets.tolist() == [7, 7, 7, 8, 9]
    torch.testing.assert_close(micro.sampler_logp, torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]))
    assert micro.old_logp is None
    assert micro.ref_logp is None


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, None])
def test_a_log_prob_that_is_not_finite_is_named(bad):
    good = Rollout(completion([1], [2, 3]), "", {}, 1.0)
    odd = Rollout(completion([1], [4, 5, 6], logprobs=[-1.0, bad, -1.0]), "", {}, 0.0)
    with pytest.raises(ValueError, match=rf"group 'two', answer 1, token 1 has log-prob {bad}"):
        make_batch(
            [Group(Problem("one", ""), (good, good)), Group(Problem("two", ""), (good, odd))],
            PLAIN,
            budget=4,
            micro_batch_tokens=50,
        )


def test_groups_of_unequal_size_are_named():
    with pytest.raises(ValueError, match="group 'g1' has 1 answers, the first has 2"):
        make_batch(groups((1, [1, 1], [0, 1]), (1, [1], [1])), PLAIN, budget=4, micro_batch_tokens=50)


def test_rewards_that_do_not_apply_are_nan_and_advantage_0():
    made = groups((2, [2, 2, 2], [1.0, None, 0.0]))
    assert torch.isnan(rewards_tensor(made)).tolist() == [False, True, False]
    batch = make_batch(made, PLAIN, budget=4, micro_batch_tokens=50)
    assert batch.advantages[1] == 0
    assert batch.advantages[0] == -batch.advantages[2] > 0
    assert 101 not in tokens(batch)


def test_rewards_can_be_replaced():
    batch = make_batch(
        groups((2, [2, 2], [0.0, 0.0])), PLAIN, budget=4, micro_batch_tokens=50, rewards=torch.tensor([0.0, 1.0])
    )
    assert batch.advantages[1] > 0 > batch.advantages[0]


# Answers that are not trained on


MASKED = [[2, 3, 4, 6], [5, 1, 2, 2]]


def truncated(objective, cut=((1, 2), (0,)), micro_batch_tokens=100):
    made = [
        group("a", [1, 1, 1], [[100 + i] * n for i, n in enumerate(MASKED[0])], [1, 0, 1, 0], truncated=cut[0]),
        group("b", [2], [[104 + i] * n for i, n in enumerate(MASKED[1])], [1, 0, 0, 0], truncated=cut[1]),
    ]
    return make_batch(
        made, objective.replace(mask_truncated=True, beta=0.0), budget=10, micro_batch_tokens=micro_batch_tokens
    )


@pytest.mark.parametrize(
    ("objective", "weights"),
    [
        (BNPO, dict.fromkeys([100, 103, 105, 106, 107], 1 / (2 + 6 + 1 + 2 + 2))),
        (GRPO, {100: 1 / 10, 103: 1 / 30, 105: 1 / 5, 106: 1 / 10, 107: 1 / 10}),
        (DR_GRPO, dict.fromkeys([100, 103, 105, 106, 107], 1 / 80)),  # its denominator is a constant of the step
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_truncated_answers_leave_numerator_and_denominator(objective, weights):
    batch = truncated(objective)
    got = tokens(batch)
    assert got.keys() == weights.keys()
    for number, pairs in got.items():
        assert [w for _, w in pairs] == pytest.approx([weights[number]] * len(pairs), rel=1e-6)
    assert batch.lengths.tolist() == [2, 0, 0, 6, 0, 1, 2, 2]
    assert batch.skipped == 3


def test_truncated_answers_still_take_part_in_their_groups_baseline():
    whole = make_batch(groups((1, [2] * 4, [1, 0, 1, 0]), (1, [2] * 4, [1, 0, 0, 0])), PLAIN, budget=4,
                       micro_batch_tokens=50)  # fmt: skip
    assert torch.equal(truncated(GRPO).advantages, whole.advantages)


def test_truncated_answers_are_trained_on_unless_masked():
    made = [group("a", [1], [[100, 100], [101, 101]], [1, 0], truncated=[0, 1])]
    assert tokens(make_batch(made, PLAIN, budget=2, micro_batch_tokens=50)).keys() == {100, 101}


def test_all_answers_truncated_leaves_nothing():
    batch = truncated(BNPO, cut=((0, 1, 2, 3), (0, 1, 2, 3)))
    assert batch.micro_batches == []
    assert batch.lengths.tolist() == [0] * 8
    assert batch.skipped == 8


def test_groups_without_signal_are_left_out_and_still_count():
    made = groups((3, [2, 4], [1, 1]), (2, [1, 5], [0, 1]), (2, [3, 3], [0.35, 0.35]))
    batch = make_batch(made, PLAIN, budget=8, micro_batch_tokens=100)
    assert tokens(batch).keys() == {102, 103}
    assert batch.skipped == 4
    assert batch.advantages[[0, 1, 4, 5]].tolist() == [0, 0, 0, 0]
    assert tokens(batch)[103][0][1] == pytest.approx(1 / (6 * 5))  # six answers, not two
    whole = make_batch(made, PLAIN, budget=8, micro_batch_tokens=100, skip_idle=False)
    assert tokens(whole).keys() == set(range(100, 106))
    assert tokens(whole)[103] == tokens(batch)[103]
    assert whole.skipped == 0


def test_an_answer_with_advantage_0_in_a_live_group_is_left_out_too():
    batch = make_batch(groups((3, [2, 2, 2], [1, 0.5, 0])), PLAIN, budget=8, micro_batch_tokens=100)
    assert tokens(batch).keys() == {100, 102}


def test_with_a_kl_in_the_loss_no_group_is_idle():
    """Its KL has a gradient by definition; a KL taken from the reward is in the advantage already."""
    made = groups((3, [2, 4], [1, 1]), (2, [1, 5], [0, 1]))
    assert make_batch(made, GRPO, budget=8, micro_batch_tokens=100).skipped == 0
    assert make_batch(made, RLOO, budget=8, micro_batch_tokens=100).skipped == 2


def test_every_group_dead():
    batch = make_batch(groups((3, [2, 4], [1, 1]), (2, [1, 5], [0, 0])), PLAIN, budget=8, micro_batch_tokens=100)
    assert batch.micro_batches == []
    assert batch.row_tokens == 0
    assert batch.advantages.tolist() == [0.0] * 4


# Rows


specs = st.integers(1, 5).flatmap(
    lambda size: st.lists(
        st.tuples(
            st.integers(1, 9),
            st.lists(st.integers(1, 12), min_size=size, max_size=size),
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size),
        ),
        min_size=1,
        max_size=6,
    )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(specs, st.integers(1, 60), st.booleans())
def test_rows_hold_every_answer_once_within_the_limit(specs, limit, skip):
    objective = PLAIN.replace(baseline="batch", scale="none")
    if sum(len(lengths) for _, lengths, _ in specs) == 1:
        objective = objective.replace(baseline="none")
    batch = make_batch(groups(*specs), objective, budget=12, micro_batch_tokens=limit, skip_idle=skip)
    used = [i for i, a in enumerate(batch.advantages.tolist()) if a != 0 or not skip]
    assert sorted(i for m in batch.micro_batches for i in m.answers) == used
    assert batch.skipped == len(batch.advantages) - len(used)
    lengths = [n for _, own, _ in specs for n in own]
    assert {n: len(t) for n, t in tokens(batch).items()} == {100 + i: lengths[i] for i in used}
    for micro in batch.micro_batches:
        assert len(micro.row.input_ids) <= limit or len(micro.answers) == 1
        assert micro.row.num_sequences == len(micro.answers)
        for place, target in zip(micro.row.sequence.tolist(), micro.row.targets.tolist(), strict=True):
            assert target == 100 + micro.answers[place]  # `answers` and the row agree on who is who
    assert batch.row_tokens == sum(len(m.row.input_ids) for m in batch.micro_batches)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(specs, st.integers(1, 40), st.integers(1, 40))
def test_the_limit_changes_no_tokens_advantage_or_weight(specs, one, other):
    objective = DR_GRPO.replace(baseline="none")
    a, b = (make_batch(groups(*specs), objective, budget=12, micro_batch_tokens=n) for n in (one, other))
    assert tokens(a) == tokens(b)


def test_a_prompt_stands_once_in_a_row_where_its_group_fits():
    [micro] = make_batch(groups((9, [3] * 6, [0, 1] * 3)), PLAIN, budget=8, micro_batch_tokens=21).micro_batches
    assert micro.row.prompts == ((1,) * 9,)
    batch = make_batch(groups((9, [3] * 6, [0, 1] * 3)), PLAIN, budget=8, micro_batch_tokens=20)
    assert sorted(len(m.answers) for m in batch.micro_batches) == [1, 5]


def test_groups_share_a_row_while_it_has_room():
    batch = make_batch(groups(*[(4, [2, 2], [0, 1])] * 4), PLAIN, budget=8, micro_batch_tokens=12)
    assert [len(m.row.input_ids) for m in batch.micro_batches] == [12, 12]


# How many row tokens


def test_tokens_follow_from_the_budget_within_limits():
    assert choose_tokens(1000, 3_000_000)[0] == 3000
    assert choose_tokens(1000, 100_000)[0] == FEWEST
    assert choose_tokens(1, 10**9)[0] == MOST
    assert choose_tokens(1, 10**9, most=4096)[0] == 4096
    tokens, why = choose_tokens(1000, 3_000_000, group=5000)
    assert (tokens, "raised for a group of 5,000" in why) == (5000, True)
    assert choose_tokens(1000, 3_000_000, group=7000)[0] == 6000  # twice is the most
    assert choose_tokens(None, 10**9) == (UNKNOWN, "the model's configuration does not tell its size")


def test_activation_bytes_by_hand():
    config = SimpleNamespace(
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, head_dim=64
    )
    assert activation_bytes(config, 4) == 30 * (16 * 4 * 576 + 8 * 4 * 1536)
    assert activation_bytes(config, 2) == 30 * (16 * 4 * 576 + 8 * 2 * 1536)
    config.head_dim = 128  # wider attention than the hidden states
    assert activation_bytes(config, 4) == 30 * (16 * 4 * 9 * 128 + 8 * 4 * 1536)
    config.num_experts_per_tok, config.moe_intermediate_size = 8, 512
    assert activation_bytes(config, 4) == 30 * (16 * 4 * 9 * 128 + 8 * 4 * 4096)
    assert activation_bytes(SimpleNamespace(), 4) is None


def test_free_memory_here_is_some_and_less_than_all():
    free = free_memory(torch.device("cpu"))
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_parts_of_a_pass_share_out_the_answers_and_double_their_weights():
    groups = [
        group("a", [1, 2], [[3], [4, 5], [6, 7, 8], [9]], [1, 0, 0.5, 0]),
        group("b", [2], [[5]] * 4, [0, 1, 0, 0]),
    ]
    whole = make_batch(groups, DAPO, budget=4, micro_batch_tokens=100)
    batch = make_batch(groups, DAPO, budget=4, micro_batch_tokens=100, parts=2, seed=3)
    parts = [[i for m in part.micro_batches for i in m.answers] for part in batch.updates()]
    assert [len(p) for p in parts] == [4, 4]
    assert sorted(parts[0] + parts[1]) == list(range(8))
    assert parts[0] != [0, 1, 2, 3]
    assert {round(float(w), 6) for m in batch.micro_batches for w in m.weights} == {round(2 / 11, 6)}
    assert {round(float(w), 6) for m in whole.micro_batches for w in m.weights} == {round(1 / 11, 6)}
    assert torch.equal(batch.advantages, whole.advantages)
    with pytest.raises(ValueError, match="8 answers cannot be shared out evenly over 3 updates"):
        make_batch(groups, DAPO, budget=4, micro_batch_tokens=100, parts=3)
