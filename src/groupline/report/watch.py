"""`groupline watch`: the report of runs that are going on, on this machine only. Reads files and changes none.

    GET /                   the page (groupline.report.page), without data
    GET /runs.json          the runs there are, and whether there is something new of them
    GET /data.json?run=ID   a run's data

That is all: every other path is unknown, every other method refused. Needs the extra `ui` (Starlette and uvicorn).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import webbrowser
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupline.report.page import page
from groupline.report.watched import Watched

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

ADDRESS = "127.0.0.1"
PORT = 8501
HOSTS = ("127.0.0.1", "localhost")  # another name that leads here is another site's: DNS rebinding
MISSING = "watch needs Starlette and uvicorn: pip install 'groupline[ui]'"
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # kept, and asked about each time
}


def watch(folder: Path, port: int = PORT, opened: bool = True, say: Callable[[str], None] = print) -> None:
    """Serve until interrupted. port: 0 takes any free one. opened: in a browser too.

    ImportError naming the extra; ValueError if there is no such folder; OSError if the port is taken.
    """
    serving = server(watch_app(folder))
    with listening(port) as listener:
        address = f"http://{ADDRESS}:{listener.getsockname()[1]}/"
        say(f"watching {folder} at {address} (Ctrl-C ends it)")
        if opened and not webbrowser.open(address):  # answered as soon as the server runs
            say("no browser was found here; open the address in one")
        try:
            serving.run(sockets=[listener])
        except KeyboardInterrupt:  # which is how it is meant to end
            say("ended")


def server(app: Starlette) -> uvicorn.Server:
    """One that writes no line for each request, and does not tell what it is. ImportError naming the extra."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(MISSING) from error
    return uvicorn.Server(  # h11 always: httptools, which uvicorn prefers where it is installed, takes a second Host
        uvicorn.Config(app, http="h11", log_level="warning", access_log=False, server_header=False, lifespan="off")
    )


def listening(port: int) -> socket.socket:
    """A socket that this machine alone can reach. OSError saying what to do if the port is taken."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise OSError(f"port {port} of {ADDRESS} cannot be used ({error}); give another one with --port") from error
    return listener


def watch_app(folder: Path) -> Starlette:
    """The server's application over a run's folder, or one that holds runs. Errors: see `watch`."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(MISSING) from error
    watched = Watched(folder)
    whole = page(live=True)

    def answer(request: Request, content: bytes, kind: str) -> Response:
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        known = (part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(","))
        if tag in known:
            return Response(status_code=304, headers={"etag": tag})
        return Response(content, media_type=kind, headers={"etag": tag})

    async def shown(request: Request) -> Response:
        return answer(request, whole.encode(), "text/html")

    async def runs(request: Request) -> Response:
        listed = await run_in_threadpool(watched.listed)
        return answer(request, json.dumps({"runs": listed}, ensure_ascii=False).encode(), "application/json")

    async def data(request: Request) -> Response:
        try:
            made = await run_in_threadpool(watched.data, request.query_params.get("run", ""))
        except KeyError:
            return PlainTextResponse("there is no such run; /runs.json names those there are", 404)
        except (ValueError, OSError) as error:  # a broken line, a file just deleted: whoever watches should hear of it
            return PlainTextResponse(str(error), 500)
        return answer(request, made, "application/json")

    app = Starlette(
        routes=[Route("/", shown), Route("/runs.json", runs), Route("/data.json", data)],
        middleware=[
            Middleware(Guarded, policy=content_policy(whole)),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
        ],
    )
    app.router.redirect_slashes = False
    return app


class Guarded:
    """Puts HEADERS and the content policy on every answer, refusals too."""

    def __init__(self, app: Any, policy: str) -> None:
        self.app = app
        self.headers = [(k.encode(), v.encode()) for k, v in (HEADERS | {"content-security-policy": policy}).items()]

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], *self.headers]}
            await send(message)

        await self.app(scope, receive, guarded)


def content_policy(whole: str) -> str:
    """A content security policy that lets run the page's own scripts and styles, known by their hashes, and no other."""
    scripts, styles = (
        " ".join(f"'sha256-{_digest(part)}'" for part in re.findall(rf"<{tag}>(.*?)</{tag}>", whole, re.DOTALL))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
