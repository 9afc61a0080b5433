"""Every refusal names its cause and the remedy, comes before training where it can, and loses nothing on disk.

Configuration keys and values are in test_config.py, the reward contract in rewards/test_contract.py; here they meet a run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training.small import (
    EVEN,
    config,
    even_share,
    make_model,
    make_start,
    make_tokenizer,
    rows,
    run,
    sums,
    twin,
    weights,
)

from groupline import Config, ConfigError, Problem, Reward, RewardError
from groupline.models.load import choose_precision, load_model, load_tokenizer
from groupline.training.grpo import train
from groupline.training.optim import NonFinite

TALK = ({"role": "user", "content": "1+1="},)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def first(tokenizer: Any) -> nn.Module:
    return make_model(tokenizer)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture
def folder(start: Path, tmp_path: Path) -> Path:
    """A model folder to spoil."""
    return Path(shutil.copytree(start, tmp_path / "model"))


def problems_file(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


# Configuration


def test_an_unknown_key() -> None:
    with pytest.raises(
        ConfigError, match="unknown setting 'max_completion_lenght'; did you mean 'max_completion_length'"
    ):
        Config(max_completion_lenght=9)


def test_sizes_never_need_to_divide(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case G3: prompts are counted, not answers, so groups are whole by construction; micro-batches are memory only."""
    settings = config(tmp_path / "run", prompts_per_step=5, num_generations=3, micro_batch_tokens=37)
    run(settings, twin(first), tokenizer, problems=sums(7))
    assert len(rows(tmp_path / "run" / "rollouts.jsonl")) == 2 * 5 * 3
    assert all(m["micro_batches"] > 1 for m in rows(tmp_path / "run" / "metrics.jsonl"))
    with pytest.raises(ConfigError, match=r"it is prompts_per_step \(prompts, not answers\) and micro_batch_tokens"):
        Config(per_device_train_batch_size=10)


def test_a_group_of_one_and_greedy_training() -> None:
    """Case N2, and temperature 0."""
    with pytest.raises(
        ConfigError, match="num_generations is 1: a group of one has nothing to be compared with; use at least 2"
    ):
        Config(num_generations=1)
    with pytest.raises(
        ConfigError, match=r"temperature is 0\.0: greedy answers of a group are all equal, so nothing could be learned"
    ):
        Config(temperature=0)
    assert Config(eval_temperature=0).eval_temperature == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "grop"}, 'no objective is named "grop"; did you mean "grpo"? rows: grpo, dr_grpo,'),
        ({"task": "arithmetic_tt"}, "there is no task 'arithmetic_tt'; the nearest is 'arithmetic_th'"),
        ({"rewards": ["correct_numbr"]}, "there is no reward function 'correct_numbr'; the nearest built-in is 'correct_number'"),
        ({"reward_weights": [1.0]}, "1 reward_weights for the rewards correct_number, think_format, language_share"),
        ({"rewards": ["think_format"], "reward_weights": [1, 2]}, "1 rewards but 2 reward_weights; give one for each"),
        ({"rewards": ["./none.py:judge"]}, "reward './none.py:judge': there is no file 'none.py'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be cpu, cuda, cuda:1 or auto"),
        ({"precision": "fp8"}, "precision is 'fp8': Input should be 'auto', 'fp32', 'fp16' or 'bf16'"),
        ({"train_file": "mine.jsonl", "eval_problems": 0}, "mine.jsonl"),
        ({"epsilon": 0.0}, "Objective.clip_low is 0.0; it must be above 0"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(
    settings: dict[str, Any], message: str, tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        train(Config(model=str(start), output_dir="run", eval_samples=1, **settings), lambda line: None)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_precision_by_name() -> None:
    with pytest.raises(ValueError, match="precision is 'half'; it must be one of auto, fp32, fp16, bf16"):
        choose_precision("cpu", "half")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda', but torch finds no CUDA device here; use cpu, or auto"):
            choose_precision("cuda")


# Rewards, in the second step of a run


def second_step(bad: Callable[[int], Any]) -> Reward:
    """Good in the first step; in the second it returns `bad(number of answers)`, or raises."""
    calls = iter(range(100))

    def judge(completion_ids: list[list[int]], **_: Any) -> Any:
        return even_share(completion_ids) if next(calls) == 0 else bad(len(completion_ids))

    return Reward("my_judge", judge)


def with_one(value: Any) -> Callable[[int], list[Any]]:
    """0.5 for every row but row 3."""
    return lambda n: [value if i == 3 else 0.5 for i in range(n)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda n: [0.5] * (n - 1), "must return a list of 12 numbers or None; it returned 11"),
        (lambda n: 0.5, "must return a list of 12 numbers or None; it returned float"),
        (with_one(float("nan")), r"row 3 \(problem '.*'\) is 'nan' \(float\)"),
        (with_one(float("inf")), r"row 3 \(problem '.*'\) is 'inf' \(float\)"),
        (with_one("1"), r"row 3 \(problem '.*'\) is '1' \(str\)"),
        (with_one([1.0]), r"row 3 \(problem '.*'\) is '\[1.0\]' \(list\)"),
    ],
    ids=["too short", "one number", "nan", "inf", "text", "list"],
)
def test_a_reward_that_breaks_the_contract(
    bad: Callable[[int], Any], message: str, tmp_path: Path, first: nn.Module, tokenizer: Any
) -> None:
    """Case R2: function and row are named; the files of the steps before stay whole."""
    with pytest.raises(RewardError, match=f"reward function 'my_judge' .*{message}"):
        run(config(tmp_path / "run"), twin(first), tokenizer, rewards=[second_step(bad)])
    assert_one_whole_step(tmp_path / "run")


