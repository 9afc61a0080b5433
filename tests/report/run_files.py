"""A run's files written by hand: small numbers, from which expected values follow by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SETTINGS: dict[str, Any] = {
    "model": "none-here",
    "tokenizer": None,
    "rewards": ["right", "form"],
    "reward_weights": [1.0, 0.5],
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 16,
    "steps": 4,
    "learning_rate": 1e-3,
}
PLAN = "     model  tiny: 10 weights\n objective  grpo: baseline mean\n reference  frozen copy, beta 0.04 on k3\n"
# Each group's answers: (right, tokens). Step 1: groups 0 and 1, and so on.
ANSWERS = {
    1: [[(1, 3), (0, 4), (0, 5), (0, 16)], [(0, 2), (0, 2), (0, 2), (0, 2)]],
    2: [[(1, 3), (1, 4), (0, 5), (0, 6)], [(1, 2), (1, 3), (1, 4), (1, 5)]],
    3: [[(1, 3), (1, 3), (1, 3), (0, 9)], [(0, 2), (1, 8), (0, 2), (0, 2)]],
    4: [[(1, 3), (1, 3), (1, 3), (1, 3)], [(1, 2), (1, 8), (0, 2), (1, 2)]],
}
TEXTS = (
    "</script><b>bold</b> <!-- ",
    "\u202bשלום\u202c עולם 12",
    "สวัสดี ราคา 5 บาท",
    "👩‍👩‍👧 \u2028 new line\n\ttab",
)
VOCABULARY = {"<think>": 0, "Ġone": 1, "à": 2, "¸ģ": 3, "Ċ": 4}  # 2 and 3 together are ก, which UTF-8 writes e0 b8 81


def write_lines(file: Path, rows: list[dict[str, Any]], torn: str = "") -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text + torn, encoding="utf-8")


def metrics(step: int) -> dict[str, Any]:
    groups = ANSWERS[step]
    flat = [answer for group in groups for answer in group]
    share = sum(right for right, _ in flat) / len(flat)
    mixed = sum(len({right for right, _ in group}) > 1 for group in groups) / len(groups)
    return {
        "step": step, "loss": 1e-9 * step, "reward": share + 0.5, "reward_std": 0.5, "accuracy": share,
        "rewards/right/mean": share, "rewards/form/mean": 1.0, "frac_groups_with_signal": mixed,
        "groups/all_right": sum(all(r for r, _ in g) for g in groups) / 2,
        "groups/all_wrong": sum(not any(r for r, _ in g) for g in groups) / 2, "groups/mixed": mixed,
        "completions/mean_length": sum(n for _, n in flat) / 8, "num_completion_tokens": float(sum(n for _, n in flat)),
        "completions/clipped_ratio": sum(n == 16 for _, n in flat) / 8, "num_tokens": 100 * step, "step_time": 2.0 * step,
        "entropy": 0.5, "kl": 0.001 * step, "grad_norm": 0.1, "learning_rate": 1e-3, "tokens_per_second": 50.0,
        "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.01, "time/generate": 1.0, "time/train": 1.0 * step,
    }  # fmt: skip


def answer(step: int, group: int, i: int, right: int, tokens: int, problem: str, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "group": group, "answer_number": i, "problem": problem,
        "prompt": [{"role": "user", "content": f"Problem {problem} <i>?"}], "gold": "7",
        "text": f"{TEXTS[i]} s{step}g{group}", "rewards": {"right": float(right), "form": 1.0}, "reward": right + 0.5,
        "advantage": right - 0.5, "finish_reason": "length" if tokens == 16 else "stop", "policy_version": step - 1,
        "ids": [t % 5 for t in range(tokens)], "logprobs": [-0.25] * tokens, **more,
    }  # fmt: skip


def rollouts() -> list[dict[str, Any]]:
    """The first group of each step is of the problem "again", the second of one of its own."""
    rows = [
        answer(step, g, i, right, tokens, "again" if g == 0 else f"p{step}")
        for step, groups in ANSWERS.items()
        for g, group in enumerate(groups)
        for i, (right, tokens) in enumerate(group)
    ]
    told = rows[0]  # step 1, group 0, answer 0: three tokens
    told["tokens"] = {
        "trained": True, "logprobs": [-0.3] * 3, "entropy": [0.1, 0.2, 0.3], "ratio": [1.0, 0.7, 1.5], "clipped": [0, -1, 1],
    }  # fmt: skip
    rows[1]["tokens"] = {"trained": False}
    return rows


def held_out(step: int, right: tuple[int, int]) -> list[dict[str, Any]]:
    """Two problems with four answers each, so many of them right."""
    return [
        answer(step, g, i, int(i < count), 5, f"h{g}", advantage=None)
        for g, count in enumerate(right)
        for i in range(4)
    ]


def write_run(folder: Path, *, steps: int = 4, finished: bool = True, tokenizer: bool = True, **settings: Any) -> Path:
    """`steps` of four; unfinished: the last line of every file is torn, and there is no end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings), encoding="utf-8")
    (folder / "plan.txt").write_text(PLAN, encoding="utf-8")
    torn = "" if finished else '{"step": 99, "text": "สว'
    write_lines(folder / "metrics.jsonl", [metrics(step) for step in range(1, steps + 1)], torn)
    write_lines(folder / "rollouts.jsonl", [row for row in rollouts() if row["step"] <= steps], torn)
    write_lines(folder / "held_out.jsonl", held_out(0, (1, 0)) + (held_out(steps, (4, 2)) if finished else []), torn)
    if tokenizer:
        made = {
            "model": {"vocab": VOCABULARY},
            "added_tokens": [{"id": 0, "content": "<think>"}],
            "decoder": {"type": "ByteLevel"},
        }
        (folder / "model").mkdir()
        (folder / "model" / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    if finished:
        (folder / "results.json").write_text(json.dumps({"interrupted": False, "held_out": {}}), encoding="utf-8")
    return folder
