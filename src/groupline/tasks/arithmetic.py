"""The built-in task: everyday word problems of one to three arithmetic steps, in Thai, Chinese and English.

Problems come from templates and a seed, so nothing is downloaded and every run sees the same ones.
The gold solution of each problem is short enough for a small model to learn it in a supervised warm-up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

from groupline.records import Problem
from groupline.tasks import arithmetic_one_step, arithmetic_three_steps, arithmetic_two_steps
from groupline.tasks.arithmetic_templates import Drawn, Language, Split, Template, draw_int, draw_numbers

SYSTEM_PROMPT: dict[str, str] = {
    "th": "คิดเป็นภาษาไทยทีละขั้นใน <think>...</think> แล้วตอบเป็นตัวเลขอย่างเดียวในบรรทัดสุดท้าย",
    "zh": "请用中文在 <think>...</think> 里逐步思考，然后在最后一行只写出数字答案。",
    "en": "Think in English inside <think>...</think>, then give the answer as a number alone on the last line.",
}
NAMES: dict[str, tuple[str, ...]] = {
    "th": ("มานี", "สมชาย", "มะลิ", "ก้อง", "ฟ้า", "ต้น", "พลอย", "วิชัย", "นิด", "ธนา"),
    "zh": ("小明", "小红", "小华", "小丽", "小刚", "小芳", "小军", "小梅", "丽丽", "明明"),
    "en": ("Anna", "Ben", "Mia", "Tom", "Lily", "Sam", "Nina", "Jack", "Emma", "Leo"),
}
TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: arithmetic_one_step.TEMPLATES,
    2: arithmetic_two_steps.TEMPLATES,
    3: arithmetic_three_steps.TEMPLATES,
}
_JOIN = {"th": " ", "zh": "，", "en": ", "}
_IN_THE_HEAD = {"th": "คิดในใจ", "zh": "心算", "en": "mental arithmetic"}
_TRIES = 20_000


def generate(
    language: Language = "th",
    split: Split = "train",
    seed: int = 0,
    count: int = 1000,
    *,
    max_number: int = 50,
    max_factor: int = 12,
    step_weights: Sequence[float] = (1.0, 1.0, 1.0),
) -> list[Problem]:
    """The first `count` different problems for (language, split, seed); the same arguments give the same list.

    max_number: largest number that is added or subtracted. max_factor: largest factor and divisor.
    step_weights: how often problems of one, two and three steps are drawn, relative to each other.
    Train and held-out problems never meet, whatever their language, seed or difficulty (see `Drawn.split`).

    Each problem's columns are `language`, `steps`, and two completions that earn every reward: `solution`, worked step
    by step, and `short_solution`, which only gives the answer.

    Raises:
        ValueError: an argument is out of range, or the settings allow fewer than `count` different problems.
    """
    if language not in SYSTEM_PROMPT:
        raise ValueError(f"language is {language!r}; the arithmetic task has {', '.join(sorted(SYSTEM_PROMPT))}")
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}")
    if count < 0:
        raise ValueError(f"count is {count}; it must be 0 or more")
    if max_number < 3 or max_factor < 2:
        raise ValueError(f"max_number is {max_number} and max_factor {max_factor}; they must be at least 3 and 2")
    if len(step_weights) != 3 or min(step_weights) < 0 or sum(step_weights) <= 0:
        raise ValueError(f"step_weights is {tuple(step_weights)}; it must be three weights >= 0, not all 0")

    rng = random.Random(f"{language}-{split}-{seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    tries = 0
    while len(problems) < count:
        templates = TEMPLATES[_draw_steps(rng, step_weights)]
        template = templates[draw_int(rng, 0, len(templates) - 1)]
        names = NAMES[language]
        name = names[draw_int(rng, 0, len(names) - 1)]
        drawn = draw_numbers(template, rng, max_number, max_factor)
        tries += 1
        if drawn is not None and drawn.split == split and drawn.key not in seen:
            seen.add(drawn.key)
            problems.append(
                _problem(drawn, name, language, f"arithmetic-{language}-{split}-{seed}-{len(problems):06d}")
            )
            tries = 0
        elif tries == _TRIES:
            raise ValueError(
                f"found only {len(problems)} different {split} problems where count is {count}; ask for fewer, "
                f"or raise max_number ({max_number}), max_factor ({max_factor}) or the weight of longer problems"
            )
    return problems


def _draw_steps(rng: random.Random, weights: Sequence[float]) -> int:
    point = rng.random() * sum(weights)
    for steps, weight in enumerate(weights, start=1):
        if point < weight:
            return steps
        point -= weight
    return max(steps for steps, weight in enumerate(weights, start=1) if weight > 0)


def _problem(drawn: Drawn, name: str, language: Language, problem_id: str) -> Problem:
    question, *clauses = drawn.template.wording(language)
    thought = _JOIN[language].join(
        clause.format(equation) for clause, equation in zip(clauses, drawn.equations, strict=True)
    )
    return Problem(
        id=problem_id,
        prompt=(
            {"role": "system", "content": SYSTEM_PROMPT[language]},
            {"role": "user", "content": question.format(name=name, **drawn.values)},
        ),
        answer=str(drawn.result),
        columns={
            "language": language,
            "steps": len(drawn.equations),
            "solution": f"<think>{thought}</think>\n{drawn.result}",
            "short_solution": f"<think>{_IN_THE_HEAD[language]}</think>\n{drawn.result}",
        },
    )
