"""Whether an answer equals the gold one as mathematics, by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from groupline.rewards.text import CompletionLike, after_thinking, whole_texts
from groupline.rewards.worker_pool import Reply, WorkerPool

_LOG = logging.getLogger("groupline.rewards")


class MathVerify:
    """A reward function: 1.0 where the answer equals the gold one as mathematics, 0.0 where not, None where unknown.

    Numbers, fractions, roots, sets, intervals, matrices, equations and formulas, in LaTeX or plain; the last `\\boxed{}`
    counts before anything else. It is read after the thinking, and thinking that stays open is no answer (0.0).

    Comparisons run in worker processes. One that is not done after `seconds` is killed and replaced, and its answer is
    not judged (None), nor is one that takes its worker down, for want of memory for instance. How many is logged, sent
    to `log_metric` if the caller gives one (as `math_verify/timeouts` and `math_verify/died`), and kept here.

    workers: processes; by default as many as there are cores, at most 4.
    judged, timeouts, died: answers so far.
    """

    def __init__(self, *, seconds: float = 5.0, workers: int | None = None) -> None:
        self.__name__ = "math_verify"
        self.judged = self.timeouts = self.died = 0
        self._pool = WorkerPool("groupline.rewards.math_worker", workers or min(4, os.cpu_count() or 1), seconds)
        self._counts = threading.Lock()

    def __call__(
        self,
        *,
        completions: Sequence[CompletionLike],
        answer: Sequence[Any],
        prefill: str | Sequence[str] | None = None,
        log_metric: Callable[[str, float], Any] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """One value per completion. answer: gold answers, `#### n` and LaTeX with or without delimiters included.

        Raises:
            ImportError: math-verify is not installed.
            ValueError: a gold answer cannot be read (the rows are named), or there is not one per completion.
        """
        if len(answer) != len(completions):
            raise ValueError(f"answer has {len(answer)} rows for {len(completions)} completions")
        said = [after_thinking(text) for text in whole_texts(completions, prefill)]
        # Rows without an answer are asked with an empty one, so that their gold answers are checked as well.
        replies = self._ask(answer, [text or "" for text in said])
        unread = [r for r, reply in enumerate(replies) if isinstance(reply, dict) and not reply["gold"]]
        if unread:
            rows = ", ".join(f"row {row} ({str(answer[row])[:40]!r})" for row in unread[:5])
            raise ValueError(f"{len(unread)} gold answers cannot be read as mathematics: {rows}")
        self._count(replies, log_metric)
        return [float(reply["right"]) if isinstance(reply, dict) else None for reply in replies]

    def unreadable_answers(self, answers: Sequence[Any]) -> list[int]:
        """The rows whose gold answer cannot be read within the deadline, to be named before training starts."""
        different = list(dict.fromkeys(map(str, answers)))
        replies = dict(zip(different, self._ask(different, [""] * len(different)), strict=True))
        read = {gold for gold, reply in replies.items() if isinstance(reply, dict) and reply["gold"]}
        return [row for row, gold in enumerate(answers) if str(gold) not in read]

    def close(self) -> None:
        """End the worker processes; the next call starts new ones."""
        self._pool.close()

    def _ask(self, gold: Sequence[Any], texts: Sequence[str]) -> list[Reply]:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("the reward math_verify needs math-verify: pip install 'groupline[math]'")
        return self._pool.map([{"gold": str(g), "text": text} for g, text in zip(gold, texts, strict=True)])

    def _count(self, replies: Sequence[Reply], log_metric: Callable[[str, float], Any] | None) -> None:
        late, died = replies.count("timeout"), replies.count("died")
        with self._counts:
            self.judged += len(replies) - late - died
            self.timeouts += late
            self.died += died
        if log_metric is not None:
            log_metric("math_verify/timeouts", float(late))
            log_metric("math_verify/died", float(died))
        if late or died:
            _LOG.warning(
                "math_verify: of %d answers %d took longer than the deadline and %d ended their worker; they are not judged",
                len(replies),
                late,
                died,
            )


math_verify = MathVerify()
