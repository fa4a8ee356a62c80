"""What the collectives over hosts of equal size share: a rank's *column*, and the memory and messages that go there.

The column of a rank are its likes on the other hosts: those with its local rank. What crosses the network goes between
ranks of one column, and each of a host's ranks carries its share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .base import Request, Transport

__all__ = ["Column", "shard_numel"]

_SHARD_BYTES = 1 << 20, 4 << 20  # of a segment: at least and at most
_SEGMENTS = 8  # where the bounds allow it


class _Start(Protocol):
    def __call__(self, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Request: ...


class Column:
    """Of one rank; ``inner`` joins the ranks of its host. Keeps memory between calls."""

    def __init__(self, inner: Transport, ranks: Sequence[int], host: int, start: _Start) -> None:
        """``ranks`` are the column, one a host, this rank itself at index ``host``.

        ``start`` begins a message to or from one of them; tags are those of messages of agreed size.
        """
        self.inner = inner
        self.host = host
        self.hosts = len(ranks)
        self.others = [(index, rank) for index, rank in enumerate(ranks) if index != host]
        self.start = start
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, number: int, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Returns ``number`` pieces of memory of ``numel`` elements each, until it is called again."""
        nbytes = number * numel * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).chunk(number)


def shard_numel(numel: int, itemsize: int) -> int:
    """Returns the elements of a segment's shard, where a rank's shards are ``numel`` in all.

    Long ones spare cores that carry the TCP as well, short ones are sooner on their way. An all_reduce of 16 MiB
    between two hosts at 1 Gbit/s took 146 ms in 4 segments and in 8, and 24 and 31 ms of each rank's core; in 2 it
    took 149.
    """
    least, most = (nbytes // itemsize for nbytes in _SHARD_BYTES)
    segments = max(1, -(-numel // most), min(_SEGMENTS, numel // least))
    return max(1, -(-numel // segments))
