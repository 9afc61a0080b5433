"""The built-in task: its problems, its splits, and its gold answers."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import get_args

import pytest

from groupline.records import Problem
from groupline.rewards.language import share
from groupline.tasks import check_gold, get_task
from groupline.tasks.arithmetic import NAMES, SYSTEM_PROMPT, TEMPLATES, generate
from groupline.tasks.arithmetic_templates import Language
from groupline.tasks.task import TASKS

LANGUAGES: tuple[Language, ...] = get_args(Language)
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
DO = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}


def question(problem: Problem) -> str:
    assert not isinstance(problem.prompt, str)
    return problem.prompt[1]["content"]


def numbers_and_words(problem: Problem, language: Language) -> str:
    """The question without its person's name: the same for two problems that differ by the name alone."""
    return re.sub("|".join(NAMES[language]), "@", question(problem))


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_gold_answer_earns_full_marks(task: str) -> None:
    assert check_gold(get_task(task), 4000) == 4000
    assert check_gold(get_task(task), 1000, "held_out", seed=5) == 1000


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_equation_holds_and_ends_in_the_answer(language: Language) -> None:
    for problem in generate(language, seed=1, count=2000):
        equations = EQUATION.findall(problem.columns["solution"])
        assert len(equations) == problem.columns["steps"]
        for left, sign, right, result in equations:
            assert DO[sign](int(left), int(right)) == int(result)
            assert 0 < int(result) < 1000
            if sign == "*":
                assert int(right) <= 12 or int(left) <= 12
        assert equations[-1][3] == problem.answer
        assert problem.columns["solution"].splitlines()[-1] == problem.answer
        asked = set(re.findall(r"\d+", question(problem)))
        computed = {result for *_, result in equations}
        assert {number for left, _, right, _ in equations for number in (left, right)} <= asked | computed
        assert len(problem.columns["solution"].encode()) < 300


@pytest.mark.parametrize("language", LANGUAGES)
def test_train_and_held_out_share_nothing(language: Language) -> None:
    train = {numbers_and_words(p, language) for seed in range(3) for p in generate(language, "train", seed, 3000)}
    held_out = {numbers_and_words(p, language) for seed in range(3) for p in generate(language, "held_out", seed, 1000)}
    assert not train & held_out


def test_a_translation_is_on_the_same_side() -> None:
    sides: dict[tuple[str, ...], set[str]] = {}
    for language, split in product(LANGUAGES, ("train", "held_out")):
        for problem in generate(language, split, 0, 1500, step_weights=(1, 0, 0)):
            words = re.sub(r"\d+", "#", numbers_and_words(problem, language))
            key = next(
                t.key for t in TEMPLATES[1] if re.sub(r"\{[a-z]\}", "#", _plain(t.wording(language)[0])) == words
            )
            sides.setdefault((key, *sorted(re.findall(r"\d+", question(problem)))), set()).add(split)
    assert len(sides) > 1500
    assert all(len(splits) == 1 for splits in sides.values())


def _plain(text: str) -> str:
    return text.replace("{name}", "@")


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_problem_comes_twice_and_the_seed_decides(language: Language) -> None:
    problems = generate(language, "train", 3, 3000)
    assert len({numbers_and_words(p, language) for p in problems}) == len({p.id for p in problems}) == 3000
    assert problems == generate(language, "train", 3, 3000)
    assert problems[:100] == generate(language, "train", 3, 100)
    assert problems[:100] != generate(language, "train", 4, 100)
    assert problems[12].id == f"arithmetic-{language}-train-3-000012"


def test_the_first_problem_never_changes() -> None:
    """Runs stay comparable between versions: a change here changes every recorded result of the task."""
    first = generate("th", "train", 0, 1)[0]
    assert first.columns["solution"] == "<think>มีนักเรียน 33 + 39 = 72 คน แบ่งได้ 72 / 4 = 18 กลุ่ม</think>\n18"
    assert first.answer == "18"


def test_wordings_say_the_same_in_every_language() -> None:
    keys = [t.key for templates in TEMPLATES.values() for t in templates]
    assert len(keys) == len(set(keys))
    for steps, templates in TEMPLATES.items():
        assert len(templates) >= 8
        for template in templates:
            assert len(template.steps) == steps
            wordings = [template.wording(language) for language in LANGUAGES]
            letters = {n for step in template.steps for n in re.findall("[abcdmn]", step)}
            for language, wording in zip(LANGUAGES, wordings, strict=True):
                assert len(wording) == steps + 1
                slots = re.findall(r"\{([a-z]+)\}", wording[0])
                assert set(slots) - {"name"} == letters
                assert Counter(s for s in slots if s != "name") == Counter(letters)
                assert all(clause.count("{}") == 1 for clause in wording[1:])
                assert all(share(clause.replace("{}", ""), language) > 0.5 for clause in wording)
            assert len({tuple(re.findall(r"\d+", wording[0])) for wording in wordings}) == 1


def test_difficulty() -> None:
    easy = generate("en", count=300, max_number=10, max_factor=5, step_weights=(3, 1, 0))
    steps = Counter(p.columns["steps"] for p in easy)
    assert set(steps) == {1, 2}
    assert all(
        int(n) <= 25 for p in easy if p.columns["steps"] == 1 for n in re.findall(r"\d+", question(p))
    )  # 5 * 5 is the largest number that is divided
    even = Counter(p.columns["steps"] for p in generate("en", count=3000))
    assert all(600 < even[n] < 1400 for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"language": "fr"}, "has en, th, zh"),
        ({"split": "test"}, "one of train, held_out"),
        ({"count": -1}, "0 or more"),
        ({"max_number": 2}, "at least 3"),
        ({"step_weights": (0, 0, 0)}, "three weights"),
        ({"step_weights": (1, 1)}, "three weights"),
        (
            {"count": 5000, "max_number": 5, "max_factor": 3, "step_weights": (1, 0, 0)},
            "different train problems where",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**arguments)  # type: ignore[arg-type]


def test_prompt_is_a_conversation_with_the_systems_words() -> None:
    problem = generate("zh", count=1)[0]
    assert not isinstance(problem.prompt, str)
    assert [m["role"] for m in problem.prompt] == ["system", "user"]
    assert problem.prompt[0]["content"] == SYSTEM_PROMPT["zh"]
    assert Problem.from_json(problem.to_json()) == problem


def test_mixed_takes_the_languages_in_turn() -> None:
    problems = get_task("arithmetic_mixed").problems("train", 8)
    assert [p.columns["language"] for p in problems] == ["th", "zh", "en", "th", "zh", "en", "th", "zh"]
    assert problems[3] == get_task("arithmetic_th").problems("train", 2)[1]


def test_unknown_task_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="no task 'arithmetic_tha'; the nearest is 'arithmetic_th'"):
        get_task("arithmetic_tha")
