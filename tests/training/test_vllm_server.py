"""The vLLM server as a child process: waited for, its log in the error, and gone with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, fake_vllm
from torch import nn

from groupline.records import SamplingParams
from groupline.sampling import SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.sampling.vllm_http import VllmHttp
from groupline.sampling.vllm_options import VllmOptions
from groupline.sampling.vllm_server import VllmServer

FAKE = Path(__file__).parent / "fake_package"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python whose environment has the fake vLLM."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{FAKE}" exec {sys.executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Those of the server and of its worker."""
    file = tmp_path / "pids"
    monkeypatch.setenv("FAKE_PIDS", str(file))
    yield lambda: [int(i) for i in file.read_text(encoding="utf-8").split()]
    for pid in file.read_text(encoding="utf-8").split() if file.exists() else []:
        if running(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


def test_it_is_started_and_ended_with_its_workers(python: str, tmp_path: Path, pids: Callable[[], list[int]]) -> None:
    server = VllmServer(python, tmp_path / "run" / "server.log", 30.0)
    client = server.start("some/model", ["--dtype", "float32"], 5.0)
    assert client.ready()
    assert server.alive()
    own = pids()
    assert all(map(running, own))
    server.stop()
    assert gone(own)
    assert not client.ready()
    client.close()
    server.stop()  # twice does no harm
    log = (tmp_path / "run" / "server.log").read_text(encoding="utf-8")
    assert "fake vLLM vllm serve some/model --host 127.0.0.1 --port" in log
    assert log.rstrip().endswith("--dtype float32 1")


def test_a_server_that_ends_early_shows_its_log(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    server = VllmServer(python, tmp_path / "server.log", 30.0)
    with pytest.raises(
        SamplerError, match=r"(?s)ended with code 1 before it was ready.*not enough memory for the fake"
    ):
        server.start("some/model", [], 5.0)
    assert not server.alive()


def test_a_server_that_is_not_ready_in_time_is_ended(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hangs")
    server = VllmServer(python, tmp_path / "server.log", 1.0)
    with pytest.raises(SamplerError, match=r"(?s)not ready after 1 s \(vllm_start_timeout\); the last lines of"):
        server.start("some/model", [], 5.0)
    assert server.process is None


def test_a_python_that_does_not_run(tmp_path: Path) -> None:
    server = VllmServer(str(tmp_path / "none"), tmp_path / "server.log", 1.0)
    with pytest.raises(SamplerError, match=r"vllm_python is .*none', which does not run"):
        server.start("some/model", [], 5.0)


def test_it_ends_with_a_trainer_that_is_killed(python: str, tmp_path: Path, pids: Callable[[], list[int]]) -> None:
    program = (
        "import sys, time; from pathlib import Path; from groupline.sampling.vllm_server import VllmServer;"
        f"VllmServer({python!r}, Path({str(tmp_path / 'server.log')!r}), 30.0).start('m', [], 5.0);"
        "print('ready', flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    own = pids()
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(own)


def test_a_server_killed_in_a_rollout_is_started_again_and_nothing_is_lost(
    model: nn.Module, tokenizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server answers three requests of the rollout and then none; the second gets the others."""
    open_: list[FakeVllm] = []
    contexts = []

    def begin(folder: str, arguments: list[str], timeout: float) -> VllmHttp:
        context = fake_vllm(Path(folder))
        fake = context.__enter__()
        fake.die_after = 1 + 3 if not open_ else None  # one is the probe
        open_.append(fake)
        contexts.append(context)
        return VllmHttp(fake.url, timeout)

    said: list[str] = []
    seen: list[int] = []
    sampler = VllmSampler(model, tokenizer, VllmOptions(folder=tmp_path / "vllm", tolerance=1e-4), said.append)
    monkeypatch.setattr(sampler.server, "start", begin)
    prompts = [[5 + i, 6] for i in range(8)]
    params = SamplingParams(max_new_tokens=4)
    found = sampler.generate(prompts, 2, params, seed=3, on_group=lambda prompt, own: seen.append(prompt))
    assert [list(answers[0].prompt_ids) for answers in found] == prompts
    assert sorted(seen) == list(range(8))  # each once
    assert [sum(path.endswith("generate") for path in fake.paths()) for fake in open_][1] == 1 + 5
    assert "starting it again" in said[1]
    whole = sampler.generate(prompts, 2, params, seed=3)  # the second server alone draws the same
    assert [[c.ids for c in own] for own in found] == [[c.ids for c in own] for own in whole]
    open_[1].die_after = 0
    with pytest.raises(SamplerError, match="vllm_restarts are used up"):
        sampler.generate(prompts, 2, params)
    sampler.close()
    for context in contexts:
        context.__exit__(None, None, None)
