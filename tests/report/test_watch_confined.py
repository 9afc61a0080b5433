"""`groupline watch` only reads, and nothing outside the given folder leaves it: over the application and over a socket."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from report.watch_page import SECRET, add_step, client, make_runs, names

from groupline.report.watch import content_policy, listening, server, watch_app


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_runs(tmp_path)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_only_reading(method: str, runs: Path) -> None:
    for path in ("/", "/runs.json", "/data.json?run=first"):
        refused = client(runs).request(method, path)
        assert refused.status_code == 405
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_head_has_no_body(runs: Path) -> None:
    at = client(runs)
    for path in ("/", "/runs.json", "/data.json?run=first"):
        found = at.head(path)
        assert (found.status_code, found.headers["etag"]) == (200, at.get(path).headers["etag"])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.localhost", "127.0.0.1.nip.io", "127.0.0.2", "0.0.0.0", "[::1]",
     "localhost@evil.example", "evil.example:8501", "", "localhost, evil.example", "2130706433"],
)  # fmt: skip
def test_another_host_s_name_is_refused(host: str, runs: Path) -> None:
    """A site that lets its own name lead to 127.0.0.1 must not read the runs."""
    for path in ("/", "/runs.json", "/data.json?run=first"):
        refused = client(runs).get(path, headers={"host": host})
        assert refused.status_code == 400
        assert "reward" not in refused.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8501", "127.0.0.1:9000", "127.0.0.1"])
def test_this_machine_s_own_names(host: str, runs: Path) -> None:
    assert client(runs).get("/runs.json", headers={"host": host}).status_code == 200


def test_no_answer_may_be_read_framed_or_guessed_at_elsewhere(runs: Path) -> None:
    at = client(runs)
    for path in ("/", "/runs.json", "/data.json?run=first", "/nothing", "/data.json?run=none"):
        headers = at.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert not re.search(r"unsafe|\*|https?:", headers["content-security-policy"])
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    cross = at.get("/runs.json", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in cross.headers


def test_the_policy_names_the_page_s_own_scripts(runs: Path) -> None:
    page = client(runs).get("/")
    scripts = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) == len(re.findall(r"<script(?! id=\"data\" type=\"application/json\">)", page.text)) > 0
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.headers["content-security-policy"]
    assert content_policy("<script>a</script>").count("sha256-") == 1


OUT = [
    "../outside", "..", ".", "/", "../../etc", "first/../../outside", "first/..", "./first", "first/", "//first",
    "%2e%2e/outside", "..%2foutside", "%252e%252e%252foutside", "..\\outside", "....//outside", "~", "first\x00",
    "\x00", "../outside\x00first", "first/metrics.jsonl", "first/model", "seeds", "outside", "C:\\outside", "file:///",
    "．．/outside", "first\n", "FIRST",
]  # fmt: skip


@pytest.mark.parametrize("name", OUT)
def test_no_name_leads_out_of_the_folder(name: str, runs: Path) -> None:
    at = client(runs)
    for asked in (name, str(runs.parent / "outside"), str(runs / "first")):
        found = at.get("/data.json", params={"run": asked})
        assert (found.status_code, found.text) == (404, "there is no such run; /runs.json names those there are")


@pytest.mark.parametrize(
    "file",
    ["metrics.jsonl", "rollouts.jsonl", "held_out.jsonl", "alarms.jsonl", "results.json", "config.yaml", "plan.txt"],
)
def test_a_run_with_a_file_that_leads_out_is_not_shown(file: str, runs: Path) -> None:
    run = runs / "linked"
    add_step(run, 1)
    (run / file).unlink(missing_ok=True)
    (run / file).symlink_to(runs.parent / "outside" / "metrics.jsonl")
    at = client(runs)
    assert names(at) == ["first", "seeds/1"]
    assert at.get("/data.json?run=linked").status_code == 404


def test_a_link_to_a_folder_is_not_followed(runs: Path) -> None:
    (runs / "link").symlink_to(runs.parent / "outside")
    (runs / "again").symlink_to(runs / "first")
    (runs / "loop").symlink_to(runs)
    assert names(client(runs)) == ["first", "seeds/1"]
    assert client(runs).get("/data.json?run=link").status_code == 404


def test_a_link_that_appears_later_is_seen(runs: Path) -> None:
    """A run that was shown, and then had a file replaced by a link to elsewhere."""
    at = client(runs)
    assert at.get("/data.json?run=first").status_code == 200
    (runs / "first" / "config.yaml").symlink_to(runs.parent / "outside" / "config.yaml")
    found = at.get("/data.json?run=first")
    assert found.status_code == 404
    assert SECRET not in found.text


def test_a_link_within_the_folder_is_no_way_out(runs: Path) -> None:
    (runs / "shared.yaml").write_text("steps: 7\n")
    (runs / "first" / "config.yaml").symlink_to(runs / "shared.yaml")
    assert client(runs).get("/data.json?run=first").json()["steps_planned"] == 7


@pytest.mark.parametrize("link", [False, True])
def test_a_tokenizer_elsewhere_is_not_read(link: bool, runs: Path) -> None:
    vocabulary = {"model": {"type": "WordLevel", "vocab": {SECRET: 0}}, "added_tokens": [{"id": 0, "content": SECRET}]}
    (runs.parent / "outside" / "tokenizer.json").write_text(json.dumps(vocabulary))
    run = runs / "first"
    answer = {"step": 1, "group": 0, "problem": "p", "text": "t", "rewards": {"r": 1}, "reward": 1, "ids": [0],
              "logprobs": [-0.1], "advantage": 0.0, "finish_reason": "stop", "prompt": "q", "gold": "g"}  # fmt: skip
    (run / "rollouts.jsonl").write_text(json.dumps(answer) + "\n")
    if link:
        (run / "model").mkdir()
        (run / "model" / "tokenizer.json").symlink_to(runs.parent / "outside" / "tokenizer.json")
    else:
        (run / "config.yaml").write_text(f"model: {runs.parent / 'outside'}\n")
    found = client(runs).get("/data.json?run=first")
    assert found.json()["groups"]["answers"] == 1
    assert SECRET not in json.dumps(found.json()["vocabulary"])


def test_files_are_never_served_and_folders_never_listed(runs: Path) -> None:
    at = client(runs)
    for path in ("/first", "/first/", "/first/metrics.jsonl", "/runs", "/runs.json/", "/data", "/data.json/first",
                 "/static/", "/index.html", "/docs", "/openapi.json", "/favicon.ico", "/%00"):  # fmt: skip
        assert at.get(path).status_code == 404, path


def test_nothing_is_written(runs: Path) -> None:
    def seen() -> dict[str, tuple[int, int, bytes]]:
        files = [p for p in runs.parent.rglob("*") if p.is_file()]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_mode, p.read_bytes()) for p in files}

    before = seen()
    at = client(runs)
    for path in ("/", "/runs.json", "/data.json?run=first", "/data.json?run=../outside"):
        at.get(path)
        at.post(path, content=b"x")
        at.put(path, content=b"x")
    assert seen() == before


@pytest.fixture
def address(runs: Path) -> Iterator[tuple[str, int]]:
    """A real server over `runs`, in a thread."""
    with listening(0) as listener:
        serving = server(watch_app(runs))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        serving.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def raw(address: tuple[str, int], request: str) -> bytes:
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(request.encode("latin-1"))
        connection.settimeout(10)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "target",
    ["/../outside/metrics.jsonl", "/%2e%2e/outside/metrics.jsonl", "/..%2foutside%2fmetrics.jsonl", "//etc/passwd",
     "/first/../../outside/config.yaml", "/%00", "/..\\outside\\config.yaml", "/%c0%ae%c0%ae/outside/config.yaml",
     "/data.json?run=../outside", "/data.json?run=%2e%2e%2foutside", "/data.json?run=first&run=../outside",
     "/data.json?run=%00", "/data.json?run=first%00", "/data.json?run=%ff%fe", "/data.json?run=..%5coutside",
     "/data.json/../../outside/config.yaml", "http://evil.example/../outside/config.yaml"],
)  # fmt: skip
def test_what_a_socket_can_send_does_not_get_out(target: str, address: tuple[str, int]) -> None:
    """Byte for byte, as no client would let it through."""
    got = raw(address, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    status = int(got.split(b" ")[1])
    assert status in (400, 404), got
    assert SECRET.encode() not in got
    assert b"root:" not in got


@pytest.mark.parametrize(
    "heads", ["", "Host: evil.example\r\nHost: localhost\r\n", "Host: localhost\r\nHost: evil.example\r\n", "Host:\r\n",
              "Host: evil.example\r\nX-Forwarded-Host: localhost\r\n"],
)  # fmt: skip
def test_a_host_that_is_missing_or_said_twice(heads: str, address: tuple[str, int]) -> None:
    got = raw(address, f"GET /runs.json HTTP/1.1\r\n{heads}Connection: close\r\n\r\n")
    assert got.split(b" ")[1] == b"400", got


def test_it_listens_on_this_machine_alone(address: tuple[str, int]) -> None:
    assert address[0] == "127.0.0.1"
    connection = http.client.HTTPConnection(*address)
    connection.request("GET", "/runs.json")
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("server") is None
    connection.close()
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", address[1]))  # an address of this machine too, and not the one bound
