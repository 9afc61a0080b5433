"""A worker process that compares answers with math-verify (see `worker_pool`). Its own time limits stay off: they need
signals in a main thread, and do not stop code outside Python.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space; a tower of powers asks for more and gets an error instead
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_AMOUNT = re.compile(r"[-+]?[\d.,/]+%?( [^\W\d]+)*")


def main(seconds: float) -> None:
    """Serve requests `{"gold", "text"}` with `{"gold": readable, "right": equal}`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply
    _limit_memory()
    try:
        _compare("1", "1")
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(out, {"ready": True})
    for line in open(0, encoding="utf-8", closefd=False):  # noqa: SIM115
        _last_resort(seconds + 30)
        request = json.loads(line)
        _say(out, _compare(request["gold"], request["text"]))
        _last_resort(0)


def _compare(gold: str, text: str) -> dict[str, bool]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    expected = _gold(gold)
    if not expected:
        return {"gold": False, "right": False}
    forms = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    said = parse(text, extraction_config=forms, parsing_timeout=None)
    return {"gold": True, "right": bool(verify(list(expected), said, timeout_seconds=None))}


@lru_cache(maxsize=1024)
def _gold(gold: str) -> tuple[Any, ...]:
    """What the gold answer means; () if it cannot be read."""
    from math_verify import parse

    answer = gold.rpartition("####")[2].strip()
    # A bare formula is one whole answer; math-verify would take the first number in it.
    bare = not _DELIMITED.search(answer) and not _AMOUNT.fullmatch(answer)
    return tuple(parse(f"\\boxed{{{answer}}}" if bare else answer, parsing_timeout=None)) if answer else ()


def _say(out: Any, reply: dict[str, Any]) -> None:
    out.write(json.dumps(reply) + "\n")
    out.flush()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))


def _last_resort(seconds: float) -> None:
    """End this process by itself if the run that should kill it is gone; 0 calls that off."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]))
