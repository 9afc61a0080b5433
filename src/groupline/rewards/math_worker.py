"""A worker process that compares answers with math-verify (see `worker_pool`). Its own time limits stay off: they need
signals in a main thread, and do not stop code outside Python.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import unicodedata
from functools import lru_cache
from typing import Any

from groupline.rewards.text import last_box

MEMORY = 4 << 30  # bytes of address space; a tower of powers asks for more and gets an error instead
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_AMOUNT = re.compile(r"[-+]?[\d.,/]+%?( [^\W\d]+)*")
_NAME = re.compile(r"(?<![\\\w])(pi|exp|sin|cos|tan|log|ln)(?![a-z])")
_ROOT = re.compile(r"(?<![\\\w])sqrt\(([^()]*)\)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2}")
_RAISED = re.compile(r"[⁰¹²³⁴-⁹]+")
# Where a number goes on as an expression: reading the number alone would take 4 \sqrt{2} for 4 and 1e99 for 1.
_GOES_ON = re.compile(r"\d\s*(?:\\(?!text|mathrm|circ|[^a-zA-Z])|[\^√]|[eE][-+]?\d)")
_CHOICE = re.compile(r"\(?([A-Z])\)?(?:\s*[:.)].*)?", re.DOTALL)
_FORMULA = re.compile(r"[\\^√{(a-zA-Z⁰¹²³⁴-⁹¼-¾⅐-⅞]")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


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
    answer = _answer(text)
    letter = _CHOICE.fullmatch(gold.strip())
    if letter and len(gold.strip()) == 1:
        box = last_box(text)
        said = _CHOICE.fullmatch(_WRAPPED.sub(r"\1", text if box is None else box).strip())
        return {"gold": True, "right": said is not None and said[1] == letter[1]}
    forms = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = parse(answer, extraction_config=forms, parsing_timeout=None) if answer else []
    return {"gold": True, "right": bool(verify(list(expected), parsed, timeout_seconds=None))}


def _answer(text: str) -> str:
    """The part of a text that answers, delimited where it is a formula; "" if there is none.

    math-verify joins several boxes, falls back from a broken last one to an earlier one, and takes the first number of
    a formula without delimiters for all of it.
    """
    box = last_box(text)
    if box is not None:
        return f"\\boxed{{{_plain_signs(box)}}}" if box.strip() else ""
    if _DELIMITED.search(text):
        return text
    last = text.rpartition("####")[2].strip().strip("*`")
    if not _AMOUNT.fullmatch(last) and _is_formula(last):
        return f"\\boxed{{{_plain_names(_plain_signs(last))}}}"
    plain = _plain_signs(text.replace("`", " "))
    return "" if _GOES_ON.search(plain.rpartition("####")[2]) else plain


@lru_cache(maxsize=1024)
def _gold(gold: str) -> tuple[Any, ...]:
    """What the gold answer means; () if it cannot be read."""
    from math_verify import parse

    answer = gold.rpartition("####")[2].strip()
    # A bare formula is one whole answer; math-verify would take the first number in it.
    bare = not _DELIMITED.search(answer) and not _AMOUNT.fullmatch(answer)
    read = f"\\boxed{{{_plain_names(_plain_signs(answer))}}}" if bare else answer
    return tuple(parse(read, parsing_timeout=None)) if answer else ()


def _is_formula(text: str) -> bool:
    """Whether all of an undelimited text is one formula: a line with a sign or letter of one and without words."""
    if not 0 < len(text) <= 200 or "\n" in text or ":" in text or text.endswith((".", "?", "!")):
        return False
    names = _NAME.sub("", _ROOT.sub(r"\1", _COMMAND.sub("", text)))
    return _FORMULA.search(text) is not None and not _WORD.search(names)


def _plain_signs(text: str) -> str:
    """`½`, `10²`, `−` and digits of other scripts as LaTeX has them; compatibility forms would turn 1½ into 11/2."""
    out = []
    for c in _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text):
        top, slash, bottom = unicodedata.normalize("NFKC", c).partition("⁄")
        if slash and top and bottom:
            out.append(f"\\frac{{{top}}}{{{bottom}}}")
        else:
            out.append(str(unicodedata.digit(c)) if c.isdecimal() else "-" if c == "−" else c)
    return "".join(out)


def _plain_names(text: str) -> str:
    """`pi`, `exp(16)` and `sqrt(2)` as commands; without the backslash they would be products of letters."""
    return _NAME.sub(r"\\\1", _ROOT.sub(r"\\sqrt{\1}", text))


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
