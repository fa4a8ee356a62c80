"""Several hosts: shared memory carries what stays on a host, MPI or gloo what leaves it.

Messages go by the peer's host. Over hosts of equal size all_reduce (``_mixed_reduce.py``), all_gather and
reduce_scatter (``_mixed_shards.py``) are composed of both; the other collectives run as plans, which know the hosts:
`hierarchical` sends no byte to another host that it need not.

[Note: one failure for both]
What fails in one transport ends the group in both: the rank that got the error closes both, so whoever waits for it,
on its host or on another, gets an error too, and closes its own. So a death reaches every rank of the group. A message
of a user that does not come in time ends nothing: it may come yet.

Who waits inside a host looks at the other hosts now and then, for what the ranks of his own cannot tell him: they may
all wait for one another, one in a call, another in a message that will not be sent any more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from ..errors import CollectiveTimeoutError, PeerLostError, PycommError, TransportError
from ..topology import Topology, detect_launch
from ..types import ReduceOp
from . import ConnectSpec, _mixed_shards
from . import connect as connect_by
from ._host_frames import HostFrames
from ._mixed_arrivals import Announced, Arrivals
from ._mixed_column import Column
from ._mixed_reduce import ColumnReduction
from ._watched import WatchedTransport
from ._wording import Failure, Remembered, is_elsewhere, why
from .base import ANNOUNCEMENT_TAG, FIRST_OWN_TAG, Request, Transport

if TYPE_CHECKING:
    from ._kin import Kin
    from ._patience import Look
    from .base import Exchange, Meanwhile, MeanwhileOnHost

__all__ = ["MixedTransport", "connect"]

_log = logging.getLogger("pycomm")

_FOR_EVER_S = 1e9
_Frames = TypeVar("_Frames")


class MixedTransport(Transport):
    """Joins ranks on several hosts by two transports: ``inner`` those of this host, ``outer`` all of them."""

    name: ClassVar[str] = "mixed"

    def __init__(self, inner: Transport, outer: Transport, topology: Topology) -> None:
        """Takes both, which it closes. Ranks of ``inner`` are the local ranks of ``topology``."""
        self.inner = inner
        self.outer = outer
        self.topology = topology
        self.rank = outer.rank
        self.world_size = outer.world_size
        self.devices = inner.devices & outer.devices
        self.scatters_in_place = inner.scatters_in_place
        self._timeout_s = outer.timeout_s
        self._neighbours = topology.hosts[topology.host_of(self.rank)]
        self._local = {rank: index for index, rank in enumerate(self._neighbours)}
        self._starting = threading.Lock()  # one thread at a time calls a transport
        self._failure: Remembered | None = None  # what ended both
        self._arrivals = Arrivals()
        self._frames: HostFrames | None = None
        if len(set(map(len, topology.hosts))) == 1:  # else the ranks' shards do not match; a plan finds how they do
            column = [ranks[inner.rank] for ranks in topology.hosts]
            host = topology.host_of(self.rank)
            self._column = Column(inner, column, host, partial(_start_outside, outer, self._starting))
            self._frames = HostFrames(inner, outer, topology, column)
            self.frame_bytes = self._frames.frame_bytes
            self.native = frozenset({"all_reduce"})
            if inner.takes_rows and [*chain(*topology.hosts)] == [*range(self.world_size)]:  # a host's block is one
                self.native |= {"all_gather_single", "reduce_scatter_single"}
        inner.look_also_at(self)
        inner.is_part_of(self._neighbours, self.world_size)

    @property
    def timeout_s(self) -> float:
        """The timeout of calls that name none, in seconds, of both transports."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = self.inner.timeout_s = self.outer.timeout_s = timeout_s

    @property
    def group_name(self) -> str:
        """As errors call the group."""
        return self.outer.group_name

    @group_name.setter
    def group_name(self, name: str) -> None:
        self.outer.group_name = self.inner.group_name = name

    @property
    def global_ranks(self) -> Sequence[int]:
        """In the job, of the ranks that errors name; none: they are the same."""
        return self.outer.global_ranks

    @global_ranks.setter
    def global_ranks(self, global_ranks: Sequence[int]) -> None:
        self.outer.global_ranks = self.inner.global_ranks = global_ranks

    @property
    def calls(self) -> int:
        """How many collectives the ranks have agreed on: ``outer`` counts them, and words what goes wrong in one."""
        return self.outer.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self.outer.calls = calls

    def allocate(self, nbytes: int) -> Any:
        """Returns memory that every rank of this host can reach, as ``ShmTransport.allocate`` does."""
        allocate: Callable[[int], Any] = getattr(self.inner, "allocate")  # noqa: B009
        return allocate(nbytes)

    # -- agreement and failure ----------------------------------------------------------------------------------------

    def can_agree(self, device_type: str) -> bool:
        return self.outer.can_agree(device_type)

    def exchange(self, frame: torch.Tensor, verb: str, timeout_s: float | None) -> torch.Tensor:
        return self._between_hosts(self.outer.exchange, frame, verb, timeout_s)

    def exchange_frames(
        self,
        frame: torch.Tensor,
        nbytes: int,
        verb: str,
        timeout_s: float | None,
        meanwhile: MeanwhileOnHost | None = None,
    ) -> Sequence[torch.Tensor]:
        if self._frames is None:
            return super().exchange_frames(frame, nbytes, verb, timeout_s)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return self._between_hosts(self._frames.swap, frame, verb, nbytes, limit_s, meanwhile)

    def exchanger(self, nbytes: int) -> Exchange:
        return partial(self._between_hosts, self.outer.exchanger(nbytes))

    def _between_hosts(
        self, exchange: Callable[..., _Frames], frame: torch.Tensor, verb: str, *arguments: Any
    ) -> _Frames:
        with self.ending_both(verb):
            return exchange(frame, verb, *arguments)

    @property
    def is_broken(self) -> bool:
        """Whether a failure has ended this group for good, as far as this rank knows."""
        return self._failure is not None or self.outer.is_broken or self.inner.is_broken

    @property
    def failure(self) -> Failure | None:
        """What broke this group, as far as this rank knows and the hosts have told one another."""
        return self.outer.failure

    def check_given_up(self, doing: str) -> None:
        with self.ending_both(doing):
            self.outer.check_given_up(doing)

    def check_lost(self, doing: str) -> None:
        with self.ending_both(doing):
            self.outer.check_lost(doing)

    def look_around(self) -> None:
        self.outer.look_around()

    def look_also_at(self, larger: Transport) -> None:
        self.outer.look_also_at(larger)

    def join_kin(self, kin: Kin, members: Sequence[int]) -> None:
        self.kin = kin
        self.outer.join_kin(kin, members)
        self.inner.join_kin(kin, [members[rank] for rank in self._neighbours])

    def leave(self) -> None:
        self.outer.leave()
        self.inner.leave()

    def abandon(self) -> None:
        self.outer.abandon()
        self.inner.abandon()

    # -- collectives --------------------------------------------------------------------------------------------------

    def supports(self, verb: str, dtype: torch.dtype, op: ReduceOp | None = None) -> bool:
        needed = "all_gather_single" if verb == "all_gather_single" else "reduce_scatter_single"
        return verb in self.native and self.inner.supports(needed, dtype, op)

    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        self.all_reduce_agreed(None, output, input, op, factor, timeout_s)

    def all_reduce_agreed(
        self,
        agree: Callable[[Meanwhile | None], object] | None,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        factor: float,
        timeout_s: float | None,
    ) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        its_op, its_factor = self._as_sum(op, factor, input.itemsize)
        reduction = ColumnReduction(self._column, output, input, its_op, its_factor)
        if agree is not None:
            agree(partial(reduction.begin, limit_s))
        with self.ending_both("all_reduce"):
            reduction.run(limit_s)
        if op is ReduceOp.AVG and its_op is ReduceOp.SUM:
            output.div_(self.world_size)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, factor: float, timeout_s: float | None
    ) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        its_op, its_factor = self._as_sum(op, factor, input.itemsize)
        with self.ending_both("reduce_scatter_single"):
            _mixed_shards.reduce_scatter(self._column, output, input, its_op, its_factor, limit_s)
        if op is ReduceOp.AVG and its_op is ReduceOp.SUM:
            output.div_(self.world_size)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self.ending_both("all_gather_single"):
            _mixed_shards.all_gather(self._column, output, input, limit_s)

    def _as_sum(self, op: ReduceOp, factor: float, itemsize: int) -> tuple[ReduceOp, float]:
        """Returns what an average is until it is divided: 16- and 8-bit floats are divided first, as plans do it, so
        that their sum does not overflow.
        """
        if op is not ReduceOp.AVG:
            return op, factor
        return (ReduceOp.PREMUL_SUM, 1.0 / self.world_size) if itemsize < 4 else (ReduceOp.SUM, factor)

    # -- point to point -----------------------------------------------------------------------------------------------

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        if tag >= FIRST_OWN_TAG:
            return self.start(flat, peer, tag, is_send=True)
        told = torch.tensor([tag], dtype=torch.int64, device="cpu")
        with self.ending_both(), self._starting:
            announcement = self._start(told, peer, ANNOUNCEMENT_TAG, is_send=True)
            if peer in self._local and isinstance(self.outer, WatchedTransport):
                self.outer.watch.tally.send(peer, ANNOUNCEMENT_TAG)  # it counts those that it carries by itself
        return Announced(announcement, self.start(flat, peer, tag, is_send=True), self._arrivals)

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        if tag < FIRST_OWN_TAG:
            return self._arrivals.receive(self, flat, peer, tag)
        assert peer is not None, "only users receive from any rank"
        return self.start(flat, peer, tag, is_send=False)

    def start(self, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> _Routed:
        """Starts a message, unannounced, on the way to or from ``peer``."""
        with self.ending_both(), self._starting:
            request = self._start(flat, peer, tag, is_send=is_send)
        return _Routed(self, request, peer, tag < FIRST_OWN_TAG)

    def _start(self, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Request:
        local = self._local.get(peer)
        part, its_rank = (self.outer, peer) if local is None else (self.inner, local)
        return part.isend(flat, its_rank, tag) if is_send else part.irecv(flat, its_rank, tag)

    def listen(self, part: Transport, box: torch.Tensor) -> int:
        """Waits for an announcement in ``part``; returns the rank in this group of who made it."""
        with self._starting:
            request: Any = part.irecv(box, None, ANNOUNCEMENT_TAG)
        request.wait(_FOR_EVER_S)
        return int(self._neighbours[request.source] if part is self.inner else request.source)

    def check_senders(self, nbytes: int, tag: int, heard: Mapping[int, int]) -> None:
        """Raises PeerLostError if nobody is left who could send a message: ``heard`` are announcements, by rank."""
        if isinstance(self.outer, WatchedTransport):
            failure = self.outer.watch.all_left(ANNOUNCEMENT_TAG, heard)
            if failure is not None:
                raise self.outer.failed(f"receiving {nbytes} bytes from any rank with tag {tag}", failure)

    @contextlib.contextmanager
    def ending_both(self, doing: str = "", is_users: bool = False) -> Iterator[None]:
        """See [Note: one failure for both]. Later calls say again what failed.

        ``doing`` is the call of this group that those inside are parts of; ``is_users``: it is a message of a user's.
        """
        if self._failure is not None:
            raise self._failure.again()
        try:
            yield
        except TransportError as error:
            if is_users and isinstance(error, CollectiveTimeoutError) and not self.is_broken:
                raise
            cause = self._cause_of(error, doing)
            self._failure = Remembered.of(cause)
            self.close()
            if cause is error:
                raise
            raise cause from error

    def reason(self, error: PycommError) -> PycommError:
        """Returns what ended both, which this error may be the first word of.

        Of what another thread has found one that waits in a part hears no more than that it is closed.
        """
        if self._failure is not None:
            return self._failure.again()
        return self._cause_of(error, "") if isinstance(error, TransportError) else error

    def _cause_of(self, error: TransportError, doing: str) -> TransportError:
        """Returns what broke the group as a whole, and tells the other hosts.

        If a rank of this host has closed ``inner``, that may be because another one has died.
        """
        is_of_ranks = isinstance(error, PeerLostError | CollectiveTimeoutError)
        if not is_of_ranks or not isinstance(self.outer, WatchedTransport):
            return error
        if is_elsewhere(error):  # see _kin.py
            self.outer.abandon()
            return error
        watch, (verb, known) = self.outer.watch, why(error)
        if isinstance(error, CollectiveTimeoutError) and known is None:  # this rank's own
            if watch.failure is None:
                watch.announce("timeout", self.rank, self.calls)
            return error
        failure = watch.search(self.calls)
        if failure is None and known is not None:
            failure = watch.declare(known._replace(call=self.calls))
        return error if failure is None or failure == known else self.outer.failed(doing or verb, failure)

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> Transport | None:
        if ranks is None or self.rank not in ranks:
            return None
        topology = Topology.of_hosts([self.topology.host_of(rank) for rank in ranks])
        neighbours = [self._local[rank] for rank in ranks if rank in self._local]
        outer = self.outer
        assert isinstance(outer, WatchedTransport), "gloo or MPI"
        # While the ranks of this host wait for one another.
        look = partial(self._look_at_makers, outer, ranks, with_all, look)
        try:
            with outer.crossings.making(self, ranks, key, look) as common_key:
                return _join(
                    topology,
                    lambda: self.inner.split(neighbours, common_key, with_all=with_all, look=look),
                    lambda: outer.split(ranks, common_key, with_all=with_all),
                )
        except PeerLostError:
            if with_all:
                with self.ending_both("new_group"):
                    raise
            outer.check_makers(ranks, at_once=True)  # one of this host may have given it up because of another one
            raise

    def _look_at_makers(self, outer: WatchedTransport, ranks: Sequence[int], with_all: bool, look: Look | None) -> None:
        """As ``WatchedTransport``'s, which looks at groups that cross by what has broken ``outer``; nothing else asks
        the other hosts for that.
        """
        failure = outer.watch.look(outer.calls)
        if failure is not None:
            outer.watch.declare(failure)
        if with_all:
            outer.check_whole("new_group")
        outer.look_at_makers(ranks, look)

    def close(self) -> None:
        self._arrivals.close()
        self.inner.close()
        self.outer.close()


def _start_outside(
    outer: Transport, starting: threading.Lock, flat: torch.Tensor, peer: int, tag: int, *, is_send: bool
) -> Request:
    """Starts a message of a call that as a whole is in ``ending_both``: 64 of them in an all_reduce of 16 MiB."""
    with starting:
        return outer.isend(flat, peer, tag) if is_send else outer.irecv(flat, peer, tag)


class _Routed(Request):
    """A message on its way in one of the two; ``source`` is the rank in the whole group."""

    def __init__(self, transport: MixedTransport, request: Request, peer: int, is_users: bool) -> None:
        self.source = peer
        self._transport = transport
        self._request = request
        self._is_users = is_users

    def test(self) -> bool:
        with self._transport.ending_both(is_users=self._is_users):
            return self._request.test()

    def wait(self, timeout_s: float | None = None) -> None:
        with self._transport.ending_both(is_users=self._is_users):
            self._request.wait(timeout_s)

    def settle(self) -> None:
        with self._transport.ending_both(is_users=self._is_users):
            self._request.settle()


# -- joining ----------------------------------------------------------------------------------------------------------


def connect(spec: ConnectSpec) -> Transport:
    """Joins the ranks of ``spec``: on one host by shm alone, on hosts with one rank each by the outer transport alone.

    The outer transport is mpi where an MPI launcher started the ranks and mpi4py is there, else torch (gloo).
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, though not in its __all__

    topology = Topology.of_hosts(spec.host_ids)
    host, local = topology.host_of(spec.rank), topology.local_rank_of(spec.rank)
    neighbours = len(topology.hosts[host])
    inner_spec = replace(
        spec,
        rank=local,
        world_size=neighbours,
        store=PrefixStore(f"host{host}", spec.store),
        host_ids=spec.host_ids[spec.rank : spec.rank + 1] * neighbours,
    )
    outer = "mpi" if detect_launch().is_mpi and importlib.util.find_spec("mpi4py") is not None else "torch"
    _log.info("%d ranks on %d hosts: shm inside, %s between them", spec.world_size, len(topology.hosts), outer)
    joined = _join(
        topology,
        lambda: connect_by("shm", inner_spec),
        lambda: connect_by(outer, spec),
    )
    assert joined is not None, "every rank is a member"
    return joined


def _join(
    topology: Topology, make_inner: Callable[[], Transport | None], make_outer: Callable[[], Transport | None]
) -> Transport | None:
    """Returns what joins the ranks of ``topology``: one of the two alone if that carries everything."""
    if len(topology.hosts) == 1:
        return make_inner()
    if len(topology.hosts) == topology.world_size:
        return make_outer()
    inner = make_inner()
    assert inner is not None, "this rank is on its own host"
    try:
        outer = make_outer()
        assert outer is not None, "this rank is a member"
    except BaseException:
        inner.close()
        raise
    return MixedTransport(inner, outer, topology)
