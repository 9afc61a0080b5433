"""A vLLM server's answers to one prompt, checked, and put where the engine puts its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupline.records import SamplingParams
from groupline.sampling.draft import Drafts
from groupline.sampling.sampler import SamplerError
from groupline.sampling.vllm_client import VllmClient

FLOOR = -9999.0  # what the server sends in place of a log-prob that is NaN or below


class StaleAnswer(SamplerError):
    """An answer was drawn from other weights than those it was asked from."""


def request_of(params: SamplingParams, n: int, seed: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters; nothing is left to the server's defaults. Answer i is drawn with seed + i."""
    return {
        "n": n,
        "seed": seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_tokens": params.max_new_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,  # every end that counts stands in stop_token_ids
        "logprobs": 0,  # the drawn token's own
        "skip_special_tokens": False,  # as the engine looks for stop strings
        "spaces_between_special_tokens": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
    }


def drawn_of(drafts: Drafts) -> int:
    """How many answers to a prompt are asked for: greedy ones are all equal, and the server refuses to repeat them."""
    return 1 if drafts.params.temperature == 0 else drafts.n


@dataclass(frozen=True)
class Answers:
    """The n answers to one prompt. drawn: ids and their log-probs under the distribution they were drawn from; plain:
    those log-probs under the plain model; ends: the server's finish reason, and the stop string if there was one.
    """

    prompt: int
    drawn: list[tuple[list[int], list[float]]]
    plain: list[list[float]]
    ends: list[tuple[str, str | None]]

    def record(self, drafts: Drafts) -> None:
        """Put the tokens into the drafts, which end each answer where the engine would.

        Raises SamplerError for an answer that the server cut off before its limit.
        """
        first = self.prompt * drafts.n
        rows, at = list(range(drafts.n)), 0  # answers that go on, and the place of their next token
        while rows:
            ids, logp = (np.array([self.drawn[i][part][at] for i in rows]) for part in (0, 1))
            plain = np.array([self.plain[i][at] for i in rows])
            ended = drafts.record([first + i for i in rows], ids, logp, plain)
            rows, at = [i for i, end in zip(rows, ended, strict=True) if not end], at + 1
            for i in [i for i in rows if at == len(self.drawn[i][0])]:
                reason, stop_string = self.ends[i]
                if stop_string is None:
                    raise SamplerError(
                        f"the vLLM server ended answer {i} to prompt {self.prompt} after {at} of "
                        f"{drafts.params.max_new_tokens} tokens for {reason!r}: its --max-model-len may be too small"
                    )
                drafts.end(first + i, stop_string)
                rows.remove(i)


def read_answers(
    said: Mapping[str, Any],
    client: VllmClient,
    drafts: Drafts,
    prompt: int,
    version: str,
    adapter: str | None,
    plain: bool = True,
) -> Answers:
    """The checked answers. plain: fetch log-probs under the plain model where the drawn ones are others.

    Raises StaleAnswer for another version, SamplerError for what is no whole answer.
    """
    where = f"{client.url}, prompt {prompt}"
    if adapter is not None and said.get("model") != adapter:
        raise StaleAnswer(f"{where}: the answers come from {said.get('model')!r}; asked was {adapter!r}")
    choices = sorted(said.get("choices") or (), key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(drawn_of(drafts))):
        raise SamplerError(f"{where}: {drawn_of(drafts)} answers were asked for, and {len(choices)} came")
    drawn, ends = [], []
    for number, choice in enumerate(choices):
        ids = [int(i) for i in choice.get("token_ids") or ()]
        reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
        if reason not in ("stop", "length") or not ids:
            raise SamplerError(f"{where}: answer {number} has {len(ids)} tokens and ended for {reason!r}")
        spans = choice.get("weight_versions") or ()
        if (versions := [span["version"] for span in spans]) != [version]:
            raise StaleAnswer(
                f"{where}: answer {number} was drawn by weights of version {', '.join(map(repr, versions)) or 'unknown'}; "
                f"asked was {version!r}"
            )
        content = (choice.get("logprobs") or {}).get("content") or ()
        if [token["token_id"] for token in content] != ids:
            raise SamplerError(f"{where}: answer {number} has {len(ids)} tokens and log-probs of {len(content)} others")
        drawn.append((ids, [_finite(token["logprob"], where, number) for token in content]))
        ends.append((reason, stop if isinstance(stop, str) else None))
    params = drafts.params
    if params.temperature == 0:  # the server gives the plain model's, and a greedy choice is certain
        [(ids, logp)] = drawn
        return Answers(prompt, [(ids, [0.0] * len(ids))] * drafts.n, [logp] * drafts.n, ends * drafts.n)
    same = not plain or (params.temperature == 1 and not params.filters)
    if same:
        return Answers(prompt, drawn, [logp for _, logp in drawn], ends)
    return Answers(prompt, drawn, _scored(client, drafts.prompts[prompt], [ids for ids, _ in drawn], adapter), ends)


def _finite(logp: float, where: str, number: int) -> float:
    if not logp > FLOOR:
        raise SamplerError(
            f"{where}: answer {number} has a token without a finite log-prob; the weights may have diverged"
        )
    return float(logp)


def _scored(
    client: VllmClient, prompt: Sequence[int], answers: Sequence[Sequence[int]], adapter: str | None
) -> list[list[float]]:
    """Log-probs of each answer's tokens under the plain model: one pass over prompt and answer."""
    body = request_of(SamplingParams(temperature=0, max_new_tokens=1), 1, 0, ()) | {"prompt_logprobs": 0}
    found: list[list[float]] = [[] for _ in answers]
    for number, said in client.generate_all([([*prompt, *ids], body) for ids in answers], adapter):
        rows = said["prompt_logprobs"][len(prompt) :]
        found[number] = [float(row[str(i)]["logprob"]) for row, i in zip(rows, answers[number], strict=True)]
    return found
