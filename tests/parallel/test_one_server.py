"""Two ranks over one vLLM server (a fake one with its routes) make the run of one process over the same server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import saved_model
from fake_vllm import FakeVllm, fake_vllm
from small import rows
from test_launch import launched, recipe
from test_ranks import TOLERANCE, apart

from groupline.config import Config
from groupline.training.grpo import train


def settings(folder: Path, server: FakeVllm, **changes: Any) -> Config:
    file = Path(__file__).with_name("dies_twice.py")
    return recipe(folder).model_copy(
        update={"sampler": "vllm", "vllm_url": server.url, "output_dir": str(folder / "run"), "save_steps": 0,
                "rewards": (f"{file}:even_share",), "vllm_timeout": 20.0, "steps": 3} | changes
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", [{"parallel": "fsdp"}, {"parallel": "replicate", "lora_r": 4}], ids=["shares", "adapter alone"]
)
def test_ranks_share_a_server(kind: dict[str, Any], tmp_path: Path) -> None:
    recipe(tmp_path)
    with fake_vllm(tmp_path / "start") as server:
        asked = settings(tmp_path, server, **kind)
        asked.save(tmp_path / "recipe.yaml")
        done, _ = launched(tmp_path / "recipe.yaml")
        assert done.returncode == 0, done.stderr
        versions = [row["policy_version"] for row in rows(tmp_path / "run" / "rollouts.jsonl")]
        assert versions == [0] * 12 + [1] * 12 + [2] * 12
        handed = [path for path in server.paths() if path in ("/update_weights", "/v1/load_lora_adapter")]
        assert len(handed) == 4, "by one rank, before and after each step"
        assert server.version == "3"
        assert not (tmp_path / "run" / "vllm").exists()
    with fake_vllm(tmp_path / "start") as server:
        alone = settings(tmp_path, server, **kind | {"parallel": "auto", "output_dir": str(tmp_path / "alone")})
        train(alone, lambda line: None)
    assert apart(saved_model(tmp_path / "alone"), saved_model(tmp_path / "run")) < TOLERANCE


def test_a_hand_over_that_fails_ends_all_ranks(tmp_path: Path) -> None:
    recipe(tmp_path)
    with fake_vllm(tmp_path / "start") as server:
        server.faults.add("ignores_weights")
        settings(tmp_path, server, parallel="replicate", learning_rate=3e-2).save(tmp_path / "recipe.yaml")
        done, _ = launched(tmp_path / "recipe.yaml")
    assert done.returncode != 0
    assert "has version 1, but the log-prob of a token it drew" in done.stderr
