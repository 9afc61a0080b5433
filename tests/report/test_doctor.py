"""A run's files, or TRL's log, to a diagnosis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupline.cli import main
from groupline.report.doctor import diagnose


def write(folder: Path, steps: int = 30, **columns: Any) -> Path:
    folder.mkdir()
    settings = {"max_completion_length": 64, "rewards": ["right", "form"], "reward_weights": [1.0, 0.1]}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [{"step": i + 1, "loss": 0.0, "reward": 0.3 + 0.02 * i, "reward_std": 0.4, **columns} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def held_out(folder: Path, shares: dict[int, float]) -> None:
    rows = [
        {"step": step, "rewards": {"right": float(i < 10 * share), "form": 1.0}}
        for step, share in shares.items()
        for i in range(10)
    ]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_healthy_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run")
    assert main(["doctor", str(run)]) == 0
    assert capsys.readouterr().out == f"healthy  {run}, 30 steps\n"


def test_a_broken_run_ends_with_1_and_says_where_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", **{"completions/clipped_ratio": 0.95})
    assert main(["doctor", str(run), str(write(tmp_path / "other"))]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"broken  {run}, 30 steps\nfirst at step 5\n")
    for words in ("answers cut off", "0.95", "max_completion_length"):
        assert words in out
    assert f"healthy  {tmp_path / 'other'}" in out


def test_held_out_answers_of_a_run_that_is_still_going(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    held_out(run, {0: 0.5, 20: 0.3})
    found = diagnose(run)
    assert (found.verdict, [a.name for a in found.alarms]) == ("broken", ["reward rises, held-out accuracy does not"])
    assert "50.0% to 30.0%" in found.alarms[0].evidence
    assert found.alarms[0].step == 20


def test_held_out_results_of_a_finished_run_go_first(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    held_out(run, {0: 0.5, 30: 0.3})
    history = [{"step": 0, "pass@1": 0.5}, {"step": 30, "pass@1": 0.8}]
    (run / "results.json").write_text(json.dumps({"held_out": {"history": history}}))
    assert diagnose(run).verdict == "healthy"


def test_the_cap_comes_from_the_settings(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**r, "completions/mean_length": 30 + 1.1 * i} for i, r in enumerate(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [a.name for a in diagnose(run).alarms] == ["length runs to the limit"]


def trl_history(steps: int = 20, **changes: Any) -> list[dict[str, Any]]:
    training = {"loss": 0.0, "reward": 0.5, "reward_std": 0.3, "frac_reward_zero_std": 0.1, "grad_norm": "0.2"}
    rows: list[dict[str, Any]] = [{**training, **changes, "step": i + 1} for i in range(steps)]
    return [*rows, {"eval_reward": 0.5, "step": steps}, {"train_runtime": 9.0, "train_loss": 0.0, "step": steps}]


def test_a_trl_state_in_its_folder_its_newest_checkpoint_or_alone(tmp_path: Path) -> None:
    for number, share in ((9, 0.1), (10, 0.97)):
        folder = tmp_path / "out" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        state = {"log_history": trl_history(**{"completions/clipped_ratio": share}), "global_step": number}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert diagnose(tmp_path / "out").verdict == "broken"
    assert diagnose(tmp_path / "out" / "checkpoint-9" / "trainer_state.json").verdict == "healthy"
    history = tmp_path / "history.json"
    history.write_text(json.dumps(trl_history(frac_reward_zero_std=0.9)))
    found = diagnose(history)
    assert (found.verdict, found.steps, [a.name for a in found.alarms]) == ("watch", 20, ["groups too hard"])


def test_numbers_that_trl_writes_as_text(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": trl_history(loss="nan")}))
    assert [a.name for a in diagnose(file).alarms] == ["loss not finite"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "has no log_history"),
        ('{"log_history": [{"loss": 1.0}]}', "none of the 1 rows .* has both a loss and a reward"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        diagnose(tmp_path)


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "no")]) == 2
    assert "holds neither metrics.jsonl (a groupline run) nor trainer_state.json" in capsys.readouterr().err
