"""What the ranks of a stream tell one another before each grant.

[Note: compared once]
The frame of a rank says how many items it has submitted, the bandwidth that it measures, and a digest of its items up
to each of the last few. So the exchange that orders them (``scheduler.py``) also compares them: where the ranks'
digests are the same at the number that all have reached, their collectives need no comparison of their own, which over
gloo is an exchange beside every segment. Where they differ, or cannot be compared any more because a rank is too far
ahead, each collective compares what it calls, as it does without a stream, and raises what is wrong.
"""

from __future__ import annotations

import struct
from collections import deque
from hashlib import blake2b
from typing import NamedTuple

import torch

from ..collectives.group import Group
from ..collectives.verbs import all_gather_single

__all__ = ["Agreed", "Agreement"]

_REMEMBERED = 64  # items that a rank may be ahead of another
_FIELDS = struct.Struct(f"<qq{_REMEMBERED}q")
_SUBMITTED, _RATE = 0, 1


class Agreed(NamedTuple):
    """The first ``submitted`` items are there on all ranks, the first ``compared`` the same on all of them."""

    submitted: int
    compared: int
    bytes_per_s: float


class Agreement:
    """The exchanges of one stream. ``add`` and ``fill`` are called under the stream's lock, ``run`` by its thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._digests: deque[int] = deque([0] * _REMEMBERED, maxlen=_REMEMBERED)
        self._frame = torch.zeros(_FIELDS.size, dtype=torch.uint8)
        self._raw = self._frame.numpy().data
        self._compared = 0
        can_swap = group.transport.can_agree("cpu")
        self._swap = group.exchanger(_FIELDS.size) if can_swap else self._gather

    def add(self, description: object) -> None:
        """Takes the next item of this rank; ``description`` is what has to be the same on all."""
        text = f"{self._digests[-1]} {description}".encode()
        self._digests.append(int.from_bytes(blake2b(text, digest_size=7).digest(), "little"))

    def fill(self, submitted: int, bytes_per_s: float) -> None:
        """Writes this rank's frame."""
        _FIELDS.pack_into(self._raw, 0, submitted, round(bytes_per_s), *self._digests)

    def run(self) -> Agreed:
        """Swaps the frames with the other ranks."""
        frames = self._swap(self._frame, "all_gather_single")
        rows = list(_FIELDS.iter_unpack(frames.numpy().data))
        submitted = min(row[_SUBMITTED] for row in rows)
        behind = [row[_SUBMITTED] - submitted for row in rows]
        if max(behind) < _REMEMBERED and len({row[-1 - steps] for row, steps in zip(rows, behind)}) == 1:
            self._compared = submitted
        return Agreed(submitted, self._compared, float(min(row[_RATE] for row in rows)))

    def _gather(self, frame: torch.Tensor, _verb: str) -> torch.Tensor:
        """The exchange of a transport that has none: NCCL's alone."""
        device = self._group.control_device
        frames = torch.empty((self._group.world_size, frame.numel()), dtype=torch.uint8, device=device)
        all_gather_single(frames, frame.to(device), self._group)
        return frames.cpu()
