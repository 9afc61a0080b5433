"""The law of ranks: two processes train as one does, in copies or in shares, and end together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ALL, CASES, HALF, SAVED, gap, largest, recorded, saved_model, settings, start
from small import MEASURED, rows
from torch import Tensor

KINDS = ("replicate", "fsdp")
TOLERANCE = 1e-6
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }


@dataclass
class Runs:
    """What the ranks left in `folder`, what they wrote on stderr, and the same cases in this process."""

    folder: Path
    told: str
    alone: dict[str, tuple[list[list[Tensor]], Path]]

    def found(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("ranks")
    script = [*LAUNCH, str(Path(__file__).with_name("ranks.py")), str(folder)]
    ranks = subprocess.Popen(script, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        alone = {}
        for case in CASES:
            with recorded() as (gradients, _):
                start(settings(case, folder / f"alone {case}"), case)
            alone[case] = gradients, folder / f"alone {case}"
        with recorded() as (gradients, _):
            start(settings("lora", folder / "alone half", **HALF), "lora")
        alone["half"] = gradients, folder / "alone half"
        for case in ("full", "lora"):
            start(settings(case, folder / f"saved alone {case}", **SAVED), case)
        told, _ = ranks.communicate(timeout=150)
    except BaseException:
        ranks.kill()
        told, _ = ranks.communicate()
        print(told)
        raise
    assert (folder / "done").exists(), told
    assert ranks.returncode != 0  # the last case hangs
    return Runs(folder, told, alone)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert {k: t.shape for k, t in one.items()} == {k: t.shape for k, t in other.items()}
    return max(float((one[k] - other[k]).abs().max()) for k in one)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_weights_are_those_of_one_process(kind: str, case: str, runs: Runs) -> None:
    gradients, alone = runs.alone[case]
    there: list[list[Tensor]] = torch.load(runs.folder / f"{kind} {case}.pt")
    assert len(there) == len(gradients) >= ALL["steps"] - 1
    assert (largest(gradients) > 1e-3) == (case != "nothing at all")
    assert gap(there, gradients) < TOLERANCE
    one, two = saved_model(alone), saved_model(runs.folder / f"{kind} {case}")
    assert apart(one, two) < TOLERANCE
    mine, theirs = rows(alone / "rollouts.jsonl"), rows(runs.folder / f"{kind} {case}" / "rollouts.jsonl")
    assert [(r["problem"], r["ids"], r["reward"]) for r in mine] == [
        (r["problem"], r["ids"], r["reward"]) for r in theirs
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_one_process_and_of_all_ranks(kind: str, case: str, runs: Runs) -> None:
    mine, theirs = (rows(run / "metrics.jsonl") for run in (runs.alone[case][1], runs.folder / f"{kind} {case}"))
    free = (*MEASURED, "micro_batches", "row_tokens")
    for one, two in zip(mine, theirs, strict=True):
        keys = [k for k in one if not k.startswith(free)]
        assert {k: two[k] for k in keys} == pytest.approx({k: one[k] for k in keys}, rel=1e-4, abs=1e-6)
    first, second = runs.found(f"{kind} {case} results")
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_work_is_shared_out_and_a_rank_may_have_none(kind: str, runs: Runs) -> None:
    first, second = runs.found(f"{kind} full counts")
    assert min(*first, *second) >= 1
    for both in zip(*runs.found(f"{kind} one rank has nothing counts"), strict=True):
        assert sorted(both)[0] == 0 < sorted(both)[1]
    assert {n for counts in runs.found(f"{kind} nothing at all counts") for n in counts} == {0}


def test_in_half_precision_shares_differ_by_its_rounding(runs: Runs) -> None:
    """bf16 has 8 bits: layers that are gathered in it, norms too, round a little otherwise than autocast does."""
    mine, _ = runs.alone["half"]
    copies, shares = (torch.load(runs.folder / f"{kind} half.pt") for kind in KINDS)
    assert gap(copies, mine) < TOLERANCE
    assert 0 < gap(shares, mine) < 2**-7 * largest(mine)


@pytest.mark.parametrize("then", ["1", "2 as replicate", "2 as fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_two(kind: str, then: str, runs: Runs) -> None:
    case = "lora" if kind == "fsdp" else "full"
    again = runs.folder / f"saved by {kind}, on {then}"
    left = {p.suffix for p in (runs.folder / f"saved by {kind}" / "checkpoint-2").iterdir()}
    assert (".distcp" in left) == (kind == "fsdp")
    assert (".safetensors" in left) == (kind == "replicate")
    if then == "1":
        start(settings(case, again, resume=str(again / "checkpoint-2"), **SAVED), case)
    alone = runs.folder / f"saved alone {case}"
    assert [r["step"] for r in rows(again / "metrics.jsonl")] == [1, 2, 3, 4]
    assert apart(saved_model(alone), saved_model(again)) < TOLERANCE
    shutil.rmtree(again / "checkpoint-2")
    assert (again / "checkpoint-4" / "manifest.json").exists()


def test_an_error_on_one_rank_ends_all_with_its_name(runs: Runs) -> None:
    first, second = runs.found("raises")
    assert first.startswith("Elsewhere: rank 1, all ranks' answers: ")
    assert "no such number" in first
    assert "no such number" in second


def test_ranks_that_start_from_other_problems_are_refused(runs: Runs) -> None:
    first, second = runs.found("not alike")
    assert first.startswith("ConfigError: rank 1 and rank 0 do not start alike: training problems")
    assert second.startswith("ConfigError: rank 0 and rank 1 do not start alike")


def test_a_signal_to_one_rank_ends_all_after_the_step_with_a_model(runs: Runs) -> None:
    assert runs.found("stopped") == [[True, 1], [True, 1]]
    assert saved_model(runs.folder / "stopped")


def test_fewer_prompts_than_ranks(runs: Runs) -> None:
    first, second = runs.found("few")
    assert first == second
    assert len(rows(runs.folder / "few" / "rollouts.jsonl")) == 3 * 4


def test_a_rank_that_does_not_come_is_named_and_all_say_where_they_are(runs: Runs) -> None:
    assert "rank 0, step 1, scoring, all ranks' answers, waited" in runs.told
    assert "rank 1 is in scoring of step 1, for" in runs.told
    assert "rank_timeout is 2 s" in runs.told
    assert "where rank 0 is:" in runs.told
    assert "where rank 1 is:" in runs.told
    assert "in never_comes" in runs.told  # rank 1's own stack
