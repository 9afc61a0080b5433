"""The most memory that this process has held."""

from __future__ import annotations

from pathlib import Path


def own_peak() -> int | None:
    """Bytes of this process since its program began; None where the system does not say (it is not Linux).

    On Linux `getrusage` and `wait4` will not do: their peak also holds that of the process before it became this
    program, when it was still a copy of its parent, so a large parent would hide a small child.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None
