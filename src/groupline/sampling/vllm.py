"""A sampler whose answers come from vLLM: weights handed over and verified, every answer's version checked."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupline.models.load import end_ids
from groupline.models.lora import Mirror
from groupline.records import Completion, SamplingParams
from groupline.sampling.draft import Drafts, OnGroup
from groupline.sampling.sampler import SamplerError, checked
from groupline.sampling.vllm_answers import drawn_of, read_answers, request_of
from groupline.sampling.vllm_client import ServerFailed, ServerGone, VllmClient
from groupline.sampling.vllm_colocated import VllmHere
from groupline.sampling.vllm_http import VllmHttp
from groupline.sampling.vllm_options import VllmOptions
from groupline.sampling.vllm_publish import Publisher
from groupline.sampling.vllm_server import VllmServer

PROBE_LENGTH, PROBE_TOKENS, PROBE_TEMPERATURE = 8, 16, 0.5


class VllmSampler:
    """Samples from `policy` on vLLM, which is started when it is first needed and ended by `close`.

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
        self.server: VllmServer | VllmHere = (
            VllmHere(folder / "engine.log")
            if options.colocated
            else VllmServer(options.python, folder / "server.log", options.start_timeout)
        )
        self.gap: float | None = None  # of the last verification, in nats
        self._client: VllmClient | None = None
        self._loaded: int | None = None  # the version that the server is known to have
        self._sleeps = options.sleeps(next(self.publisher.model.parameters()).device)
        self._asleep = False
        self._adapter: str | None = None
        self._begun = self._closed = False
        self._restarts = options.restarts
        vocabulary = int(self.config.get_text_config().vocab_size)
        self._probe = [(97 * i + 11) % vocabulary for i in range(PROBE_LENGTH)]

    def load_weights(self, policy: nn.Module, version: int) -> None:
        """Hand the policy's weights over and verify them; before vLLM runs, they are what it will start with."""
        self.take(version)
        if self._client is not None:
            self._ready()

    def take(self, version: int) -> None:
        """The first half of `load_weights`: the policy's weights as they are, which are yet to be handed over."""
        self.publisher.refresh()
        self.version, self._loaded = version, None

    def stand_by(self) -> None:
        """Have a server run that has the newest weights: `generate` then reads nothing of the policy."""
        self._ready()

    def lead(self) -> str:
        """`stand_by`, and the server's address for those that follow."""
        return self._ready().url

    def follow(self, url: str) -> None:
        """Ask the server at this address, which has this sampler's version, from now on."""
        if self._client is None:
            self._client = VllmHttp(url, self.options.timeout)
        self._loaded = self.version
        if self.publisher.adapter:
            self._adapter = adapter_name(self.version)

    @property
    def mirror(self) -> Mirror:
        return self.publisher.mirror

    def release(self) -> None:
        """Put vLLM to sleep where it is to sleep; otherwise it keeps its memory."""
        if self._sleeps and not self.options.follows and self._client is not None and not self._asleep:
            self._client.sleep(self.options.sleep_level())
            self._asleep, self._loaded = True, None

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

    def _ask(self, client: VllmClient, drafts: Drafts, waiting: list[int]) -> None:
        """Ask for the waiting prompts' answers; each leaves `waiting` when they are in the drafts, whatever comes after."""

        def request(prompt: int) -> tuple[Sequence[int], dict[str, Any]]:
            key = f"{drafts.seed}|{drafts.keys[prompt]}"
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 2
            return drafts.prompts[prompt], request_of(drafts.params, drawn_of(drafts), seed, drafts.eos_ids.tolist())

        asked = list(waiting)
        with closing(client.generate_all([request(prompt) for prompt in asked], self._adapter)) as coming:
            for number, said in coming:
                answers = read_answers(said, client, drafts, asked[number], str(self.version), self._adapter)
                waiting.remove(asked[number])
                answers.record(drafts)

    def _lost(self, error: ServerGone) -> None:
        """Forget the server, so that the next call starts one; raises where none may be."""
        if self._client is not None:
            self._client.close()
        self._client = self._loaded = self._adapter = None
        if self.options.follows:
            raise SamplerError(f"{error}; rank 0, which owns the server, knows more") from error
        self._begun = self._asleep = False
        if self.options.url is not None:
            raise SamplerError(f"{error}; the server at vllm_url is gone, and only its owner can start it") from error
        if self._restarts == 0:
            why = "vllm_restarts are used up (with staleness there are none)"
            raise SamplerError(f"{error}; {why}; {self.server.last_words()}") from error
        self._restarts -= 1
        self._notify(f"the vLLM server is gone ({error}): starting it again; answers that had come are kept")

    def _ready(self) -> VllmClient:
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

    def _start(self) -> VllmClient:
        options, began = self.options, time.perf_counter()
        arguments = options.command_line(self.publisher.model)
        client: VllmClient
        if options.url is not None:
            http = VllmHttp(options.url, options.timeout)
            client = self._client = http
            if not http.ready():
                raise SamplerError(f"no vLLM server answers at {options.url}/health (vllm_url)")
            self._hand_over(client)
        elif options.base is not None:
            client = self._client = self.server.start(options.base, arguments, options.timeout)
            self._hand_over(client)
        elif options.colocated:  # the weights come by a call, and are written nowhere
            client = self._client = self.server.start(str(self.publisher.outline()), arguments, options.timeout)
            self._hand_over(client)
        else:
            folder = self.publisher.publish(self.version)
            client = self._client = self.server.start(str(folder), arguments, options.timeout)
            client.label(str(self.version))
            self._verify(client)
        where = client.url if options.colocated else f"vLLM at {client.url}"
        self._notify(
            f"{where}, ready after {time.perf_counter() - began:.0f} s: the log-probs of {PROBE_TOKENS} "
            f"tokens it drew equal the trainer's within {self.gap:.1e} (at most {options.tolerance:g} is taken)"
        )
        return client

    def _hand_over(self, client: VllmClient) -> None:
        """Have vLLM load the policy's weights, and verify that it did."""
        label = str(self.version)
        if self._asleep:
            client.wake("weights")
        if self.publisher.adapter:
            name, old = adapter_name(self.version), self._adapter
            if old != name:
                client.load_adapter(name, str(self.publisher.publish(self.version)))
            self._adapter = name
            if old is not None and old != name:
                client.unload_adapter(old)
            client.label(label)
        else:
            info: dict[str, Any] = (
                {"tensors": self.publisher.tensors()}
                if self.options.colocated
                else {"folder": str(self.publisher.publish(self.version))}
            )
            client.update(info, label, begin=not self._begun)
            self._begun = True
        if self._asleep:
            client.wake("kv_cache")
            self._asleep = False
        self._verify(client)

    def _verify(self, client: VllmClient) -> None:
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


def adapter_name(version: int) -> str:
    """What the server calls the adapter of this version."""
    return f"policy-{version}"
