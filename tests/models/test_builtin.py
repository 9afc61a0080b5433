"""The packaged model: small, whole, and a start that GRPO can sharpen."""

from pathlib import Path

import pytest

from groupline.chat import completion_text, encode_prompt
from groupline.metrics import pass_at_k
from groupline.models.load import load_model, load_tokenizer, resolve_model
from groupline.records import SamplingParams
from groupline.rewards import correct_number, think_format
from groupline.sampling import Engine
from groupline.tasks import get_task


def test_it_takes_at_most_a_few_megabytes():
    folder = Path(resolve_model("builtin"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        f.name for f in folder.iterdir()
    }


@pytest.mark.parametrize("task", ["arithmetic_th", "arithmetic_zh", "arithmetic_en"])
def test_it_starts_unsaturated(task):
    """Held-out pass@1 between 0.25 and 0.5 and pass@8 above 0.75, on problems and draws that are fixed by their seeds."""
    tokenizer = load_tokenizer("builtin")
    problems = get_task(task).problems("held_out", 60)
    engine = Engine(load_model("builtin"), tokenizer)
    drawn = engine.generate(
        [encode_prompt(tokenizer, p.prompt) for p in problems], 8, SamplingParams(max_new_tokens=96), seed=0
    )
    texts = [[completion_text(tokenizer, c) for c in own] for own in drawn]
    right = [
        sum(correct_number(completions=own, answer=[p.answer] * 8)) for own, p in zip(texts, problems, strict=True)
    ]
    assert 0.25 < sum(right) / (8 * len(right)) < 0.5
    assert sum(pass_at_k(8, int(c), 8) for c in right) / len(right) > 0.75
    formed = think_format(completions=[text for own in texts for text in own])
    assert sum(formed) / len(formed) > 0.95


def test_text_in_any_script_survives_its_tokenizer():
    tokenizer = load_tokenizer("builtin")
    for text in ("ซื้อส้ม ๑๒ ผล", "小明有 3 个苹果", "<think>3 + 4 = 7</think>\n7", "naïve 🎉 ½ "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
