"""Answers while they are being written: tokens, log-probs, and when each one ends. Arrays only, no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupline.records import Completion, SamplingParams
from groupline.sampling.choose import uniforms

OnGroup = Callable[[int, list[Completion]], None]


class Drafts:
    """All answers of one call; answer `number` to prompt p is row p * n + number.

    on_group: called with a prompt's number and its completions as soon as its last answer has ended.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        keys: Sequence[Hashable],
        eos_ids: Collection[int],
        tokenizer: Any,
        version: int = 0,
        on_group: OnGroup | None = None,
    ) -> None:
        self.prompts = [tuple(int(i) for i in p) for p in prompts]
        self.n, self.params, self.seed, self.keys, self.tokenizer = n, params, seed, keys, tokenizer
        self.version, self._on_group = version, on_group
        self._open = np.full(len(prompts), n)  # answers of each prompt that have not ended
        self.eos_ids = np.array([] if params.ignore_eos else sorted(eos_ids), dtype=np.int64)
        rows, width = len(prompts) * n, params.max_new_tokens
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._ids = np.zeros((rows, width), dtype=np.int64)
        self._logprobs = np.zeros((rows, width))
        self._plain = np.zeros((rows, width))
        self._uniforms = np.empty((rows, width))
        self._stopped = np.zeros(rows, dtype=bool)
        self._stop_strings: dict[int, str] = {}
        # Each token of a stop string holds at least one of its bytes; a few more tokens complete split characters.
        self._tail = max((len(s.encode()) for s in params.stop), default=0) + 4

    def uniform(self, rows: Sequence[int]) -> NDArray[np.float64]:
        for row in rows:
            if self.lengths[row] == 0:
                key = self.keys[row // self.n]
                self._uniforms[row] = uniforms(self.seed, key, row % self.n, self._uniforms.shape[1])
        values: NDArray[np.float64] = self._uniforms[rows, self.lengths[rows]]
        return values

    def uniforms_ahead(self, rows: Sequence[int], steps: int) -> NDArray[np.float64]:
        """[steps, rows] uniform numbers of the rows' next tokens; past its last token a row repeats that one's."""
        at = self.lengths[rows] + np.arange(steps)[:, None]
        values: NDArray[np.float64] = self._uniforms[rows, at.clip(max=self._uniforms.shape[1] - 1)]
        return values

    def last(self, rows: Sequence[int]) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = self._ids[rows, self.lengths[rows] - 1]
        return ids

    def restart(self, rows: Sequence[int]) -> None:
        self.lengths[rows] = 0

    def record(
        self, rows: Sequence[int], ids: NDArray[Any], logprobs: NDArray[Any], plain: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Append one token a row; which rows have ended."""
        at = self.lengths[rows]
        self._ids[rows, at] = ids
        self._logprobs[rows, at] = logprobs
        self._plain[rows, at] = plain
        self.lengths[rows] = at + 1
        stopped = np.isin(ids, self.eos_ids)
        if self.params.stop:
            for i, row in enumerate(rows):
                text = self.tokenizer.decode(self._ids[row, max(0, at[i] + 1 - self._tail) : at[i] + 1])
                hits = [s for s in self.params.stop if s in text]
                if hits and not stopped[i]:
                    self._stop_strings[row] = min(hits, key=text.index)
                    stopped[i] = True
        self._stopped[rows] = stopped
        ended: NDArray[np.bool_] = stopped | (at + 1 >= self.params.max_new_tokens)
        if ended.any():
            self._close(np.asarray(rows)[ended])
        return ended

    def end(self, row: int, stop_string: str | None) -> None:
        """End an answer where whoever drew it saw a stop string that `record` did not."""
        self._stopped[row] = True
        if stop_string is not None:
            self._stop_strings[row] = stop_string
        self._close(np.array([row]))

    def _close(self, rows: NDArray[Any]) -> None:
        """Count answers that have ended, and hand over the prompts that are complete with them."""
        if self._on_group is None:
            return
        prompts = rows // self.n
        np.subtract.at(self._open, prompts, 1)
        for prompt in np.unique(prompts[self._open[prompts] == 0]).tolist():
            self._on_group(prompt, self.group(prompt))

    def completions(self) -> list[list[Completion]]:
        return [self.group(prompt) for prompt in range(len(self.prompts))]

    def group(self, prompt: int) -> list[Completion]:
        """The answers to one prompt as they stand."""
        return [self._completion(row) for row in range(prompt * self.n, (prompt + 1) * self.n)]

    def _completion(self, row: int) -> Completion:
        length = self.lengths[row]
        return Completion(
            prompt_ids=self.prompts[row // self.n],
            ids=tuple(self._ids[row, :length].tolist()),
            logprobs=tuple(self._logprobs[row, :length].tolist()),
            plain_logprobs=tuple(self._plain[row, :length].tolist()),
            finish_reason="stop" if self._stopped[row] else "length",
            params=self.params,
            policy_version=self.version,
            stop_string=self._stop_strings.get(row),
        )
