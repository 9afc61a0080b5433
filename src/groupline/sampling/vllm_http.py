"""The routes of a vLLM server that a sampler uses: generation by token ids, weight transfer, adapters, versions.

Written against vLLM 0.32.0 (`vllm/entrypoints/scale_out/token_in_token_out`, `entrypoints/rl/online`, `serve/lora`).
The weight routes exist where the server runs with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from groupline.sampling.sampler import SamplerError
from groupline.sampling.vllm_client import Asked, ServerFailed, ServerGone

GENERATE = "/inference/v1/generate"
WIDTH = 64  # requests in flight at once


class VllmHttp:
    """One server, a `VllmClient`.

    timeout: most seconds that one answer of the server may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError("sampler: vllm speaks HTTP and needs httpx: pip install 'groupline[vllm]'") from error
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._error = httpx.TransportError
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            # A kept connection may be one that the server has just closed, which would look like its death.
            limits=httpx.Limits(max_connections=WIDTH, max_keepalive_connections=0),
            trust_env=False,  # no proxy between the trainer and its server
        )

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        """Whether the server says that it can answer."""
        try:
            return bool(self._client.get("/health", timeout=5.0).status_code == 200)
        except self._error:
            return False

    def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        body = {"token_ids": list(prompt), "sampling_params": dict(sampling)} | ({"model": model} if model else {})
        return self._ask("POST", GENERATE, json=body)

    def generate_all(self, asked: Sequence[Asked], model: str | None = None) -> Generator[tuple[int, dict[str, Any]]]:
        pool = ThreadPoolExecutor(min(WIDTH, max(len(asked), 1)))
        gone: ServerGone | None = None
        try:
            futures = {pool.submit(self.generate, *one, model): number for number, one in enumerate(asked)}
            for future in as_completed(futures):
                try:
                    said = future.result()
                except ServerGone as error:
                    gone = gone or error
                    continue
                yield futures[future], said
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if gone is not None:
            raise gone

    def version(self) -> str:
        return str(self._ask("GET", "/weight_info")["weight_version"])

    def label(self, version: str) -> None:
        self._ask("POST", "/update_weight_version", json={"new_version": version})

    def update(self, info: Mapping[str, Any], version: str, begin: bool) -> None:
        if begin:
            self._ask("POST", "/init_weight_transfer_engine", json={"init_info": {}})
        self._ask("POST", "/pause", params={"mode": "wait"})
        try:
            self._ask("POST", "/start_weight_update")
            self._ask("POST", "/update_weights", json={"update_info": dict(info)})
            self._ask("POST", "/finish_weight_update", json={"weight_version": version})
            self.forget_prompts()
        except SamplerError:
            with contextlib.suppress(SamplerError):  # what went wrong before it is what is to be told
                self._ask("POST", "/resume")
            raise
        self._ask("POST", "/resume")

    def forget_prompts(self) -> None:
        """Empty the prefix cache: its keys and values are those of the weights before."""
        said = self._ask("POST", "/reset_prefix_cache")
        if not said.get("success"):
            raise SamplerError(f"{self.url}/reset_prefix_cache says {said}: cached prompts of the old weights remain")

    def load_adapter(self, name: str, folder: str) -> None:
        self._ask("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        self._ask("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def sleep(self, level: int) -> None:
        self._ask("POST", "/sleep", params={"level": level})

    def wake(self, part: str) -> None:
        self._ask("POST", "/wake_up", params={"tags": part})

    def _ask(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **given)
        except self._error as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code >= 500 and path == GENERATE:  # its engine died; what answers is only the front
            raise ServerGone(f"{self.url}{path} answered {response.status_code}: {response.text[:500]}")
        if response.status_code != 200:
            hint = ""
            if response.status_code == 404 and path != GENERATE:
                hint = "; the server lacks this route: start it as docs/vllm.md says"
            kind = ServerFailed if response.status_code >= 500 else SamplerError
            raise kind(f"{self.url}{path} answered {response.status_code}: {response.text[:500]}{hint}")
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}
        found = response.json()
        return found if isinstance(found, dict) else {"answer": found}
