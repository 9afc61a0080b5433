"""What a token's number stands for, read from a tokenizer.json without loading a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Piece = str | list[int]  # text, or bytes of a character whose others are in further tokens


def pieces(files: Iterable[Path], ids: set[int]) -> dict[int, Piece]:
    """Each token of `ids` as text, or as bytes where it is not whole text, from the first of `files` that is there.

    Byte-level vocabularies (GPT-2's alphabet) and SentencePiece's (▁ for a space, <0xE0> for a byte) are read; another
    kind's entries are taken as they stand. Empty if there is no file, or it is of no kind known.
    """
    for file in files:
        if file.is_file():
            return _pieces(json.loads(file.read_text(encoding="utf-8")), ids)
    return {}


def _pieces(tokenizer: dict[str, Any], ids: set[int]) -> dict[int, Piece]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [text, score] in order
        named = {i: entry[0] for i, entry in enumerate(vocabulary) if i in ids}
    else:
        named = {number: text for text, number in vocabulary.items() if number in ids}
    added = {entry["id"]: str(entry["content"]) for entry in tokenizer.get("added_tokens") or () if entry["id"] in ids}
    kinds = set(_kinds(tokenizer.get("decoder")))
    found: dict[int, Piece] = {}
    for number, text in named.items():
        if "ByteLevel" in kinds:
            raw = bytes(_BYTES[c] for c in text if c in _BYTES)
        elif byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
            raw = bytes.fromhex(byte[1])
        else:
            raw = text.replace("▁", " ").encode()
        try:
            found[number] = raw.decode()
        except UnicodeDecodeError:
            found[number] = list(raw)
    return found | added


def _kinds(decoder: Any) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _kinds(part)


def _alphabet() -> dict[str, int]:
    """Character -> byte: printable bytes stand for themselves, others for 256 and on (GPT-2's bytes_to_unicode)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _alphabet()
