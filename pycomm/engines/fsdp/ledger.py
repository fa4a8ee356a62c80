"""Bytes by class, as they are allocated and freed: now, and at the peak.

What is counted are the bytes of tensors that exist: the storage of a flat buffer when it is made or freed, a gradient
when autograd hands it over, a saved activation when it is packed for the backward pass. A class that is offloaded is
counted in the host's column, and moving between the columns is what offloading does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch

__all__ = ["Bytes", "Kind", "Ledger", "MemoryStats"]

Kind = Literal["parameters", "gradients", "optimizer", "buffers", "activations"]
_STATES = ("parameters", "gradients", "optimizer")


class Bytes(NamedTuple):
    """Bytes of one class: on the device that computes, in the host's memory to which it was offloaded, and peaks."""

    device: int
    host: int
    device_peak: int
    host_peak: int


class MemoryStats(NamedTuple):
    """Bytes of this rank by class; ``states`` are parameters, gradients and optimizer together, with their own peak.

    Activations are 0 unless the engine was made with ``measures_activations=True``.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    activations: Bytes
    states: Bytes


class Ledger:
    """The books of one engine."""

    def __init__(self) -> None:
        self._now: dict[tuple[str, bool], int] = {}
        self._peak: dict[tuple[str, bool], int] = {}
        self._saved: dict[int, int] = {}  # storages that the backward pass needs: how many tensors over each

    def add(self, kind: Kind, nbytes: int, *, is_host: bool = False) -> None:
        """``nbytes`` more of the class exist; negative: fewer."""
        for name in (kind, "states") if kind in _STATES else (kind,):
            key = (name, is_host)
            self._now[key] = now = self._now.get(key, 0) + nbytes
            if now > self._peak.get(key, 0):
                self._peak[key] = now

    def put(self, kind: Kind, nbytes: int, *, is_host: bool = False) -> None:
        """The class is now of ``nbytes``."""
        self.add(kind, nbytes - self._now.get((kind, is_host), 0), is_host=is_host)

    def reset_peaks(self) -> None:
        """From here on peaks are those of what follows."""
        self._peak = dict(self._now)

    def stats(self) -> MemoryStats:
        """Returns all of it."""
        return MemoryStats(*(self._bytes(name) for name in MemoryStats._fields))

    def _bytes(self, name: str) -> Bytes:
        books = ((book, (name, is_host)) for book in (self._now, self._peak) for is_host in (False, True))
        return Bytes(*(book.get(key, 0) for book, key in books))

    def watch_activations(self, is_parameter: Callable[[int], bool]) -> AbstractContextManager[Any]:
        """Inside, what autograd saves for the backward pass counts as activations, each storage once.

        ``is_parameter(address of a storage)`` tells what is counted elsewhere.
        """

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address == 0 or is_parameter(address):
                return tensor
            if self._saved.setdefault(address, 0) == 0:
                self.add("activations", storage.nbytes())
            self._saved[address] += 1
            held = _Held(tensor)
            weakref.finalize(held, self._drop, address, storage.nbytes())
            return held

        def unpack(held: Any) -> torch.Tensor:
            return held.tensor if isinstance(held, _Held) else held

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _drop(self, address: int, nbytes: int) -> None:
        self._saved[address] -= 1
        if self._saved[address] == 0:
            del self._saved[address]
            self.add("activations", -nbytes)


class _Held:
    """A tensor that autograd saved; this object's end is the end of the need for it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
