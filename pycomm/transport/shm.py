"""Shared memory between the ranks of one host: the default there, and the fastest.

The ranks share one memfd (``_handoff`` says how they come by it); the protocol is native (``csrc/shm``). Every
collective is carried whole; point-to-point messages go through a ring of bytes for each pair. A rank that dies is
noticed within a few milliseconds by every rank that waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..errors import ConfigError, PeerLostError
from ..ops import native
from ..types import VERBS, ReduceOp, dtype_of_name
from ._crossings import Crossings, Making
from ._handoff import share_memory
from ._kin import NOBODY
from ._patience import Look, Patience
from ._wording import CODES, Failure, failed
from .base import Request, Transport

if TYPE_CHECKING:
    from . import ConnectSpec

__all__ = ["ShmTransport", "connect"]

_DTYPES = {getattr(torch, name): dtype.code for name in dir(torch) if (dtype := dtype_of_name(name)) is not None}


class _Whole(NamedTuple):
    """A group as errors call its ranks: rank r of this one, which may be a part of it, is ``ranks[r]`` of ``size``.

    Its own rank r is ``global_ranks[r]`` of the job; none: r.
    """

    ranks: Sequence[int] = ()
    size: int = 0
    global_ranks: Sequence[int] = ()


class _Host:
    """What the groups of this process share: the memory and the processes of its host's ranks. Closed with the last
    of them.
    """

    def __init__(self, fd: int, pidfds: Sequence[int], pids: Sequence[int], ranks_per_core: int, rank: int) -> None:
        self.fd = fd
        self.pidfds = tuple(pidfds)
        self.pids = tuple(pids)
        self.ranks_per_core = ranks_per_core
        self.rank = rank
        self.heaps = native().ShmHeaps(fd, len(pids), rank)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit modules may be gone before this
        if not hasattr(self, "fd"):  # ``copy`` makes such a one
            return
        for fd in (self.fd, *self.pidfds):
            if fd >= 0:
                close(fd)


class _Words:
    """Those of a native group, for ``Crossings``."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        self._group.tell_making(list(ranks), key)

    def made_by(self, rank: int) -> Making:
        members, key = self._group.made_by(rank)
        return Making(frozenset(members), key)

    def ended(self) -> AbstractSet[int]:
        return frozenset(self._group.ended())


