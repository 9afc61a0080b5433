"""The command on a Ray cluster that somebody else started, with a token, on one machine or two: `make test-ray`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import saved_model
from test_ranks import TOLERANCE, apart, environment
from test_ray import MAIN, launched, recipe

from groupline.training.grpo import train

pytestmark = pytest.mark.ray
START = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
START += ["--object-store-memory", "80000000", "--disable-usage-stats"]
UP = 90.0  # seconds


@dataclass
class Cluster:
    address: str
    token: dict[str, str]
    machines: list[subprocess.Popen[bytes]]

    def add(self, *how: str) -> None:
        """One more machine, of one CPU, which is this one again."""
        self.machines.append(
            subprocess.Popen([*START, "--num-cpus", "1", *how], env=environment() | self.token, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True)
        )  # fmt: skip

    def lose(self) -> None:
        """The newest machine is gone without a word."""
        gone = self.machines.pop()
        os.killpg(gone.pid, signal.SIGKILL)
        gone.wait()

    def cpus(self) -> float:
        ask = f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level='error')"
        ask += "; print(ray.cluster_resources().get('CPU', 0))"
        done = subprocess.run([sys.executable, "-c", ask], env=environment() | self.token, capture_output=True, text=True,
                              check=False)  # fmt: skip
        return float(done.stdout.split()[-1]) if done.returncode == 0 else 0.0

    def wait_for(self, cpus: int) -> None:
        deadline = time.monotonic() + UP
        while self.cpus() != cpus:
            assert time.monotonic() < deadline, f"no cluster of {cpus} CPUs after {UP} s"
            time.sleep(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two machines of one CPU each, as `ray start` makes them; what they started ends with them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    made = Cluster(f"127.0.0.1:{port}", token, [])
    try:
        made.add("--head", "--port", str(port), "--include-dashboard", "false", "--node-ip-address", "127.0.0.1")
        made.wait_for(1)
        made.add("--address", made.address)
        made.wait_for(2)
        yield made
    finally:
        for machine in made.machines[::-1]:  # the head last: the others take their leave of it
            os.killpg(machine.pid, signal.SIGTERM)
            try:
                machine.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(machine.pid, signal.SIGKILL)
                machine.wait()


def test_without_the_token_or_with_another_it_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    recipe(tmp_path, steps=2)
    asked = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    for env in ({"HOME": str(tmp_path)}, asked, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        done = launched(tmp_path, "--nproc", "2", "--address", cluster.address, **env)
        assert done.returncode == 2, done.stdout
        assert f"groupline launch: --address {cluster.address}: " in done.stderr
        assert not (tmp_path / "run").exists()


def test_two_ranks_on_two_machines_make_the_run_of_one(cluster: Cluster, tmp_path: Path) -> None:
    """A machine has one CPU, so the ranks are on two. At first another job has one of the CPUs."""
    settings = recipe(tmp_path, steps=2)
    hold = f"import ray, time; ray.init({cluster.address!r}, log_to_driver=False)\n"
    hold += "@ray.remote(num_cpus=1)\ndef wait(): time.sleep(15)\n"
    hold += "busy = wait.remote(); time.sleep(3); print('holds', flush=True); ray.get(busy)"
    other = subprocess.Popen([sys.executable, "-c", hold], env=environment() | cluster.token, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "holds\n"
    done = launched(tmp_path, "--nproc", "2", "--address", cluster.address, "--strategy", "SPREAD", **cluster.token)
    assert done.returncode == 0, done.stderr
    assert other.wait(30) == 0
    other.stdout.close()
    train(settings.model_copy(update={"output_dir": str(tmp_path / "alone")}), lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(tmp_path / "run")) < TOLERANCE


def test_a_machine_that_is_lost_costs_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks start again when another machine has taken its place, from the newest checkpoint."""
    settings = recipe(tmp_path, steps=40)
    command = [
        *MAIN,
        "--nproc",
        "2",
        "--address",
        cluster.address,
        "--max-restarts",
        "1",
        str(tmp_path / "recipe.yaml"),
    ]
    job = subprocess.Popen(command, env=environment() | cluster.token, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)  # fmt: skip
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step  3/"):
            break
    cluster.lose()
    cluster.add("--address", cluster.address)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    said = [line for line in err.splitlines() if line.startswith("groupline launch: ")]
    assert len(said) == 1, err
    assert "lost its actor, which died; starting again from the newest checkpoint, restarts left: 0" in said[0]
    assert "resuming from " in out
    train(settings.model_copy(update={"output_dir": str(tmp_path / "alone")}), lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(tmp_path / "run")) < TOLERANCE
