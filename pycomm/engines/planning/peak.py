"""The most bytes that tensors take while something runs, on a CPU or a GPU.

On a GPU it is what torch's allocator counts. On a CPU every tensor that an operator returns is noted with its storage,
until the storage is freed; what an operator allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["peak_bytes"]


def peak_bytes(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Calls ``run`` and returns the most bytes of tensors that were alive together, of those that it made."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    storages = _Storages()
    with storages:
        run()
    return storages.peak


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new storages that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak = 0, 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, for seconds, to keep it out of the method below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and id(each.untyped_storage()) not in given:
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        nbytes = storage.nbytes()

        def freed(_reference: Any) -> None:
            self._known.pop(key, None)
            self.alive -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
