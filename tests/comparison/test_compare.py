"""`groupline compare`: what each method is given, what is kept, and what the rows say, on a tiny random model."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training.small import make_model, make_start, make_tokenizer, plain_logprobs, rows, twin
from yaml import safe_load

from groupline.cli import main
from groupline.comparison import child
from groupline.comparison.facts import aggregate
from groupline.comparison.measure import kl_to_start
from groupline.comparison.run import compare, run_child
from groupline.comparison.settings import METHODS, CompareConfig, evaluation, jobs
from groupline.config import ConfigError
from groupline.models.process import own_peak
from groupline.records import Completion, Group, Problem, Rollout, SamplingParams
from groupline.runlog import write_json
from groupline.training.step import Scorer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    (folder / "judge.py").write_text(
        "def even(completion_ids, **_):\n    return [float(len(ids) and ids[0] % 2 == 0) for ids in completion_ids]\n"
    )
    make_start(folder / "model")
    return folder


def settings(start: Path, folder: Path, **changes: Any) -> CompareConfig:
    values = safe_load((HERE / "tiny.yaml").read_text(encoding="utf-8"))
    values |= {"model": str(start / "model"), "rewards": [f"{start}/judge.py:even"], "output_dir": str(folder)}
    return CompareConfig(**values | changes)


class Here:
    """Runs parts in this process, and remembers which."""

    def __init__(self, fails: str = "") -> None:
        self.ran: list[str] = []
        self.fails = fails

    def __call__(self, part: Path, job: dict[str, Any]) -> dict[str, Any]:
        if part.name == self.fails:
            raise KeyboardInterrupt
        self.ran.append(f"{part.parent.name}/{part.name}")
        file = part.with_name(f"{part.name}.job.json")
        write_json(file, job)
        assert child.main(file) == 0
        return {"seconds": 2.0, "peak_rss_bytes": 1000 + len(self.ran), "peak_device_bytes": None}


def quiet(line: str) -> None:
    pass


def test_every_method_from_the_recipe(start: Path, tmp_path: Path) -> None:
    """Interrupted after a part of it and gone on with; every row's numbers against the files of its parts."""
    config = settings(start, tmp_path / "out")
    first, second = Here(fails="dpo"), Here()
    with pytest.raises(KeyboardInterrupt):
        compare(config, quiet, first)
    assert first.ran[-1] == "seed-0/ppo"
    found = compare(config, quiet, second)
    assert "seed-0/sft" in first.ran
    assert second.ran == [f"seed-0/{m}" for m in METHODS[3:]] + ["seed-0/measure"]
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == found
    assert found["budget"] == {
        "problems": 6, "samples": 24, "policy_updates": 2, "answers_per_update": 12, "most_new_tokens": 192,
    }  # fmt: skip
    by = {r["method"]: r for r in found["rows"]}
    assert list(by) == ["start", *METHODS]
    place = tmp_path / "out" / "seed-0"
    pairs = rows(place / "pairs" / "train.jsonl")
    assert all((p["chosen_ids"][0] % 2, p["rejected_ids"][0] % 2) == (0, 1) for p in pairs)  # one right, one wrong
    pair_tokens = json.loads((place / "pairs" / "results.json").read_text())["train"]["tokens"]
    held = {"start": None, "sft": {"policy"}, "dpo": {"policy"}, "ppo": {"policy", "value", "reference"}}
    held |= {"ppo_reward_model": {"policy", "value", "reward", "reference"}, "grpo": {"policy", "reference"}}
    held |= {"rloo": {"policy", "reference"}} | {m: {"policy"} for m in ("reinforce", "dr_grpo", "dapo", "gspo")}
    weights = sum(p.numel() for p in make_model(make_tokenizer()).parameters())
    for name, r in by.items():
        assert set(r["right_per_problem"]) == set(by["start"]["right_per_problem"])
        assert r["kl"]["k3"]["per_token"] >= 0
        if name == "start":
            assert r["kl_per_answer"] == r["kl_per_token"] == 0
            continue
        assert r["kl_per_token"] > 0
        assert set(r["models"]) == held[name]
        assert r["models"]["policy"] == 4 * weights
        assert r["weight_bytes"] == sum(r["models"].values())
        assert r["policy_updates"] == 2
        drawn = 0
        if name not in ("sft", "dpo"):
            drawn = sum(int(m["num_completion_tokens"]) for m in rows(place / name / "metrics.jsonl"))
        from_pairs = name in ("dpo", "ppo_reward_model")
        assert r["generated_tokens"] == drawn + (pair_tokens if from_pairs else 0)
        assert r["samples"] == {"sft": 0, "ppo_reward_model": 48}.get(name, 24)
        assert r["pairs"] == (len(pairs) if from_pairs else 0)
        assert r["gold_solutions"] == (6 if name == "sft" else 0)
        assert r["gold_answers"] == (0 if name in ("sft", "dpo", "ppo_reward_model") else 6)
        assert r["seconds"] == 2.0 * {"dpo": 2, "ppo_reward_model": 3}.get(name, 1)
    assert by["ppo"]["other_updates"] == 2
    assert by["ppo_reward_model"]["other_updates"] == 4

    again = Here()
    more = compare(config.model_copy(update={"seeds": (0, 1), "methods": ("grpo", "sft")}), quiet, again)
    assert again.ran == ["seed-1/grpo", "seed-1/sft", "seed-1/measure"]  # what is whole is kept
    assert [r["seed"] for r in more["rows"]] == [0, 0, 0, 1, 1, 1]
    assert more["methods"][1]["pass@1"]["seeds"] == [
        r["pass@1"]["value"] for r in more["rows"] if r["method"] == "grpo"
    ]


