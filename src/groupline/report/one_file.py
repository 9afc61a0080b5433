"""What the pages that reports write have in common: parts from folders, put into one HTML file that asks for nothing.

`web/` holds what the pages share: colours and type (base.css), controls, charts, the button for light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent / "web"


def read_part(folder: Path, name: str) -> str:
    """A file of a page's own folder or, where that has none of the name, of `web/`."""
    own = folder / name
    return (own if own.is_file() else WEB / name).read_text(encoding="utf-8")


def joined(folder: Path, names: Iterable[str]) -> str:
    return "".join(read_part(folder, name) for name in names)


def literal(value: Any) -> str:
    """JSON that may stand in a script: no text in it can end the script, or open a comment that hides its end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("</", "\\u003c/").replace("<!", "\\u003c!")


def write_page(file: Path, page: str, mark: str, kind: str, default: str) -> Path:
    """Write the page; folders on the way are made, an earlier page of the kind is replaced. Returns the absolute path.

    mark: by which a page of the kind is known. ValueError if `file` is a folder, or holds something else.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file, {file / default} for example")
    if file.exists() and mark.encode() not in file.read_bytes():
        raise ValueError(f"{file} holds something that is not {kind}, so it is not overwritten; name another file")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    return file.absolute()
