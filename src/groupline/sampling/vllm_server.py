"""`vllm serve` as a child process: started in vLLM's own environment, waited for, watched, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from groupline.sampling.sampler import SamplerError
from groupline.sampling.vllm_http import VllmHttp

SIDE = Path(__file__).parent / "vllm_side"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
LOG_LINES = 20
END_SECONDS = 20.0


class VllmServer:
    """One server at a time, in a process group of its own that ends with this process.

    python: of the environment that has vLLM. log: the server's output is appended to it. start_timeout: most seconds
    until it answers.
    """

    def __init__(self, python: str, log: Path, start_timeout: float) -> None:
        self.python, self.log, self.start_timeout = python, log, start_timeout
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, model: str, arguments: Sequence[str], timeout: float) -> VllmHttp:
        """Serve `model` on a free port of this machine; a client of it, once it is ready.

        Raises SamplerError with the log's last lines if the server ends or is not ready in time; nothing runs then.
        """
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = str(SIDE / "groupline_vllm_serve.py")
        command = [self.python, launcher, "serve", model, "--host", "127.0.0.1", "--port", str(port), *arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            out.write(f"$ {' '.join(command)}\n".encode())
            out.flush()
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # its end tells the server that this process is gone
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(SIDE)},
                    start_new_session=True,
                )
            except OSError as error:
                raise SamplerError(f"vllm_python is {self.python!r}, which does not run: {error}") from error
        client = VllmHttp(f"http://127.0.0.1:{port}", timeout)
        try:
            self._wait(client)
        except BaseException:
            client.close()
            self.stop()
            raise
        return client

    def _wait(self, client: VllmHttp) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_timeout
        while not client.ready():
            code = self.process.poll()
            if code is not None:
                raise SamplerError(f"the vLLM server ended with code {code} before it was ready; {self.last_words()}")
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"the vLLM server was not ready after {self.start_timeout:g} s (vllm_start_timeout); "
                    f"{self.last_words()}"
                )
            time.sleep(0.2)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """The end of the log, to be put into an error."""
        return log_end(self.log)

    def stop(self) -> None:
        """End every process of the server: asked first, then killed."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        _signal(process.pid, signal.SIGKILL)  # workers that outlived the server are in its group
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def log_end(log: Path) -> str:
    """The last lines of a log, for an error."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"the last lines of {log}:\n" + "\n".join(f"  {line[:300]}" for line in text.splitlines()[-LOG_LINES:])