def test_other_settings_are_refused_and_overwritten_on_request(start: Path, tmp_path: Path) -> None:
    config = settings(start, tmp_path / "out", methods=("reinforce", "dpo"))
    compare(config, quiet, Here())
    other = config.model_copy(update={"settings": {"reinforce": {"learning_rate": 1e-4}}})
    with pytest.raises(ConfigError, match=r"other settings \(.*seed-0/reinforce\); give another output_dir"):
        compare(other, quiet, Here())
    run = Here()
    compare(other.model_copy(update={"overwrite": True}), quiet, run)
    assert run.ran == ["seed-0/reinforce", "seed-0/measure"]
    assert len(json.loads((tmp_path / "out" / "seed-0" / "measure.job.json").read_text())["settings"]["models"]) == 1
    fewer = other.model_copy(
        update={"settings": {**other.settings, "pairs": {"num_generations": 6}}, "overwrite": True}
    )
    run = Here()
    compare(fewer, quiet, run)
    assert run.ran == ["seed-0/pairs", "seed-0/dpo", "seed-0/measure"]  # what was made of the pairs is made again
    with pytest.raises(ConfigError, match="other settings"):
        compare(fewer.model_copy(update={"eval_samples": 2, "overwrite": False}), quiet, Here())
    run = Here()
    compare(fewer.model_copy(update={"eval_samples": 2}), quiet, run)
    assert run.ran == ["seed-0/measure"]


def test_a_process_of_its_own(start: Path, tmp_path: Path) -> None:
    """The peak is that of the child's own memory; a failure is told with its last line."""
    given = evaluation(settings(start, tmp_path), 0).model_dump(mode="json")
    used = run_child(tmp_path / "load", {"run": "load", "settings": given})
    assert 100e6 < used["peak_rss_bytes"] < 4e9
    assert used["peak_device_bytes"] is None or torch.cuda.is_available()
    with pytest.raises(
        RuntimeError, match=r"bad failed \(exit status 1\): .*no/such/model.*; all it said is in .*bad.log"
    ):
        run_child(tmp_path / "bad", {"run": "load", "settings": given | {"model": "./no/such/model"}})


