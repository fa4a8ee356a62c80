"""Several all_reduces as one: a small message costs its latency, not its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ..errors import ConfigError
from ..types import ReduceOp
from .context import CallOptions, OpLike, Options, parse_op, parse_options, resolve
from .group import Group
from .tensors import Flat, as_tensor, check_disjoint, consecutive, flatten
from .verbs import check_op, run_all_reduce
from .work import Work

if TYPE_CHECKING:
    from ..compression import Part

__all__ = ["Coalescing", "all_reduce_coalesced", "coalescing"]


class _Bucket:
    """all_reduces that can be one: same dtype, device, operator and options; with PREMUL_SUM of one call."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.results: list[Any] = []
        self.parts: list[Part] = []


class Coalescing:
    """Collects the all_reduces made inside ``coalescing()``; waited on afterwards if they run asynchronously."""

    def __init__(self, group: Group, async_op: bool) -> None:
        self._group = group
        self._is_async = async_op
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}
        self._tensors: list[torch.Tensor] = []  # of all buckets, in the order of the calls
        self._works: list[Work] = []

    def wait(self) -> None:
        """Blocks until all coalesced calls are complete; after the context, with ``async_op=True``."""
        for work in self._works:
            work.wait()

    def add(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        factor: float,
        options: Options,
        result: Any,
        async_op: bool,
        parts: Sequence[Part] = (),
        call: int | None = None,
    ) -> None:
        """Takes one all_reduce of ``tensor``, a result of ``as_tensor``. For the verbs.

        Those of one ``call`` (None: a call of its own) have one factor on every rank.
        """
        if async_op:
            raise ConfigError(
                "all_reduce(async_op=True) inside coalescing(): the calls become one; "
                "use coalescing(async_op=True) and wait on what it gives"
            )
        # Factors are each rank's own, so whether those of two calls are equal is no word on what the other ranks fuse.
        number = (len(self._tensors) if call is None else call) if op is ReduceOp.PREMUL_SUM else None
        key = (tensor.dtype, tensor.device, op, factor, options._replace(name=None), number)
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.tensors.append(tensor)
        self._tensors.append(tensor)
        bucket.results.append(result)
        bucket.parts.extend(parts)

    def flush(self) -> None:
        """Runs what was collected, one call a bucket, in the order in which the buckets began. Now the tensors are
        read. Raises ConfigError if two of them share memory: the one call would not do what several do.
        """
        with self._group.scope("all_reduce"):
            check_disjoint([(f"tensors[{index}] of those coalesced", each) for index, each in enumerate(self._tensors)])
        for (_, _, op, factor, options, _), bucket in self._buckets.items():
            with self._group.scope("all_reduce"):
                devices = self._group.transport.devices
                flats = [flatten(each, reads=True, writes=True, devices=devices) for each in bucket.tensors]
                flats, fused = _fuse(flats)
            work = run_all_reduce(
                self._group, flats, fused, op, factor, options, self._is_async, bucket.results, bucket.parts
            )
            if work is not None:
                self._works.append(work)

    @property
    def works(self) -> list[Work]:
        """The handles of what was collected, if it runs asynchronously."""
        return list(self._works)


@contextmanager
def coalescing(group: Any = None, async_op: bool = False) -> Iterator[Coalescing]:
    """Fuses the all_reduces made inside, on this group, into one call for each dtype and operator, made at the end.
    Those with PREMUL_SUM stay apart.

    Their tensors are read at the end, too: what the body changes in them counts. Their results are there after the
    context, or after ``wait()`` on what it gives if ``async_op`` is true. Other calls run at once, so before the
    all_reduces. All ranks make the same calls inside. If the body raises, none is made. Raises ConfigError at the end
    if two of the tensors share memory, as one has to be reduced before the other then: no call is made.
    """
    g = resolve(group)
    if g.pending is not None:
        raise ConfigError(f"coalescing() on group {g.name!r} is already open; contexts of one group do not nest")
    manager = Coalescing(g, async_op)
    g.pending = manager
    try:
        yield manager
    finally:
        g.pending = None
    manager.flush()


def all_reduce_coalesced(
    tensors: Sequence[Any], op: OpLike, group: Any, async_op: bool, **options: Unpack[CallOptions]
) -> list[Work] | None:
    """Reduces all of ``tensors`` in place, by one call for each dtype; returns its handles if ``async_op`` is true.

    For the torch.distributed backend, in threads that open no context; others use ``coalescing``.
    """
    g, parsed = resolve(group), parse_options(**options)
    manager = Coalescing(g, async_op)
    with g.scope("all_reduce"):
        reduce_op, factor = parse_op(op)
        dense = [as_tensor(each, f"tensors[{index}]", writes=True) for index, each in enumerate(tensors)]
        for each, tensor in zip(dense, tensors, strict=True):
            check_op(each.dtype, reduce_op)
            manager.add(each, reduce_op, factor, parsed, tensor, async_op=False, call=0)
    manager.flush()
    return manager.works or None


def _fuse(flats: list[Flat]) -> tuple[list[Flat], torch.Tensor]:
    """Returns one buffer of all flats: their own memory if that is one already, as an engine's bucket is, else a copy;
    and parts, which copy back from it when they finish.
    """
    if len(flats) == 1:
        return flats, flats[0].tensor
    whole = consecutive([flat.tensor for flat in flats]) if all(flat.finish is None for flat in flats) else None
    if whole is not None:
        return flats, whole
    fused = torch.cat([flat.tensor for flat in flats])
    parts = []
    for flat, part in zip(flats, torch.split(fused, [flat.tensor.numel() for flat in flats]), strict=True):
        parts.append(Flat(part, _finisher(flat, part)))
    return parts, fused


def _finisher(flat: Flat, part: torch.Tensor) -> Any:
    def finish() -> None:
        flat.tensor.copy_(part)
        if flat.finish is not None:
            flat.finish()

    return finish
