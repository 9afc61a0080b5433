"""The table of options against TRL's own dataclass, and its batch arithmetic and order against TRL's."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from typing import Any

import pytest

from groupline.cli import main
from groupline.config import ConfigError
from groupline.training.collect import Prompted
from groupline.trl import GRPOConfig
from groupline.trl.arguments import Plan
from groupline.trl.options import OLDER, OPTIONS
from groupline.trl.order import EpochStream, problems_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl
    from trl.trainer.utils import RepeatSampler


def theirs(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)


def test_no_option_is_missing_and_every_default_is_trls() -> None:
    known = {}
    for f in dataclasses.fields(trl.GRPOConfig):
        known[f.name] = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
    assert set(OPTIONS) == set(known)
    assert {n: o.default for n, o in OPTIONS.items()} == {n: getattr(v, "value", v) for n, v in known.items()}
    assert not set(OLDER) & set(known)


def test_each_option_that_is_not_honoured_says_why() -> None:
    for name, option in (OPTIONS | OLDER).items():
        assert option.fate in ("honoured", "ignored", "refused")
        assert option.note or option.fate == "honoured", name
        assert bool(option.allowed) or option.fate != "refused", name


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if o.allowed])
def test_values_that_are_not_taken_are_refused_by_name(name: str) -> None:
    option = OPTIONS[name]
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{name: "something else"})
    assert str(caught.value).startswith(f"{name}='something else' is not taken here: {option.note}")
    GRPOConfig(**{name: option.default})


def test_every_problem_in_one_message_and_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(num_generatoins=4, use_vllm=True, loss_type="sapo")
    message = str(caught.value)
    assert "no option 'num_generatoins'; did you mean 'num_generations'?" in message
    assert "use_vllm=True is not taken here: leave it out" in message
    assert "'cispo'" in message.split("loss_type='sapo'")[1]


def test_compat_prints_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*OPTIONS, *OLDER]
    assert "refused   leave it out: answers are drawn by groupline's own engine" in next(
        line for line in lines if line.startswith("use_vllm ")
    )


SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "steps_per_generation")
GRID = list(itertools.product((2, 4, 6), (1, 2, 3), (2, 4, 8), (None, 1, 2, 4)))


def test_batch_sizes_are_those_of_trl() -> None:
    """What TRL refuses is refused; what is taken has TRL's sizes."""
    taken = 0
    for values in GRID:
        options = dict(zip(SIZES, values, strict=True))
        try:
            expected = theirs(**options)
        except ValueError:
            with pytest.raises(ConfigError):
                GRPOConfig(**options)
            continue
        accumulate, slices = expected.gradient_accumulation_steps, expected.steps_per_generation
        if slices % accumulate and accumulate % slices:
            with pytest.raises(ConfigError, match=f"steps_per_generation .{slices}. must be a multiple"):
                GRPOConfig(**options)
            continue
        found = GRPOConfig(**options)
        assert found.generation_batch_size == expected.generation_batch_size
        assert found.steps_per_generation == slices
        taken += 1
    assert taken > 20


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"per_device_train_batch_size": 6}, "(6, that is per_device_train_batch_size 6 x steps_per_generation 1) must "
         "be a multiple of num_generations (8): 8 for instance"),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 5}, "16 or 24"),
        ({"num_generations": 1}, "use at least 2"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "give one of them"),
        ({"generation_batch_size": 20}, "must be a multiple of per_device_train_batch_size (8): 16 or 24"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, "with num_iterations 1"),
        ({"fp16": True, "bf16": True}, "give one"),
        ({"sync_ref_model": True}, "beta must be above 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_come_with_those_that_do(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**options)
    assert told in str(caught.value)


def hugging_face_updates(args: Any, problems: int) -> tuple[int, int]:
    """(updates of the run, of an epoch), as transformers' trainer counts them from TRL's data loader."""
    sampler = RepeatSampler(
        range(problems), args.num_generations, args.generation_batch_size // args.num_generations,
        args.num_iterations * args.steps_per_generation,
    )  # fmt: skip
    loader = len(sampler) // (args.per_device_train_batch_size * args.steps_per_generation)
    accumulate = args.gradient_accumulation_steps
    per_epoch = max(loader // accumulate + int(loader % accumulate > 0), 1)
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch), per_epoch


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("epochs", [1, 2.5])
@pytest.mark.parametrize("sizes", [(4, 1, 4, None), (4, 2, 4, None), (8, 2, 4, 4), (4, 4, 4, 1), (2, 2, 2, 6)], ids=str)
def test_epochs_and_order_are_those_of_trl(sizes: Any, epochs: float, iterations: int) -> None:
    """Cell by cell: the prompts of every rollout, over epochs with an incomplete rest."""
    options = dict(zip(SIZES, sizes, strict=True)) | {"num_train_epochs": epochs, "num_iterations": iterations}
    if (sizes[3] or sizes[1]) % sizes[1] and iterations > 1:
        return
    for problems in (13, 19, 24):
        ours, expected = GRPOConfig(**options), theirs(**options)
        plan = Plan.of(ours, problems)
        assert (plan.updates, plan.per_epoch) == hugging_face_updates(expected, problems)
        size, batch = expected.num_generations, expected.generation_batch_size // expected.num_generations
        repeats = expected.num_iterations * expected.steps_per_generation
        sampler = RepeatSampler(range(problems), size, batch, repeats, True, expected.seed)
        prompted = [Prompted(p, (i,), "") for i, p in enumerate(problems_of([{"prompt": "x"}] * problems, "rows"))]
        stream = EpochStream(prompted, batch, ours.generations_per_rollout, True, ours.seed)
        taken = [[p.ids[0] for p in stream.take(r, plan.prompts)] for r in range(plan.rollouts)]
        wanted: list[int] = []
        for _ in range(math.ceil(epochs)):
            drawn = list(sampler)[::size]  # once a group
            wanted += [i for at in range(0, len(drawn), batch * repeats) for i in drawn[at : at + batch]]
        flat = [i for rollout in taken for i in rollout]
        assert flat == wanted[: len(flat)]
        assert len(taken) == math.ceil(plan.updates * ours.generations_per_rollout / max(
            ours.generations_per_rollout, iterations * ours.updates_per_pass * ours.generations_per_rollout))  # fmt: skip


def test_too_few_prompts_for_a_generation_batch() -> None:
    args = GRPOConfig(num_generations=2)
    with pytest.raises(ConfigError, match=r"takes 4 prompts .* and there are 3"):
        Plan.of(args, 3)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"prompt": "1"}, {"question": "2"}], "train_dataset row 1 has no column 'prompt'; it has question"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], "row 0: prompt must be a text"),
        ([{"prompt": []}], "row 0: prompt must be a text"),
        (["1 + 1"], "row 0 is a str"),
        (iter([{"prompt": "1"}]), "train_dataset is a list_iterator; give a datasets.Dataset"),
    ],
)
def test_rows_that_are_not_problems(rows: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        problems_of(rows, "train_dataset")
    assert told in str(caught.value)


def test_a_row_keeps_its_columns_and_their_types() -> None:
    talk = [{"role": "user", "content": "1 + 1"}]
    (one,) = problems_of([{"prompt": talk, "answer": 2, "level": [1, 2], "completion": "left out"}], "rows")
    assert (one.prompt, one.answer, one.columns) == (tuple(talk), 2, {"level": [1, 2]})


def test_c45_how_many_updates() -> None:
    """24 answers are 4 prompts of 6: 8,000 prompts twice are 4,000 updates; 8 answers are 2 prompts of 4."""
    long = GRPOConfig(
        per_device_train_batch_size=12, gradient_accumulation_steps=2, num_generations=6, num_train_epochs=2
    )
    assert Plan.of(long, 8000).updates == 4000
    short = {"per_device_train_batch_size": 8, "num_generations": 4, "num_train_epochs": 1}
    assert Plan.of(GRPOConfig(**short), 12).updates == 6
    assert Plan.of(GRPOConfig(**short, num_iterations=3), 12).updates == 18