class ShmTransport(Transport):
    """Joins ranks of one host through the host's memory."""

    name = "shm"
    native = frozenset(VERBS)
    compares_calls = True
    messages_are_free = True
    scatters_in_place = True
    sees_who_leaves = True
    takes_rows = True

    def __init__(
        self,
        host: _Host,
        host_ranks: Sequence[int],
        rank: int,
        group_name: str,
        area: int,
        timeout_s: float,
        look: Look | None = None,
        maker: _Whole = _Whole(),
    ) -> None:
        """Meets the other members in ``area``; ``look`` raises what makes it vain to wait for them any longer. Errors
        of this are those of a call of ``maker``.
        """
        self.rank = rank
        self.world_size = len(host_ranks)
        self._timeout_s = timeout_s
        self._host = host
        self._host_ranks = tuple(host_ranks)
        self._group_name = group_name
        members = hashlib.blake2b(repr(self._host_ranks).encode(), digest_size=8).digest()
        self._group = native().ShmGroup(
            fd=host.fd,
            host_ranks=len(host.pids),
            area=area,
            rank=rank,
            host_rank_of=list(host_ranks),
            pidfds=[host.pidfds[r] for r in host_ranks],
            pids=[host.pids[r] for r in host_ranks],
            name=group_name,
            members=int.from_bytes(members, "little"),
            timeout_s=timeout_s,
            ranks_per_core=host.ranks_per_core,
            heaps=host.heaps,
            look=look,
            maker=maker,
        )
        self._whole = _Whole(range(self.world_size), self.world_size)
        self._have_waits_look_elsewhere(always=False)
        self._crossings = Crossings(_Words(self._group))
        self.fast: Mapping[str, Callable[..., Any]] = MappingProxyType(
            self._group.short_cuts(torch.Tensor, torch.nn.Parameter)
        )

    @property
    def timeout_s(self) -> float:
        """The timeout of calls that name none, in seconds; the short cuts go by it too."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group.set_timeout(timeout_s)

    @property
    def group_name(self) -> str:
        """As errors call the group."""
        return self._group_name

    @group_name.setter
    def group_name(self, name: str) -> None:
        self._group_name = name
        self._group.set_name(name)

    @property
    def global_ranks(self) -> Sequence[int]:
        """In the job, of the ranks that errors name; none: they are the same."""
        return self._whole.global_ranks

    @global_ranks.setter
    def global_ranks(self, global_ranks: Sequence[int]) -> None:
        self._be_part_of(self._whole._replace(global_ranks=global_ranks))

    @property
    def is_broken(self) -> bool:
        """Whether a rank has died, left or run out of time in this group."""
        return bool(self._group.is_broken)

    @property
    def failure(self) -> Failure | None:
        """What broke this group, None while it is whole."""
        found: tuple[str, int] | None = self._group.failure
        return None if found is None else Failure(*found)

    def check_lost(self, doing: str) -> None:
        self._group.check_lost(doing)

    def look_around(self) -> None:
        self._group.check_lost("a call")
        self.look_elsewhere(NOBODY)

    def look_also_at(self, larger: Transport) -> None:
        super().look_also_at(larger)
        self._have_waits_look_elsewhere(always=True)

    def _have_waits_look_elsewhere(self, *, always: bool) -> None:
        self._group.look_elsewhere_by(partial(_look_elsewhere, weakref.ref(self)), always)

    def leave(self) -> None:
        super().leave()
        self._crossings.leave()

    def who_waits(self, *, at_once: bool = False) -> AbstractSet[int]:
        return self._crossings.who_waits(self)

    def tell_done(self) -> None:
        self._group.tell_going_on()

    def is_part_of(self, ranks: Sequence[int], size: int) -> None:
        self._be_part_of(self._whole._replace(ranks=ranks, size=size))

    def _be_part_of(self, whole: _Whole) -> None:
        self._whole = whole
        self._group.is_part_of(whole)

    def record_on(self, log: Any) -> None:
        self._group.record_on(log)

    def abandon(self) -> None:
        self._group.abandon()

    def drain(self, timeout_s: float) -> bool:
        return bool(self._group.drain(max(timeout_s, 1e-9)))

    def exchange(self, frame: torch.Tensor, verb: str, timeout_s: float | None) -> torch.Tensor:
        frames = torch.empty((self.world_size, frame.numel()), dtype=torch.uint8, device="cpu")
        call = CODES[verb], 0, 0, 0, frame.numel()
        self._group.agree(frames.data_ptr(), frame.data_ptr(), frame.numel(), *call, timeout_s or 0.0)
        return frames

    @property
    def line_ns(self) -> float:
        """One-way latency of a cache line to the neighbouring rank, in nanoseconds, as measured last; 0 if it was
        not.
        """
        return float(self._group.line_ns)

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        return verb in self.native and dtype in _DTYPES

    @property
    def native_group(self) -> Any:
        """The native core's own group."""
        return self._group

    def native_all_reduce(self, flat: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float) -> tuple[Any, ...]:
        return self._group, flat.data_ptr(), flat.numel(), _DTYPES[flat.dtype], int(op), factor, timeout_s

    def allocate(self, nbytes: int) -> Any:
        """Returns memory that every rank of the host can reach: an object with the buffer protocol, given back when
        dropped.
        """
        return self._host.heaps.allocate(nbytes)

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        self._group.all_reduce(
            output.data_ptr(), input.data_ptr(), input.numel(), _DTYPES[input.dtype], int(op), factor, timeout_s or 0.0
        )

    def reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, root: int, timeout_s: float | None
    ) -> None:
        self._group.reduce(
            output.data_ptr(),
            input.data_ptr(),
            input.numel(),
            _DTYPES[input.dtype],
            int(op),
            factor,
            root,
            timeout_s or 0.0,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        self._group.reduce_scatter(
            output.data_ptr(),
            input.data_ptr(),
            output.numel(),
            _row(input),
            _DTYPES[input.dtype],
            int(op),
            factor,
            timeout_s or 0.0,
        )

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float | None) -> None:
        self._group.broadcast(flat.data_ptr(), flat.numel(), _DTYPES[flat.dtype], root, timeout_s or 0.0)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        self._group.all_gather(
            output.data_ptr(), input.data_ptr(), input.numel(), _row(output), _DTYPES[input.dtype], timeout_s or 0.0
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        self._group.all_to_all(
            output.data_ptr(),
            input.data_ptr(),
            list(output_splits),
            list(input_splits),
            _DTYPES[input.dtype],
            timeout_s or 0.0,
        )

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, timeout_s: float | None) -> None:
        address = 0 if output is None else output.data_ptr()
        self._group.gather(address, input.data_ptr(), input.numel(), _DTYPES[input.dtype], root, timeout_s or 0.0)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, timeout_s: float | None) -> None:
        address = 0 if input is None else input.data_ptr()
        self._group.scatter(output.data_ptr(), address, output.numel(), _DTYPES[output.dtype], root, timeout_s or 0.0)

    def barrier(self, timeout_s: float | None) -> None:
        self._group.barrier(timeout_s or 0.0)

    # -- point to point -----------------------------------------------------------------------------------------------

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        return cast(Request, self._group.start_message(True, flat.data_ptr(), flat.nbytes, peer, tag, flat))

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        source = -1 if peer is None else peer
        return cast(Request, self._group.start_message(False, flat.data_ptr(), flat.nbytes, source, tag, flat))

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> ShmTransport | None:
        if ranks is None or self.rank not in ranks:
            return None
        look = partial(self._look_at_makers, ranks, with_all, look)
        members, rank = [self._host_ranks[r] for r in ranks], list(ranks).index(self.rank)
        maker = self._whole._replace(ranks=[self._whole.ranks[r] for r in ranks])
        # A transport that this one is a part of has found the key, and looks for crossings itself.
        is_part = self._larger is not None
        with contextlib.nullcontext(key) if is_part else self._crossings.making(self, ranks, key, look) as key:
            area = self._group.area_of_child(ranks[0], key, look)
            try:
                return ShmTransport(self._host, members, rank, self._group_name, area, self.timeout_s, look, maker)
            except PeerLostError:  # of one that gave it up, maybe, because of another one, which says more
                if not is_part:
                    self._check_makers(ranks, at_once=True)
                raise

    def _look_at_makers(self, ranks: Sequence[int], with_all: bool, look: Look | None) -> None:
        if with_all:
            self.look_around()
        elif self._larger is None:
            self._check_makers(ranks)
        if look is not None:
            look()

    def _check_makers(self, ranks: Sequence[int], *, at_once: bool = False) -> None:
        seen = self._crossings.look(self, ranks, at_once=at_once)
        if seen.is_second:
            self.check_lost("new_group")
        if seen.gone is not None:
            pid = self._host.pids[self._host_ranks[seen.gone]]
            raise failed(self.place("new_group"), Failure("closed", seen.gone, pid))

    def close(self) -> None:
        self._group.close()