def test_a_reward_that_raises(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case R1: an exception never becomes 0."""
    calls = iter(range(100))

    def judge(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        if next(calls) > 0 and "12" in answer:
            raise KeyError("no such column")
        return even_share(completion_ids)

    settings = config(tmp_path / "run", steps=9, prompts_per_step=2)
    with pytest.raises(
        RewardError, match=r"'my_judge' raised KeyError on row [04] \(problem 'sum-3'\): 'no such column'"
    ):
        run(settings, twin(first), tokenizer, rewards=[Reward("my_judge", judge)], problems=sums(4))
    done = len(rows(tmp_path / "run" / "metrics.jsonl"))
    assert 1 <= done <= 3  # by when the problem comes round again
    assert len(rows(tmp_path / "run" / "rollouts.jsonl")) == 8 * done


def assert_one_whole_step(folder: Path) -> None:
    assert [m["step"] for m in rows(folder / "metrics.jsonl")] == [1]
    assert len(rows(folder / "rollouts.jsonl")) == 12
    assert Config.load(folder / "config.yaml").steps == 2
    assert not (folder / "results.json").exists()  # so nobody takes the run for a finished one


@pytest.mark.parametrize("values", [np.ones(12), torch.ones(12), [True] * 12, [np.float32(1)] * 12, (1,) * 12])
def test_scalars_of_other_libraries_are_numbers(values: Any, tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    run(config(tmp_path / "run"), twin(first), tokenizer, rewards=[second_step(lambda n: values)])
    assert rows(tmp_path / "run" / "metrics.jsonl")[1]["reward"] == 1


def test_a_reward_that_needs_a_column_nobody_has(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    def judge(completions: list[str], level: list[int]) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(
        RewardError, match="'judge' needs level; the columns are prompts, completions, completion_ids, answer"
    ):
        run(config(tmp_path / "run"), twin(first), tokenizer, rewards=[Reward("judge", judge)])


def test_diverged_weights_stop_the_run(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Whatever notices first, the sampler or the trainer, says so; no NaN is written."""
    policy = twin(first)
    with torch.no_grad():
        policy.get_input_embeddings().weight[5] = float("nan")  # type: ignore[operator]
    with pytest.raises((ValueError, NonFinite), match=r"not finite.*(diverged|training stopped)"):
        run(config(tmp_path / "run"), policy, tokenizer)
    assert rows(tmp_path / "run" / "metrics.jsonl") == []


# Problems


def test_a_prompt_over_the_limit(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"prompt of problem 'sum-11' has 7 tokens and the limit is 6; raise max_prompt_length"
    ):
        run(config(tmp_path / "run", max_prompt_length=6), twin(first), tokenizer, problems=[*sums(4), sums(12)[11]])
    assert not (tmp_path / "run").exists()


def test_a_missing_column(tmp_path: Path, start: Path) -> None:
    """Case D5: file, line, and the columns there are."""
    file = problems_file(tmp_path / "mine.jsonl", {"question": "1+1=", "answer": 2}, {"question": "1+2=", "gold": 3})
    with pytest.raises(ValueError, match=r"mine\.jsonl line 2 has no column 'answer'; its columns are question, gold"):
        train(Config(model=str(start), train_file=file, eval_problems=0, output_dir=str(tmp_path / "run")))
    with pytest.raises(ValueError, match=r"line 1 has no column 'ask'; its columns are question, answer"):
        train(
            Config(
                model=str(start),
                train_file=file,
                prompt_column="ask",
                eval_problems=0,
                output_dir=str(tmp_path / "run"),
            )
        )
    file = problems_file(tmp_path / "good.jsonl", {"question": "1+1=", "answer": 2})
    with pytest.raises(ValueError, match="give eval_file, or set eval_problems to 0"):
        train(Config(model=str(start), train_file=file, output_dir=str(tmp_path / "run")))


def test_columns_with_the_names_of_arguments(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case D4."""
    taken = [Problem("a", "1+1=", "2", {"completions": "x"})]
    with pytest.raises(RewardError, match="columns may not be called completions"):
        run(config(tmp_path / "run"), twin(first), tokenizer, problems=taken)


def test_gold_answers_without_a_number(tmp_path: Path, start: Path) -> None:
    """Case R17: found before training, rows named."""
    file = problems_file(
        tmp_path / "mine.jsonl", {"question": "1+1=", "answer": "2"}, {"question": "how many?", "answer": "see figure"}
    )
    settings = {"model": str(start), "train_file": file, "eval_problems": 0, "output_dir": str(tmp_path / "run")}
    with pytest.raises(
        ConfigError, match=r"of 1 problems hold no number, so correct_number cannot judge them: mine-2 \('see figure'\)"
    ):
        train(Config(**settings))
    assert not (tmp_path / "run").exists()


def test_gold_answers_that_are_no_mathematics(tmp_path: Path, start: Path) -> None:
    file = problems_file(tmp_path / "mine.jsonl", {"question": "1+1=", "answer": "2"}, {"question": "?", "answer": ""})
    settings = {"train_file": file, "eval_problems": 0, "rewards": ("math_verify",), "prompts_per_step": 2}
    with pytest.raises(
        ConfigError, match=r"of 1 problems cannot be read as mathematics, so math_verify .*: mine-2 \(''\)"
    ):
        train(Config(model=str(start), output_dir=str(tmp_path / "run"), **settings))
    assert not (tmp_path / "run").exists()


def test_rows_passed_in_are_read_by_the_settings(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Dicts in place of problems; a column that is not there is named with the row and the columns there are."""
    given = [{"ask": f"{n}+1=", "gold": n + 1} for n in range(4)]
    settings = config(tmp_path / "run", steps=1, prompt_column="ask", answer_column="gold")
    run(settings, twin(first), tokenizer, problems=given)
    written = rows(tmp_path / "run" / "rollouts.jsonl")
    assert {(r["prompt"], r["gold"]) for r in written} <= {(f"{n}+1=", str(n + 1)) for n in range(4)}
    with pytest.raises(ValueError, match=r"row 2 of problems has no column 'gold'; its columns are ask, answer"):
        run(config(tmp_path / "new", prompt_column="ask", answer_column="gold"), twin(first), tokenizer,
            problems=[given[0], {"ask": "1+1=", "answer": 2}])  # fmt: skip


def test_no_problems(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="there are no problems to train on"):
        run(config(tmp_path / "run"), twin(first), tokenizer, problems=[])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no problems"):
        train(Config(train_file=str(tmp_path / "empty.jsonl"), eval_problems=0, output_dir=str(tmp_path / "run")))


# The run folder


def test_a_folder_in_use(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case G4: refused, never mixed; overwritten on request, and then only a run's folder."""
    run(config(tmp_path / "run"), twin(first), tokenizer)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        ConfigError, match=r"run already holds a run; give another output_dir, or --overwrite True to delete"
    ):
        run(config(tmp_path / "run"), twin(first), tokenizer)
    for bad in ({"objective": "nothing"}, {"max_prompt_length": 1}):
        with pytest.raises(ConfigError):  # what asks to overwrite and then cannot run deletes nothing
            run(config(tmp_path / "run", overwrite=True, **bad), twin(first), tokenizer)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    run(config(tmp_path / "run", overwrite=True, steps=1), twin(first), tokenizer)
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="mine holds files that are not a run's, so it is not overwritten"):
        run(config(tmp_path / "mine", overwrite=True), twin(first), tokenizer)
    with pytest.raises(ConfigError, match="not overwritten"):
        run(config(tmp_path / "mine" / "thesis.txt", overwrite=True), twin(first), tokenizer)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    run(config(tmp_path / "empty"), twin(first), tokenizer)  # nothing is lost in an empty one


# Models


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"is not a folder in Hugging Face format \(config.json and safetensors\)"
    ):
        load_model(str(tmp_path / "nothing"))
    (tmp_path / "some.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; it holds some\.txt"):
        load_model(str(tmp_path))


