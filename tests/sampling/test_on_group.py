"""`on_group`: every prompt's answers, once, as soon as the last of them has ended."""

import pytest
import torch
from tiny import SHARED, UNSHARED, random_ids, tiny_model

from groupline.records import SamplingParams
from groupline.sampling import Engine

LENGTHS = (3, 17, 1, 9, 5)
PARAMS = SamplingParams(max_new_tokens=40)


def ending(kind):
    """A model that ends an answer after each token with a probability of about a tenth."""
    model = tiny_model(kind)
    vocabulary = model.config.vocab_size
    model.generation_config.eos_token_id = list(range(0, vocabulary, 10))
    return model


@pytest.mark.parametrize("kind", [SHARED[0], UNSHARED[0]])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_rows": 3}, {"cache_gib": 3e-5}, {"graphs": True, "burst": 4}],
    ids=["wide", "narrow", "little memory", "bursts"],
)
def test_every_group_once_and_whole(kind, settings):
    engine = Engine(ending(kind), page_size=4, notify=lambda _: None, **settings)
    engine.load_weights(engine.model, version=5)
    seen = {}

    def on_group(prompt, answers):
        assert prompt not in seen
        seen[prompt] = answers

    torch.manual_seed(0)
    answers = engine.generate(random_ids(LENGTHS, seed=1), 3, PARAMS, seed=2, on_group=on_group)
    assert seen == dict(enumerate(answers))
    assert {c.policy_version for own in answers for c in own} == {5}
    assert {c.finish_reason for own in answers for c in own} >= {"stop"}
    if settings == {} and kind == SHARED[0]:  # all decoded at once: a group is whole at its longest answer's last token
        longest = [max(len(c.ids) for c in answers[prompt]) for prompt in seen]
        assert longest == sorted(longest)
        assert longest[0] < longest[-1]
