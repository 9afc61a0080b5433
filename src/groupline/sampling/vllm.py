"""A sampler whose answers come from a vLLM server: weights handed over and verified, every answer's version checked."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupline.models.load import end_ids
from groupline.records import Completion, SamplingParams
from groupline.sampling.draft import Drafts, OnGroup
from groupline.sampling.sampler import SamplerError, checked
from groupline.sampling.vllm_answers import Answers, drawn_of, read_answers, request_of
from groupline.sampling.vllm_http import WIDTH, ServerFailed, ServerGone, VllmHttp
from groupline.sampling.vllm_publish import Publisher
from groupline.sampling.vllm_server import VllmServer

PROBE_LENGTH, PROBE_TOKENS, PROBE_TEMPERATURE = 8, 16, 0.5
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "half"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank


@dataclass(frozen=True)
class VllmOptions:
    """python: of the environment that has vLLM. url: of a server that runs already, in place of one that is started.
    folder: for the weights that are handed over, which the server must see, and its log; a temporary one by default.
    base: what the server loads where only the adapter is handed over; None: whole weights are. rank: the adapter's.
    arguments: further ones of `vllm serve`. cache_gib, max_rows: as of the engine. dtype: the server's, the policy's
    own by default. tolerance: most that a probe token's log-prob may differ from the policy's own, in nats.
    start_timeout, timeout: most seconds until a server is ready, and for one request. restarts: how often a server that
    died is started again.
    """

    python: str = "python"
    url: str | None = None
    folder: Path | None = None
    base: str | None = None
    rank: int = 0
    arguments: tuple[str, ...] = ()
    cache_gib: float | None = None
    max_rows: int = 256
    dtype: torch.dtype | None = None
    tolerance: float = 1e-3
    start_timeout: float = 600.0
    timeout: float = 1800.0
    restarts: int = 1


class VllmSampler:
    """Samples from `policy` on a vLLM server, which is started when it is first needed and ended by `close`.

    A `Sampler`. Draws are keyed as the engine's are, but are not the same draws. Raises SamplerError where the server
    cannot be had, dies more often than `restarts`, or answers from other weights than it was given.
    """

    def __init__(
        self, policy: nn.Module, tokenizer: Any, options: VllmOptions, notify: Callable[[str], None] = print
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="groupline-vllm-") if options.folder is None else None
        folder = options.folder or Path(self._temporary.name if self._temporary else "")
        self.options, self.tokenizer, self._notify = options, tokenizer, notify
        self.version = 0
        self.publisher = Publisher(policy, tokenizer, folder, options.base is not None, options.dtype)
        self.config = self.publisher.model.config
        self.eos_ids = end_ids(self.publisher.model, tokenizer)
        self.server = VllmServer(options.python, folder / "server.log", options.start_timeout)
        self.gap: float | None = None  # of the last verification, in nats
        self._client: VllmHttp | None = None
        self._loaded: int | None = None  # the version that the server is known to have
        self._adapter: str | None = None
        self._begun = self._closed = False
        self._restarts = options.restarts
        vocabulary = int(self.config.get_text_config().vocab_size)
        self._probe = [(97 * i + 11) % vocabulary for i in range(PROBE_LENGTH)]

    def load_weights(self, policy: nn.Module, version: int) -> None:
        """Hand the policy's weights over and verify them; before the server runs, they are what it will start with."""
        self.version, self._loaded = version, None
        if self._client is not None:
            self._ready()

    def stand_by(self) -> None:
        """Have a server run that has the newest weights: `generate` then reads nothing of the policy."""
        self._ready()

    def release(self) -> None:
        """The server keeps its memory."""

    def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()
        self._client = self._loaded = None
        self.server.stop()
        self.publisher.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        keys: Sequence[Hashable] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """As `Sampler.generate`: one request a prompt for its n answers, so the prompt is encoded once.

        An answer ends where the engine's would: its tokens pass through the same `Drafts`.
        """
        params = params or SamplingParams()
        keys = checked(prompts, n, params, keys, getattr(self.config, "max_position_embeddings", None), self.tokenizer)
        drafts = Drafts(prompts, n, params, seed, keys, self.eos_ids, self.tokenizer, self.version, on_group)
        waiting = list(range(len(prompts)))
        while waiting:
            client = self._ready()
            try:
                self._ask(client, drafts, waiting)
            except ServerGone as error:
                self._lost(error)
        return drafts.completions()

    def _ask(self, client: VllmHttp, drafts: Drafts, waiting: list[int]) -> None:
        """Ask for the waiting prompts' answers; each leaves `waiting` when they are in the drafts, whatever comes after."""

        def asked(prompt: int) -> Answers:
            key = f"{drafts.seed}|{drafts.keys[prompt]}"
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 2
            body = request_of(drafts.params, drawn_of(drafts), seed, drafts.eos_ids.tolist())
            said = client.generate(drafts.prompts[prompt], body, self._adapter)
            return read_answers(said, client, drafts, prompt, str(self.version), self._adapter)

        pool = ThreadPoolExecutor(min(WIDTH, len(waiting)))
        try:
            futures = {pool.submit(asked, prompt): prompt for prompt in waiting}
            gone: ServerGone | None = None
            for future in as_completed(futures):
                try:
                    answers = future.result()
                except ServerGone as error:
                    gone = gone or error
                    continue
                waiting.remove(futures[future])
                answers.record(drafts)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if gone is not None:
            raise gone

    def _lost(self, error: ServerGone) -> None:
        """Forget the server, so that the next call starts one; raises where none may be."""
        if self._client is not None:
            self._client.close()
        self._client = self._loaded = self._adapter = None
        self._begun = False
        if self.options.url is not None:
            raise SamplerError(f"{error}; the server at vllm_url is gone, and only its owner can start it") from error
        if self._restarts == 0:
            why = "vllm_restarts are used up (with staleness there are none)"
            raise SamplerError(f"{error}; {why}; {self.server.last_words()}") from error
        self._restarts -= 1
        self._notify(f"the vLLM server is gone ({error}): starting it again; answers that had come are kept")

    def _ready(self) -> VllmHttp:
        """A server that has this version's weights."""
        while True:
            if self._closed:  # perhaps by another thread than the one that draws, which must not start a server
                raise SamplerError("the sampler was closed")
            try:
                if self._client is None:
                    return self._start()
                if self._loaded != self.version:
                    self._hand_over(self._client)
                return self._client
            except ServerGone as error:
                self._lost(error)
            except ServerFailed as error:
                if self.server.alive():
                    raise SamplerError(f"{error}; {self.server.last_words()}") from error
                raise

    def _start(self) -> VllmHttp:
        options, began = self.options, time.perf_counter()
        if options.url is not None:
            client = self._client = VllmHttp(options.url, options.timeout)
            if not client.ready():
                raise SamplerError(f"no vLLM server answers at {options.url}/health (vllm_url)")
            self._hand_over(client)
        elif options.base is not None:
            client = self._client = self.server.start(options.base, self.arguments(), options.timeout)
            self._hand_over(client)
        else:
            folder = self.publisher.publish(self.version)
            client = self._client = self.server.start(str(folder), self.arguments(), options.timeout)
            client.label(str(self.version))
            self._verify(client)
        self._notify(
            f"vLLM at {client.url}, ready after {time.perf_counter() - began:.0f} s: the log-probs of {PROBE_TOKENS} "
            f"tokens it drew equal the trainer's within {self.gap:.1e} (at most {options.tolerance:g} is taken)"
        )
        return client

    def arguments(self) -> list[str]:
        """Of `vllm serve`, what this sampler needs and then what the options add."""
        dtype = next(self.publisher.model.parameters()).dtype
        on_cpu = next(self.publisher.model.parameters()).device.type == "cpu"
        gib = self.options.cache_gib or (1.0 if on_cpu else None)
        needed = ["--dtype", DTYPES[dtype], "--max-num-seqs", str(self.options.max_rows), "--seed", "0"]
        needed += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching"]
        needed.append("--enable-scale-out")  # the routes for token ids
        if gib is not None:
            needed += ["--kv-cache-memory-bytes", str(int(gib * 2**30))]
        if on_cpu:
            needed.append("--enforce-eager")
        if self.options.base is not None:
            rank = next((r for r in RANKS if r >= self.options.rank), RANKS[-1])
            needed += ["--enable-lora", "--max-lora-rank", str(rank)]
        needed += ["--worker-extension-cls", "groupline_vllm_weights.WeightFiles"]
        needed += ["--weight-transfer-config", json.dumps({"backend": "groupline_files"})]
        return [*needed, *self.options.arguments]

    def _hand_over(self, client: VllmHttp) -> None:
        """Publish the policy's weights, have the server load them, and verify that it did."""
        folder, label = self.publisher.publish(self.version), str(self.version)
        if self.publisher.adapter:
            name, old = f"policy-{label}", self._adapter
            if old != name:
                client.load_adapter(name, str(folder))
            self._adapter = name
            if old is not None and old != name:
                client.unload_adapter(old)
            client.label(label)
        else:
            client.update(str(folder), label, begin=not self._begun)
            self._begun = True
        self._verify(client)

    def _verify(self, client: VllmHttp) -> None:
        """Raises SamplerError unless the server says it has this version, and draws from its distribution."""
        label = str(self.version)
        if (has := client.version()) != label:
            raise SamplerError(
                f"{client.url} says its weights are version {has!r} after version {label!r} was handed over"
            )
        params = SamplingParams(temperature=PROBE_TEMPERATURE, max_new_tokens=PROBE_TOKENS, ignore_eos=True)
        said = client.generate(self._probe, request_of(params, 1, self.version, []), self._adapter)
        probe = Drafts([self._probe], 1, params, 0, ["probe"], [], self.tokenizer, self.version)
        [(ids, logp)] = read_answers(said, client, probe, 0, label, self._adapter, plain=False).drawn
        own = self.publisher.logprobs(self._probe, ids, PROBE_TEMPERATURE)
        gaps = (own - torch.tensor(logp)).abs()
        self.gap = float(gaps.max())
        if not self.gap <= self.options.tolerance:
            worst = int(gaps.argmax())
            raise SamplerError(
                f"{client.url} has version {label}, but the log-prob of a token it drew (number {worst} of the probe) is "
                f"{logp[worst]:.5f} there and {float(own[worst]):.5f} in the trainer; at most {self.options.tolerance:g} "
                "(vllm_tolerance) may lie between: it runs other weights, another number format, or without "
                "--logprobs-mode processed_logprobs"
            )
        self._loaded = self.version