def test_a_model_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model has no tokenizer \(tokenizer\.json\); copy .* or name one with the `tokenizer`"
    ):
        train(Config(model=str(folder), output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_template(tmp_path: Path, first: nn.Module) -> None:
    """Case M9: plain prompts still work."""
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(
        ValueError, match=r"has no chat template, and the prompt is a conversation; set .*, or use plain-text prompts"
    ):
        run(config(tmp_path / "run"), twin(first), bare, problems=[Problem("a", TALK, "2")])
    assert not (tmp_path / "run").exists()
    run(config(tmp_path / "run"), twin(first), bare)


class Bomb:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_in_place_of_weights(name: str, folder: Path, tmp_path: Path) -> None:
    """Case X4: refused by name, and not opened."""
    (folder / "model.safetensors").unlink()
    torch.save({"a": Bomb(tmp_path / "ran")}, folder / name)
    with pytest.raises(
        ValueError, match=rf"holds {name}, a pickle, which can run code when loaded; save .* \(safetensors\)"
    ):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors weights"):
        load_model(str(folder))


def test_code_in_a_model_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    """Case X6: transformers refuses it unless trust_remote_code says otherwise, and nobody is asked at a prompt."""
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in ("configuration_mine.py", "modeling_mine.py", "tokenization_mine.py"):
        (folder / name).write_text(code)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"(?s)contains custom code.*trust_remote_code=True"):
        load_model(str(folder))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"(?s)contains custom code.*trust_remote_code=True"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


def test_nothing_trainable(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    """Case L4."""
    with pytest.raises(
        ValueError, match="nothing is trainable: every parameter is frozen; load a PEFT adapter with is_trainable=True"
    ):
        run(config(tmp_path / "run"), twin(first).requires_grad_(False), tokenizer)
    assert not (tmp_path / "run").exists()


def test_an_adapter_on_an_adapter(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    from groupline.models.lora import add_lora

    with pytest.raises(
        ConfigError, match="lora_r is set, but the model passed in already has an adapter; set lora_r: 0"
    ):
        run(config(tmp_path / "run", lora_r=4), add_lora(twin(first), 4), tokenizer)


def test_what_is_refused_changes_no_weight(tmp_path: Path, first: nn.Module, tokenizer: Any) -> None:
    policy = twin(first)
    with pytest.raises(RewardError):
        run(config(tmp_path / "run"), policy, tokenizer, rewards=[EVEN, EVEN])  # one name twice
    assert all(torch.equal(a, b) for a, b in zip(weights(policy).values(), weights(first).values(), strict=True))