@pytest.mark.skipif(own_peak() is None, reason="the system does not tell a process its peak")
def test_a_peak_is_the_process_s_own() -> None:
    """300 MB filled and let go of again, whatever this process, the parent, holds; wait4 would have given its peak."""
    parent = bytearray(400 * 2**20)
    parent[::4096] = b"1" * len(parent[::4096])
    peaks = []
    for fill in (0, 300):
        code = (
            f"x = bytearray({fill} * 2**20); x[::4096] = b'1' * len(x[::4096]); del x\n"
            "from groupline.models.process import own_peak; print(own_peak())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[0] < 200 * 2**20
    assert 290 * 2**20 < peaks[1] - peaks[0] < 330 * 2**20
    assert len(parent) == 400 * 2**20


def test_what_each_method_is_given(start: Path, tmp_path: Path) -> None:
    config = settings(start, tmp_path, lora_r=4, settings={"dpo": {"beta": 0.3}, "ppo": {"gae_lambda": 1.0}})
    made = jobs(config, 7, tmp_path / "seed-7")
    assert list(made) == ["sft", "pairs", "reward_model", "ppo_reward_model", *METHODS[2:]]
    given: dict[str, Any] = {name: s for name, (_, s) in made.items()}
    for name, s in given.items():
        assert (s.seed, s.steps, s.learning_rate, s.lora_r) == (7, 2, 1e-3, 4)
        assert s.output_dir == str(tmp_path / "seed-7" / name)
    assert (given["sft"].problems, given["sft"].batch_size) == (6, 12)
    assert (given["dpo"].batch_size, given["dpo"].beta) == (6, 0.3)
    assert (given["ppo"].num_iterations, given["ppo"].gae_lambda, given["ppo"].reward_model) == (1, 1.0, None)
    assert given["ppo_reward_model"].reward_model == str(tmp_path / "seed-7" / "reward_model" / "model")
    assert given["gspo"].objective == "gspo"
    judged = evaluation(config, 7)
    assert (judged.lora_r, judged.eval_samples, judged.model) == (0, 4, config.model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("grop",)}, "there is no method 'grop'; did you mean 'grpo'"),
        ({"settings": {"dop": {}}}, "there is no method 'dop'; did you mean 'dpo'"),
        ({"settings": {"dpo": {"betta": 1}}}, "settings of dpo: unknown setting 'betta'; did you mean 'beta'"),
        ({"methods": ()}, "methods must name at least one"),
        ({"seeds": (1, 1)}, "seeds must name at least one seed, and none twice"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(settings(start, tmp_path / "out", **changes), quiet, Here())
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not a comparison's"):
        compare(settings(start, tmp_path), quiet, Here())
    assert main(["compare", "--output-dir", str(tmp_path)]) == 2
    assert "groupline compare:" in capsys.readouterr().err


def test_the_kl_by_one_answer_at_a_time() -> None:
    """Both estimators' means over tokens and answers, from plain forward passes; a model against itself has none."""
    tokenizer = make_tokenizer()
    first = make_model(tokenizer)
    moved = twin(first)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in moved.parameters():
            p += 0.05 * torch.randn(p.shape, generator=draw)
    groups, now, then = [], [], []
    for i, answers in enumerate((((5, 6, 7), (8,)), ((9, 10), (11, 12, 13, 14)), ((15,), (16, 17)))):
        prompt = (3, 4, 5 + i)
        made = [
            Completion(prompt, ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", SamplingParams()) for ids in answers
        ]
        groups.append(Group(Problem(str(i), "q"), tuple(Rollout(c, "", {}, 0.0) for c in made)))
        for ids in answers:
            with torch.no_grad():
                now.append(plain_logprobs(moved, prompt, ids).double().numpy())
                then.append(plain_logprobs(first, prompt, ids).double().numpy())
    found = kl_to_start(moved, first, groups, Scorer(), row_tokens=6)
    k1 = [a - b for a, b in zip(now, then, strict=True)]
    k3 = [np.exp(-d) + d - 1 for d in k1]
    for name, each in (("k1", k1), ("k3", k3)):
        assert found[name]["per_token"] == pytest.approx(np.concatenate(each).mean(), abs=1e-5)
        assert found[name]["per_answer"] == pytest.approx(statistics.fmean(e.sum() for e in each), abs=1e-5)
    low, high = found["k1_bootstrap"]
    assert low <= found["k1"]["per_answer"] <= high
    same = kl_to_start(first, first, groups, Scorer())
    assert same["k1"] == same["k3"] == {"per_token": 0, "per_answer": 0}


def made(method: str, seed: int, right: list[int], **more: Any) -> dict[str, Any]:
    n = 4
    return {
        "method": method, "seed": seed, "samples_per_problem": n, "models": {"policy": 4},
        "right_per_problem": {f"p{i}": c for i, c in enumerate(right)},
        "pass@1": {"value": statistics.fmean(c / n for c in right)},
        "pass@4": {"value": statistics.fmean(float(c > 0) for c in right)}, **more,
    }  # fmt: skip


def test_means_over_seeds() -> None:
    """By hand: a problem's value is its mean over seeds, and differences are paired by problem."""
    data = [
        made("start", 0, [0, 2, 4]), made("grpo", 0, [2, 4, 4], seconds=3.0), made("dpo", 0, [0, 4, 4], seconds=1.0),
        made("start", 1, [2, 2, 4]), made("grpo", 1, [4, 2, 4], seconds=5.0), made("dpo", 1, [2, 2, 4], seconds=1.0),
    ]  # fmt: skip
    start, grpo, dpo = aggregate(data, ["start", "grpo", "dpo"])
    assert grpo["pass@1"]["mean"] == pytest.approx((0.75 + 0.75 + 1) / 3)
    assert grpo["pass@1"]["seeds"] == pytest.approx([10 / 12, 10 / 12])
    assert (grpo["pass@1"]["sd"], grpo["seconds"]) == (0.0, {"mean": 4.0, "sd": pytest.approx(2**0.5)})
    assert start["pass@4"]["mean"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert start["pass@1"]["sd"] == pytest.approx(statistics.stdev([6 / 12, 8 / 12]))
    assert grpo["vs_start"]["pass@1"]["value"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert dpo["vs_grpo"]["pass@1"]["value"] == pytest.approx((-0.5 + 0 + 0) / 3)
    assert dpo["vs_grpo"]["pass@1"]["bootstrap"] == pytest.approx([-0.5, 0.0])
    assert "vs_grpo" not in grpo
    assert "vs_start" not in start