def _look_elsewhere(transport: weakref.ref[ShmTransport], peer: int, has_come: Callable[[], bool]) -> None:
    """For the native group, which must not keep the transport that has it."""
    own = transport()
    if own is not None:
        own.look_elsewhere(peer, has_come)


def _row(whole: torch.Tensor) -> int:
    """Returns how many elements the rows of a buffer lie apart, 0 for a flat one."""
    return 0 if whole.dim() == 1 else whole.stride(0)


def connect(spec: ConnectSpec) -> ShmTransport:
    """Joins the ranks of ``spec``, which must all be on this host."""
    host = spec.host_ids[spec.rank]
    if any(other != host for other in spec.host_ids):
        raise ConfigError(
            f"init: rank {spec.rank}: transport 'shm' joins the ranks of one host, "
            f"but they are on {len(set(spec.host_ids))}; use transport='auto', 'torch' or 'mpi'"
        )
    limit = int(native().SHM_MAX_RANKS)
    if spec.world_size > limit:
        raise ConfigError(
            f"init: transport 'shm' joins up to {limit} ranks, got {spec.world_size}; use transport='mpi' or 'torch'"
        )
    memory = share_memory(spec.store, host, spec.rank, spec.world_size, Patience(spec.timeout_s, spec.look))
    joined = _Host(memory.fd, memory.pidfds, memory.pids, -(-spec.world_size // memory.cores), spec.rank)
    return ShmTransport(joined, range(spec.world_size), spec.rank, "world", 0, spec.timeout_s)
