"""A server with vLLM 0.32's routes for rollouts and weights, on a real (tiny) model, in a thread of this process.

What it answers comes from weights that it loaded from the folder it was told of, so a weight that does not arrive shows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from groupline.models.load import load_model, load_tokenizer
from groupline.models.merge import merge
from groupline.records import SamplingParams
from groupline.sampling import Engine


class FakeVllm(ThreadingHTTPServer):
    """url: its address. asked: every (path, body) so far. faults: names of what it does wrong, see `Routes`."""

    daemon_threads = True

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.base, self.version, self.updating = model, "default", False
        self.tokenizer = load_tokenizer(str(model))
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.faults: set[str] = set()
        self.asleep: set[str] = set()  # parts whose memory was given back
        self.die_after: int | None = None  # generate requests, after which every connection is dropped
        self.lock = threading.Lock()
        self.plain: dict[Engine, Any] = {}
        self.engines = {"": self.engine(model)}

    def engine(self, folder: Path, adapter: str | None = None) -> Engine:
        model: Any = load_model(str(folder))
        if adapter is not None:
            model = merge(model, Path(adapter))
        engine = Engine(model.eval(), self.tokenizer, notify=lambda line: None)
        self.plain[engine] = model
        return engine

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


class Routes(BaseHTTPRequestHandler):
    server: FakeVllm

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.say({}, 503 if "starting" in self.server.faults else 200)
        elif self.path == "/weight_info":
            self.say({"weight_version": self.server.version})
        else:
            self.say({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        with self.server.lock:
            self.server.asked.append((self.path, body))
            if path.removeprefix("/") in self.server.faults:
                self.say({"error": {"message": "worker: no such weight"}}, 400)
            else:
                getattr(self, path.removeprefix("/").replace("/", "_"))(body)

    def say(self, answer: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def pause(self, body: dict[str, Any]) -> None:
        self.say({"status": "paused"})

    resume = init_weight_transfer_engine = pause

    def sleep(self, body: dict[str, Any]) -> None:
        self.server.asleep = {"weights", "kv_cache"}
        if self.path.endswith("level=2"):
            self.server.engines.pop("")  # as the memory is gone, whoever draws before an update fails
        self.say({"status": "sleeping"})

    def wake_up(self, body: dict[str, Any]) -> None:
        self.server.asleep -= {self.path.partition("tags=")[2]}
        self.say({"status": "sleeping" if self.server.asleep else "awake"})

    def start_weight_update(self, body: dict[str, Any]) -> None:
        assert "weights" not in self.server.asleep
        self.server.updating = True
        self.say({})

    def update_weights(self, body: dict[str, Any]) -> None:
        assert self.server.updating
        if "ignores_weights" not in self.server.faults:
            self.server.engines[""] = self.server.engine(Path(body["update_info"]["folder"]))
        self.say({})

    def finish_weight_update(self, body: dict[str, Any]) -> None:
        self.server.updating = False
        if "ignores_version" not in self.server.faults:
            self.server.version = body["weight_version"]
        self.say({})

    def update_weight_version(self, body: dict[str, Any]) -> None:
        self.server.version = body["new_version"]
        self.say({})

    def reset_prefix_cache(self, body: dict[str, Any]) -> None:
        self.say({"success": "keeps_prompts" not in self.server.faults})

    def v1_load_lora_adapter(self, body: dict[str, Any]) -> None:
        self.server.engines[body["lora_name"]] = self.server.engine(self.server.base, body["lora_path"])
        self.say({})

    def v1_unload_lora_adapter(self, body: dict[str, Any]) -> None:
        del self.server.engines[body["lora_name"]]
        self.say({})

    def inference_v1_generate(self, body: dict[str, Any]) -> None:
        server, asked = self.server, body["sampling_params"]
        if server.die_after is not None:
            server.die_after -= 1
            if server.die_after < 0:
                self.close_connection = True
                self.connection.close()
                return
        if asked["temperature"] == 0 and asked["n"] > 1:
            self.say({"error": {"message": "n must be 1 when using greedy sampling"}}, 400)
            return
        assert not server.asleep
        engine = server.engines[body.get("model") or ""]
        engine.eos_ids = frozenset(asked["stop_token_ids"])
        raw = "raw_logprobs" in server.faults
        params = SamplingParams(
            temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"], min_p=asked["min_p"],
            max_new_tokens=asked["max_tokens"], stop=tuple(asked["stop"]),
        )  # fmt: skip
        [answers] = engine.generate([body["token_ids"]], asked["n"], params, seed=asked["seed"])
        choices = []
        for index, c in enumerate(answers):
            logprobs = c.plain_logprobs if raw or params.temperature == 0 else c.logprobs
            ids = list(c.ids)
            if "longer" in server.faults:  # than the engine's rules allow
                ids, logprobs = [*ids, 5], (*logprobs, -1.0)
            if "nan" in server.faults:
                logprobs = (-9999.0, *logprobs[1:])
            content = [{"token_id": i, "logprob": x} for i, x in zip(ids, logprobs, strict=True)]
            version = "7" if "other_version" in server.faults else server.version
            spans = [{"version": version, "start": 0, "end": len(ids)}]
            if "two_versions" in server.faults:
                spans = [{"version": "0", "start": 0, "end": 1}, {"version": version, "start": 1, "end": len(ids)}]
            choices.append({
                "index": index,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": "abort" if "aborts" in server.faults else c.finish_reason,
                "stop_reason": c.stop_string,
                "weight_versions": spans,
            })  # fmt: skip
        if "one_short" in server.faults:
            choices.pop()
        answer = {"model": body.get("model") or "base", "choices": choices[::-1]}
        if asked.get("prompt_logprobs") is not None:
            logits = server.plain[engine](input_ids=torch.tensor([body["token_ids"]])).logits[0]
            logp = torch.log_softmax(logits.detach(), -1)
            rows = zip(logp[:-1], body["token_ids"][1:], strict=True)
            answer["prompt_logprobs"] = [None, *({str(i): {"logprob": float(x[i])}} for x, i in rows)]
        self.say(answer)


@contextmanager
def fake_vllm(model: Path) -> Iterator[FakeVllm]:
    server = FakeVllm(model)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
