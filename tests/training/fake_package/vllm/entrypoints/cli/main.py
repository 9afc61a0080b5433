"""In place of vLLM's command line, for tests of the process around it: what FAKE_VLLM says, on the port it was given."""

import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def main() -> None:
    mode = os.environ.get("FAKE_VLLM", "")
    print("fake vLLM", *sys.argv, os.environ["VLLM_SERVER_DEV_MODE"], flush=True)
    if mode == "dies":
        sys.exit("RuntimeError: not enough memory for the fake cache")
    if mode == "hangs":
        time.sleep(600)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {worker.pid}", encoding="utf-8")
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
