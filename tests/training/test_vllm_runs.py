"""Runs that draw their answers from a vLLM server, a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, fake_vllm
from small import config, rows, run
from torch import nn

from groupline.config import Config, ConfigError
from groupline.parallel.mesh import World
from groupline.sampling import Engine, SamplerError
from groupline.sampling.vllm import VllmSampler
from groupline.training.grpo import train
from groupline.training.one_server import OneServer
from groupline.training.probe import probe
from groupline.training.setup import Setup, prepare


@pytest.fixture
def server(start: Path) -> Iterator[FakeVllm]:
    with fake_vllm(start) as fake:
        yield fake


def settings(server: FakeVllm, folder: Path, **changes: Any) -> Config:
    return config(folder, **{"sampler": "vllm", "vllm_url": server.url, "vllm_timeout": 20.0} | changes)


@pytest.mark.parametrize("lora", [{}, {"lora_r": 4}, {"lora_r": 4, "vllm_sync": "weights"}])
def test_a_run_through_the_server(
    server: FakeVllm, model: nn.Module, tokenizer: Any, tmp_path: Path, lora: dict[str, Any]
) -> None:
    results = run(settings(server, tmp_path / "run", steps=3, learning_rate=3e-2, **lora), model, tokenizer)
    assert len(results["steps"]) == 3
    versions = [row["policy_version"] for row in rows(tmp_path / "run" / "rollouts.jsonl")]
    assert versions == [0] * 12 + [1] * 12 + [2] * 12
    assert server.version == "3"
    for metrics in rows(tmp_path / "run" / "metrics.jsonl"):
        # The trainer's log-probs at the first pass are the server's, at every step: its weights are the trainer's.
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert not (tmp_path / "run" / "vllm").exists()


def test_the_adapter_alone_where_the_base_has_a_name(server: FakeVllm, start: Path, tmp_path: Path) -> None:
    asked = settings(server, tmp_path / "run", model=str(start), lora_r=4, eval_problems=2, eval_samples=2)
    train(asked, lambda line: None)
    assert "/update_weights" not in server.paths()
    assert sum(path == "/v1/load_lora_adapter" for path in server.paths()) == 3  # before, and after each of two steps


def test_a_sync_that_fails_ends_the_run(server: FakeVllm, model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    server.faults.add("ignores_weights")
    with pytest.raises(SamplerError, match="has version 1, but the log-prob"):
        run(settings(server, tmp_path / "run", learning_rate=3e-2), model, tokenizer)
    assert len(rows(tmp_path / "run" / "rollouts.jsonl")) == 0  # the step did not end


def test_probe_asks_the_server_too(server: FakeVllm, start: Path, tmp_path: Path) -> None:
    asked = settings(server, tmp_path / "run", model=str(start))
    found = probe(asked, samples=4, problems=2, sizes=(2, 4), say=lambda line: None)
    assert found["problems"] == 2
    assert any(path == "/inference/v1/generate" for path in server.paths())
    assert not (tmp_path / "run").exists()


def test_the_engine_is_the_default(model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    setup = prepare(config(tmp_path / "run"), lambda line: None, model=model, tokenizer=tokenizer,
                    problems=[{"prompt": "1+1=", "answer": "2"}], held_out=[])  # fmt: skip
    assert isinstance(setup.engine, Engine)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vllm_url": "http://x"}, "vllm_url is set, but the sampler is the engine; set sampler: vllm"),
        ({"vllm_restarts": 3, "vllm_timeout": 2.0}, "vllm_timeout is set.*vllm_restarts is set"),
    ],
)
def test_settings_of_a_server_without_one(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vllm_mode": "colocate", "vllm_url": "http://x"}, "vllm_url is for a server, and vllm_mode is colocate"),
        ({"vllm_mode": "colocate", "staleness": 1}, "staleness needs something that draws while the trainer works"),
        ({"vllm_sleep": True, "staleness": 1}, "vllm_sleep and staleness exclude each other"),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config(sampler="vllm", **changes)


def prepared(folder: Path, model: nn.Module, tokenizer: Any, **changes: Any) -> Setup:
    return prepare(config(folder, sampler="vllm", **changes), lambda line: None, model=model, tokenizer=tokenizer,
                   problems=[{"prompt": "1+1=", "answer": "2"}], held_out=[])  # fmt: skip


def test_sleep_without_a_gpu(model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm_sleep is set, and vLLM sleeps on GPUs only"):
        prepared(tmp_path / "run", model, tokenizer, vllm_sleep=True)


def test_colocated_without_vllm(model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    setup = prepared(tmp_path / "run", model, tokenizer, vllm_mode="colocate")
    with pytest.raises(ImportError, match=r"this Python has no vLLM: install vllm.*or use vllm_mode: server"):
        setup.engine.generate([[5, 6, 7]])


def test_ranks_on_several_machines_need_a_server_that_all_can_reach(
    model: nn.Module, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = prepared(tmp_path / "run", model, tokenizer).engine
    assert isinstance(sampler, VllmSampler)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    world = World()
    world.size = 8
    with pytest.raises(ConfigError, match="ranks are on several machines"):
        OneServer(sampler, world)


def test_an_adapter_that_there_is_not(model: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    asked = config(tmp_path / "run", sampler="vllm", vllm_sync="adapter")
    with pytest.raises(ConfigError, match="vllm_sync is adapter, and there is no fresh adapter"):
        prepare(asked, lambda line: None, model=model, tokenizer=tokenizer,
                problems=[{"prompt": "1+1=", "answer": "2"}], held_out=[])  # fmt: skip


def test_plain_log_probs_of_an_adapter_on_a_cpu(start: Path, tmp_path: Path) -> None:
    def base(**changes: Any) -> str | None:
        asked = config(tmp_path / "run", sampler="vllm", model=str(start), lora_r=4, **changes)
        engine = prepare(asked, lambda line: None, problems=[{"prompt": "1+1=", "answer": "2"}], held_out=[]).engine
        assert isinstance(engine, VllmSampler)
        return engine.options.base

    assert base() == str(start)
    assert base(eval_temperature=0) == str(start)
    assert base(temperature=0.8) is None
    with pytest.raises(ConfigError, match="cannot give the plain log-probs of several answers with an adapter"):
        base(top_k=5, vllm_sync="adapter")
