"""What `groupline launch` makes of its arguments and gives to each rank; without Ray, and without other processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from groupline.cli import main
from groupline.parallel import launch_ray as ray_launcher
from groupline.parallel.launch import Place, Stop, describe, first_cause, mark, rank_environments, resumed
from groupline.parallel.launch_ray import Rank, RayOptions


def test_each_rank_gets_what_torchrun_would_set() -> None:
    places = [Place("a", "10.0.0.1", ("1",)), Place("b", "10.0.0.2", ("0",)), Place("a", "10.0.0.1", ("0",))]
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
    assert rank_environments(places, 29511) == [
        shared | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1,0"},
        shared | {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0"},
        shared | {"RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1,0"},
    ]
    assert "CUDA_VISIBLE_DEVICES" not in rank_environments([Place("a", "10.0.0.1")], 1)[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["c.yaml"], ["c.yaml", "--resume"]),
        (["c.yaml", "--resume"], ["c.yaml", "--resume"]),
        (["c.yaml", "--resume", "--steps", "3"], ["c.yaml", "--steps", "3", "--resume"]),
        (["c.yaml", "--resume", "run/checkpoint-2", "--steps", "3"], ["c.yaml", "--steps", "3", "--resume"]),
        (["c.yaml", "--resume=run/checkpoint-2"], ["c.yaml", "--resume"]),
    ],
)
def test_a_restart_goes_on_from_the_newest_checkpoint(given: list[str], expected: list[str]) -> None:
    assert resumed(given) == expected


def test_a_run_that_never_began_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert mark(tmp_path) is None
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    older = mark(tmp_path)
    assert older == mark(tmp_path)
    os.utime(tmp_path / "config.yaml", ns=(1, 1))
    assert mark(tmp_path) not in (None, older)


def test_the_cause_is_the_rank_that_was_killed() -> None:
    ends = {0: describe(2, "groupline train: rank 1 is gone"), 1: describe(-9, ""), 2: describe(1, "")}
    assert ends == {
        0: "ended with status 2: groupline train: rank 1 is gone", 1: "was ended by SIGKILL", 2: "ended with status 1"
    }  # fmt: skip
    assert first_cause(ends) == 1
    assert first_cause({2: ends[2], 0: ends[0]}) == 0
    assert first_cause({0: describe(2, ""), 1: describe(2, "groupline train: no such number")}) == 1, (
        "the one that spoke"
    )


def test_the_first_signal_asks_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def run_of(tmp_path: Path) -> str:
    (tmp_path / "recipe.yaml").write_text(f"steps: 3\noutput_dir: {tmp_path}/run\ndevice: cpu\n")
    return str(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nproc", "0"], "--nproc is 0; it must be at least 1"),
        (["--max-restarts", "-1"], "--max-restarts is -1; it must be at least 0"),
        (["--ray", "--stepz", "3"], "unknown setting 'stepz'; did you mean 'steps'?"),
        (["--address", "auto"], "--address and --strategy are for Ray; add --ray, or leave them out"),
        (["--max-restarts", "2"], "give --resume as well, or --ray, which adds it by itself"),
    ],
)
def test_what_launch_refuses(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("nothing is to be started"))
    assert main(["launch", run_of(tmp_path), *args]) == 2
    told = capsys.readouterr().err
    assert told.startswith("groupline launch: ")
    assert message in told


def test_without_ray_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "--ray", run_of(tmp_path)]) == 2
    assert capsys.readouterr().err == "groupline launch: launch --ray needs Ray: pip install 'groupline[ray]'\n"


def test_no_cluster_at_the_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # which is not asked
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["launch", "--ray", "--address", address, run_of(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"groupline launch: --address {address}: no Ray cluster to be used there (")
    assert "start one with `ray start --head`" in told


def test_ray_is_given_the_recipe_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ray_launcher, "launch_ray", lambda *given: seen.append(given) or 130)
    recipe, run = run_of(tmp_path), tmp_path / "run"
    assert (
        main(["launch", "--ray", "--nproc", "4", "--max-restarts=2", recipe, "--steps", "5", "--strategy", "SPREAD"])
        == 130
    )
    assert main(["launch", recipe, "--ray", "--address", "auto", "--device", "auto"]) == 130
    assert seen == [
        ([recipe, "--steps", "5"], run, "cpu", RayOptions(4, 2, None, "SPREAD")),
        ([recipe, "--device", "auto"], run, "auto", RayOptions(None, 0, "auto", "PACK")),
    ]


def test_without_ray_torchrun_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def execv(path: str, command: list[str]) -> None:
        raise Replaced(path, *command)

    monkeypatch.setattr(os, "execv", execv)
    recipe = run_of(tmp_path)
    with pytest.raises(Replaced) as found:
        main(["launch", "--nproc", "2", "--max-restarts", "1", recipe, "--resume", "--steps", "5"])
    told = " ".join(found.value.args[1:])
    assert found.value.args[0] == sys.executable
    assert told == (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m groupline train "
        f"{recipe} --resume --steps 5"
    )


def until_ended(rank: Rank) -> tuple[list[tuple[str, str]], int]:
    lines, deadline = [], time.monotonic() + 60
    while time.monotonic() < deadline:
        more, status = rank.poll()
        lines += more
        if status is not None:
            return lines, status
        time.sleep(0.05)
    raise AssertionError("it does not end")


def test_an_actor_starts_the_command_and_hands_on_what_it_writes(tmp_path: Path) -> None:
    """The class of the actors, without Ray: its process is `groupline train`, in the folder that is given."""
    rank = Rank()
    assert rank.poll() == ([], None)
    with pytest.raises(FileNotFoundError, match=r"has no folder .*nowhere, where `groupline launch` was called"):
        rank.start([], {}, str(tmp_path / "nowhere"))
    (tmp_path / "mine.yaml").write_text("stepz: 3\n")
    rank.start(["mine.yaml"], {"RANK": "0"}, str(tmp_path))
    lines, status = until_ended(rank)
    assert status == 2
    assert lines == [("stderr", "groupline train: unknown setting 'stepz'; did you mean 'steps'?\n")]


def test_a_tied_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import sys, time\nprint(sys.argv[1:], flush=True)\ntime.sleep(60)\n")
    tied = subprocess.Popen(
        [sys.executable, "-m", "groupline.parallel.tied", "sleeper", "a", "--b"], cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert tied.stdout is not None
    assert tied.stdin is not None
    assert tied.stdout.readline() == "['a', '--b']\n"
    assert tied.poll() is None
    tied.stdin.close()  # as when the parent dies
    assert tied.wait(timeout=20) == -signal.SIGKILL
    tied.stdout.close()
