"""The libraries that benchmarks/faults.py compares, as one rank sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import pycomm

__all__ = ["LIBRARIES", "RANKS", "Pycomm"]

RANKS = 4


class Pycomm:
    """pycomm, on shared memory. No timeout ends its waits but its own, of ten minutes."""

    errors: tuple[type[BaseException], ...] = (pycomm.PeerLostError,)

    def __init__(self, rank: int, folder: str, _timeout_s: float = 0.0) -> None:
        self.rank = rank
        store = dist.FileStore(f"{folder}/meeting", RANKS)
        pycomm.init("shm", rank=rank, world_size=RANKS, store=store)
        self.group: Any = None

    def all_reduce(self, tensor: torch.Tensor, op: Any = pycomm.ReduceOp.SUM) -> None:
        pycomm.all_reduce(tensor, op, self.group)

    def go_on_with(self, survivors: list[int]) -> None:
        self.group = pycomm.new_group(survivors)


class Gloo:
    """torch.distributed on gloo. It has no way to leave ranks out of a broken group: the survivors start anew.

    A survivor that waits for another survivor, which has seen the death, is told nothing: its timeout is what ends it.
    """

    errors: tuple[type[BaseException], ...] = (RuntimeError,)

    def __init__(self, rank: int, folder: str, timeout_s: float = 60.0) -> None:
        self.rank, self.folder, self.timeout = rank, folder, timedelta(seconds=timeout_s)
        self._start("meeting", rank, RANKS)

    def _start(self, name: str, rank: int, world_size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"{self.folder}/{name}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=self.timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def go_on_with(self, survivors: list[int]) -> None:
        dist.destroy_process_group()
        self._start("survivors", survivors.index(self.rank), len(survivors))


LIBRARIES: dict[str, Callable[..., Any]] = {
    "pycomm": Pycomm,
    "gloo": Gloo,
}
