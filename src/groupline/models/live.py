"""Bytes of the tensors that are alive, counted as operations make them and as they are let go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `live` and `peak` count the storages that operations have made and that are held still.

    A storage counts once, whatever views there are of it. Those of `known` tensors count nothing. What an operation takes
    and gives back before it returns is not seen. Works on real, meta and fake tensors alike.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known = [t.untyped_storage() for t in known]  # held, so that no other storage takes their place
        self._seen: dict[int, Any] = {storage._cdata: None for storage in self._known}

    def restart(self) -> None:
        """The peak from here on."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, self._forget(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        return gone
