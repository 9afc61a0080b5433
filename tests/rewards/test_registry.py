"""From names to reward functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from groupline import rewards
from groupline.rewards import Reward, get_reward, reward_list
from groupline.rewards.registry import BUILT_IN


def test_built_in_names_are_the_functions_names() -> None:
    assert {name: getattr(rewards, name) for name in BUILT_IN} == BUILT_IN
    assert get_reward("correct_number") is rewards.correct_number


def test_dotted_name_and_file(tmp_path: Path) -> None:
    assert get_reward("groupline.rewards.format.think_format") is rewards.think_format
    file = tmp_path / "own.py"
    file.write_text("def ones(*, completions, **kwargs):\n    return [1.0] * len(completions)\n")
    assert get_reward(f"{file}:ones")(completions=["a", "b"]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="'twos' is not a function there; these are: ones"):
        get_reward(f"{file}:twos")
    with pytest.raises(ValueError, match=r"there is no file '.*gone\.py'"):
        get_reward(f"{tmp_path / 'gone.py'}:ones")


@pytest.mark.parametrize(
    "name", ["corect_number", "no_such_package.correct_number", "groupline.gone.correct_number", ""]
)
def test_unknown_names_get_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match="the nearest built-in is '") as caught:
        get_reward(name)
    if name:
        assert "nearest built-in is 'correct_number'" in str(caught.value)


def test_a_broken_import_inside_own_code_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_module.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        get_reward("own_broken_module.reward")


def test_public_names_are_sorted_and_there() -> None:
    assert list(rewards.__all__) == sorted(rewards.__all__)
    assert all(hasattr(rewards, name) for name in rewards.__all__)


def test_a_list_of_names_functions_and_rewards() -> None:
    def brief(**kwargs: object) -> list[float]:
        return []

    class Judge:
        def __call__(self, **kwargs: object) -> list[float]:
            return []

    given = ["think_format", brief, partial(brief, limit=3), Judge(), Reward("own", brief, 0.5, timeout=3)]
    made = reward_list(given)
    assert [(r.name, r.weight) for r in made] == [
        ("think_format", 0.3), ("brief", 1.0), ("brief_2", 1.0), ("Judge", 1.0), ("own", 0.5)
    ]  # fmt: skip
    assert [r.function for r in made] == [rewards.think_format, *given[1:4], brief]
    weighted = reward_list(given, [1, 2, 3, 4, 5])
    assert [r.weight for r in weighted] == [1, 2, 3, 4, 5]
    assert weighted[4].timeout == 3
    with pytest.raises(ValueError, match="2 reward weights for 5 reward functions"):
        reward_list(given, [1, 2])


def test_timeouts_of_a_list() -> None:
    made = reward_list(["think_format", "correct_number"], None, [2.5, None])
    assert [(r.name, r.timeout, r.weight) for r in made] == [("think_format", 2.5, 0.3), ("correct_number", None, 1.0)]
    with pytest.raises(ValueError, match="1 reward timeouts for 2 reward functions"):
        reward_list(["think_format", "correct_number"], None, [2.5])
