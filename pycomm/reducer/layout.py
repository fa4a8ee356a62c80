"""Which parameters share a bucket: a pure function of their sizes and the order in which their gradients arrive."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..sizes import bytes_of

__all__ = ["DEFAULT_BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Slot", "assign_buckets", "bucket_bytes_of"]

DEFAULT_BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # the first is small, so that the wire has something to do early in the backward pass


class Slot(NamedTuple):
    """What the layout has to know of a parameter; those with different ``kind`` (dtype, device) share no bucket."""

    nbytes: int
    kind: Hashable


def bucket_bytes_of(value: int | str) -> int | None:
    """Returns ``bucket_bytes`` as a number, None for "auto". Raises ConfigError."""
    return None if value == "auto" else bytes_of(value, "bucket_bytes")


def assign_buckets(
    slots: Sequence[Slot], order: Sequence[int], bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[list[int]]:
    """Returns the buckets, each a list of indices into ``slots``, in the order in which they fill up.

    ``order`` is the expected order of arrival. A bucket is closed by the parameter that fills it to ``bucket_bytes`` or
    more, the first one to ``first_bucket_bytes``.
    """
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limit = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    for index in order:
        slot = slots[index]
        open_buckets.setdefault(slot.kind, []).append(index)
        filled[slot.kind] = filled.get(slot.kind, 0) + slot.nbytes
        if filled[slot.kind] >= limit:
            closed.append(open_buckets.pop(slot.kind))
            filled[slot.kind], limit = 0, bucket_bytes
    position = {index: place for place, index in enumerate(order)}
    return closed + sorted(open_buckets.values(), key=lambda bucket: position[bucket[-1]])
