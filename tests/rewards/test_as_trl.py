"""The same reward functions called by TRL's trainer and by groupline: what they receive and what comes of it."""

from __future__ import annotations

import asyncio
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupline.records import Problem
from groupline.rewards import RunState, call_rewards, reward_list

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl_trainer: Any = pytest.importorskip("trl.trainer.grpo_trainer")
TALK = [{"role": "user", "content": "q"}]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def by_trl(functions: list[Any], rows: list[dict[str, Any]], completions: list[Any], ids: Any, loop: Any) -> Any:
    """(rewards [rows][functions], extra columns, metrics) of TRL's own code."""
    cls = trl_trainer.GRPOTrainer
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True), args=SimpleNamespace(report_to=[]),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions), reward_func_names=[f"f{i}" for i in range(len(functions))],
        state=RunState(global_step=2), environments=None, async_loop=loop,
        _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list),
    )  # fmt: skip
    fake._log_completion_extra = lambda *a: cls._log_completion_extra(fake, *a)
    fake._log_metric = lambda *a: cls._log_metric(fake, *a)
    values = cls._calculate_rewards.__wrapped__(fake, rows, [row["prompt"] for row in rows], completions, ids)
    return values.tolist(), dict(fake._pending_extra_logs), dict(fake._pending_metrics)


def watched(seen: list[Any]) -> list[Callable[..., Any]]:
    def whole(**kwargs: Any) -> list[float | None]:
        seen.append({k: v for k, v in kwargs.items() if not callable(v)} | {"names": sorted(kwargs)})
        kwargs["log_extra"]("place", list(range(len(kwargs["answer"]))))
        kwargs["log_metric"]("first", 0.5)
        return [None, *[0.25] * (len(kwargs["answer"]) - 1)]

    def named(completions: Any, answer: Any, log_metric: Any = None, **kwargs: Any) -> torch.Tensor:
        seen.append((completions, answer, sorted(kwargs)))
        log_metric("first", 1.0)
        return torch.tensor([float(str(a) in str(c)) for a, c in zip(answer, completions, strict=True)])

    async def later(prompts: Any, completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        seen.append((prompts, completions, trainer_state.global_step))
        return [float(trainer_state.global_step)] * len(prompts)

    return [whole, named, later]


@pytest.mark.parametrize("talk", [False, True])
def test_functions_cannot_tell_who_calls_them(talk: bool, loop: asyncio.AbstractEventLoop) -> None:
    prompt: Any = TALK if talk else "q"
    texts = ["the 1", "3", "the 3"]
    rows = [{"prompt": prompt, "answer": str(i), "level": i} for i in (1, 2, 3)]
    ids = [[1], [2, 3], []]
    told: list[Any] = []
    shaped = [[{"role": "assistant", "content": t}] for t in texts] if talk else texts
    values, extras, metrics = by_trl(watched(told), rows, shaped, ids, loop)

    seen: list[Any] = []
    functions = watched(seen)
    scores = call_rewards(
        reward_list(functions),
        problems=[
            Problem(str(i), tuple(prompt) if talk else prompt, row["answer"], {"level": row["level"]})
            for i, row in enumerate(rows)
        ],
        completions=texts,
        completion_ids=ids,
        trainer_state=RunState(global_step=2),
    )
    assert sorted(seen, key=repr) == sorted(told, key=repr)  # in any order: here they run beside each other
    for row, expected in zip(scores.rows, values, strict=True):
        assert [math.nan if v is None else v for v in row.values()] == pytest.approx(expected, nan_ok=True)
    assert [row["place"] for row in scores.extras] == extras["place"]
    assert scores.metrics == {"first": sum(metrics["first"]) / len(metrics["first"])}
