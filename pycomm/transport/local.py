"""Ranks as threads of one process: the reference transport, and the double for tests.

Every rank has a mailbox. ``isend`` copies straight into a receive that is already posted, else it leaves a copy of the
data in the receiver's mailbox; so a send is complete when it returns. There are no native collectives: everything runs
as a plan.

    world = LocalWorld(4)
    # in the thread of rank r:
    with pycomm.init(world.transports[r]):
        pycomm.all_reduce(tensor)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import CollectiveTimeoutError, ConfigError, PeerLostError, TransportError
from . import _wording as wording
from ._crossings import Crossings, Making
from ._kin import ANYBODY, GIVEN_UP
from .base import FIRST_OWN_TAG, Request, Transport

if TYPE_CHECKING:
    from . import ConnectSpec
    from ._patience import Look

__all__ = ["LocalTransport", "LocalWorld", "connect"]

_GIVEN_UP = "it was interrupted in the middle of a call"
_LOOK_S = 20e-3  # between two looks of a rank that waits whether the group is broken


class _Message(NamedTuple):
    source: int
    tag: int
    data: torch.Tensor


class _Mailbox:
    """What one rank has not yet received, and the receives it waits for; both in order of arrival."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: list[_Message] = []
        self.receives: list[_Receive] = []


class _Loss(NamedTuple):
    reason: str
    calls: int  # that the rank had made


class _Hub:
    """What the ranks of one group share: the mailboxes, who is gone and why, and the groups split off."""

    def __init__(self, world_size: int) -> None:
        self.mailboxes = [_Mailbox() for _ in range(world_size)]
        self.lost: dict[int, _Loss] = {}
        self.missed: int | None = None  # of the lost ones, whose loss a rank was told of first: that breaks the group
        self.children: dict[tuple[int, tuple[int, ...]], _Hub] = {}
        self.joined: set[int] = set()  # who has come to make this one
        self.making = [Making()] * world_size  # the groups that they make from this one; see _crossings.py
        self.changed = threading.Condition()

    def are_here(self, timeout_s: float) -> bool:
        """Waits for all ranks to join this group; returns False after ``timeout_s``."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.joined) == len(self.mailboxes), timeout_s)

    def lose(self, rank: int, reason: str, calls: int) -> None:
        """Tells every rank that ``rank`` is gone after so many calls. The first reason stays."""
        with self.changed:
            if rank in self.lost:
                return
            self.lost[rank] = _Loss(reason, calls)
        for mailbox in self.mailboxes:
            with mailbox.changed:
                for receive in list(mailbox.receives):
                    receive.fail_if_lost()
                mailbox.changed.notify_all()

    def miss(self, rank: int) -> int:
        """A rank is told that ``rank`` is gone, and makes its part of no more calls: returns whom all are told of."""
        with self.changed:
            if self.missed is None:
                self.missed = rank
            return self.missed


class _Words:
    """A rank's, for ``Crossings``."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        self._hub.making[self._rank] = Making(frozenset(ranks), key)

    def made_by(self, rank: int) -> Making:
        return self._hub.making[rank]

    def ended(self) -> AbstractSet[int]:
        return frozenset(self._hub.lost)


class _Sent(Request):
    """A message that has been delivered or copied."""

    def test(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None


class _Receive(Request):
    """A posted receive; its fields change under the mailbox's condition."""

    def __init__(self, transport: LocalTransport, flat: torch.Tensor, peer: int | None, tag: int) -> None:
        self.transport = transport
        self.flat = flat
        self.peer = peer
        self.tag = tag
        self.source = -1
        self.is_done = False
        self.error: Exception | None = None

    def matches(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.peer in (None, source)

    def deliver(self, source: int, data: torch.Tensor) -> None:
        """Completes this receive with ``data``, or with an error if the sizes differ."""
        self.source = source
        if data.nbytes == self.flat.nbytes:
            _as_bytes(self.flat).copy_(_as_bytes(data))
        else:
            place = self.transport.place("recv")
            self.error = wording.wrong_size(place, source, self.tag, self.flat.nbytes, data.nbytes)
        self.is_done = True

    def fail_if_lost(self) -> None:
        """Fails this receive if nobody is left who could send it, or the group is broken, or closed by this rank."""
        gone = self._whose_loss_ends_it()
        if gone is not None:
            self._fail(self.transport.peer_lost(gone))
        elif self.transport.is_closed:
            self._fail(wording.used_closed(self.transport.place("recv")))

    def _fail(self, error: TransportError) -> None:
        self.transport.mailbox.receives.remove(self)
        self.error = error
        self.is_done = True

    def _whose_loss_ends_it(self) -> int | None:
        hub = self.transport.hub
        if hub.missed is not None:
            return hub.missed
        if self.peer in hub.lost:
            return self.peer
        if self.tag >= FIRST_OWN_TAG:  # of a collective, which takes all; who should send this may have been told
            early = [rank for rank, loss in hub.lost.items() if loss.calls < self.transport.calls]
            return min(early, default=None)
        others = set(range(self.transport.world_size)) - {self.transport.rank}
        return min(others) if self.peer is None and others and others <= hub.lost.keys() else None

    def test(self) -> bool:
        with self.transport.saying_why(), self.transport.mailbox.changed:
            if self._has_come():
                return True
        self._look_elsewhere()
        return False

    def _look_elsewhere(self) -> None:
        self.transport.look_elsewhere(ANYBODY if self.peer is None else self.peer, lambda: self.is_done)

    def _has_come(self) -> bool:
        if not self.is_done:
            self.fail_if_lost()
        if isinstance(self.error, PeerLostError):
            self.transport.hub.miss(self.error.rank)
        if self.error is not None:
            raise self.error
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self.transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self.transport.saying_why():
            while not self._comes_soon(deadline, limit_s):
                self._look_elsewhere()

    def _comes_soon(self, deadline: float, limit_s: float) -> bool:
        """Waits for this message for a while. Raises CollectiveTimeoutError after ``deadline``."""
        with self.transport.mailbox.changed:
            if self._has_come():
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CollectiveTimeoutError(
                    f"rank {self.transport.rank} waited {limit_s:.3g} s for a message of {self.flat.nbytes} bytes "
                    f"from {'any rank' if self.peer is None else f'rank {self.peer}'} with tag {self.tag}, "
                    f"none came; see whether that rank makes the same calls, or raise the timeout"
                )
            self.transport.mailbox.changed.wait(min(left_s, _LOOK_S))
            return self._has_come()


class LocalTransport(Transport):
    """One rank of a ``LocalWorld``; see the contract in ``base.py``. Used by the thread that is this rank."""

    name = "local"

    def __init__(self, hub: _Hub, rank: int, timeout_s: float) -> None:
        self.hub = hub
        self.rank = rank
        self.world_size = len(hub.mailboxes)
        self.timeout_s = timeout_s
        self.mailbox = hub.mailboxes[rank]
        self.is_closed = False
        self._children: list[LocalTransport] = []
        self._crossings = Crossings(_Words(hub, rank))

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        self._check_open()
        if self.hub.missed is not None or peer in self.hub.lost:
            with self.saying_why():
                raise self.peer_lost(self.hub.miss(peer))
        mailbox = self.hub.mailboxes[peer]
        with mailbox.changed:
            for receive in mailbox.receives:
                if receive.matches(self.rank, tag):
                    mailbox.receives.remove(receive)
                    receive.deliver(self.rank, flat)
                    mailbox.changed.notify_all()
                    return _Sent()
            mailbox.messages.append(_Message(self.rank, tag, flat.clone()))
        return _Sent()

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        self._check_open()
        receive = _Receive(self, flat, peer, tag)
        with self.mailbox.changed:
            for index, message in enumerate(self.mailbox.messages):
                if receive.matches(message.source, message.tag):
                    del self.mailbox.messages[index]
                    receive.deliver(message.source, message.data)
                    return receive
            self.mailbox.receives.append(receive)
            receive.fail_if_lost()
        return receive

    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> LocalTransport | None:
        self._check_open()
        if ranks is None or self.rank not in ranks:
            return None
        look_at_once = partial(self._look_at_makers, ranks, with_all, look, True)
        look = partial(self._look_at_makers, ranks, with_all, look, False)
        with self._crossings.making(self, ranks, key, look) as key:
            with self.hub.changed:
                hub = self.hub.children.setdefault((key, tuple(ranks)), _Hub(len(ranks)))
            child = LocalTransport(hub, list(ranks).index(self.rank), self.timeout_s)
            self._children.append(child)
            try:
                self._await_members(child, ranks, look, look_at_once)
            except BaseException:
                child.fail("it gave up making the group")
                raise
        return child

    def _await_members(self, child: LocalTransport, ranks: Sequence[int], look: Look, look_at_once: Look) -> None:
        hub, deadline = child.hub, time.monotonic() + self.timeout_s
        with hub.changed:
            hub.joined.add(child.rank)
            hub.changed.notify_all()
        while not hub.are_here(_LOOK_S):
            look()
            if hub.lost and not hub.are_here(0.0):  # somebody has given it up: nobody leaves before all have joined
                look_at_once()  # because of another one, maybe, which says more
                member, loss = min(hub.lost.items())
                raise self._gone(ranks[member], loss)
            if time.monotonic() > deadline:
                absent = next(member for number, member in enumerate(ranks) if number not in hub.joined)
                raise wording.timed_out(self.place("new_group"), self.timeout_s, f"rank {absent}", is_broken=False)

    def _look_at_makers(self, ranks: Sequence[int], with_all: bool, look: Look | None, at_once: bool) -> None:
        gone = self.hub.lost.keys() & set(range(self.world_size) if with_all else ranks)
        if gone:
            first = self.hub.miss(min(gone))  # which may be none of these
            raise self.peer_lost(first if first in gone else min(gone))
        if self._crossings.look(self, ranks, at_once=at_once).is_second:
            self.check_lost("new_group")
        if look is not None:
            look()

    def abandon(self) -> None:
        self.hub.lose(self.rank, _GIVEN_UP, self.calls)

    def who_waits(self, *, at_once: bool = False) -> AbstractSet[int]:
        return self._crossings.who_waits(self)

    @contextlib.contextmanager
    def saying_why(self) -> Iterator[None]:
        """The span in which this rank hears that another is gone: raises why that has given up a call, if it can."""
        try:
            yield
        except PeerLostError as error:
            if not wording.is_elsewhere(error) and self.hub.lost[error.rank].reason == _GIVEN_UP:
                self.look_elsewhere(GIVEN_UP)
            raise

    def check_lost(self, doing: str) -> None:
        if self.hub.lost:
            raise self.peer_lost(self.hub.miss(min(self.hub.lost)))

    @property
    def failure(self) -> wording.Failure | None:
        return None if self.hub.missed is None else wording.Failure("closed", self.hub.missed)

    def fail(self, reason: str) -> None:
        """Declares this rank dead, here and in every group split off from here, as the end of its process would."""
        self.hub.lose(self.rank, reason, self.calls)
        for child in self._children:
            child.fail(reason)

    def close(self) -> None:
        self.is_closed = True
        self.hub.lose(self.rank, "it closed the group", self.calls)

    def peer_lost(self, peer: int) -> PeerLostError:
        """Returns the error that says that ``peer`` is gone."""
        return self._gone(peer, self.hub.lost[peer])

    def _gone(self, peer: int, loss: _Loss) -> PeerLostError:
        place = self.place("a call")
        return PeerLostError(
            f"{wording.called(place, peer)} is gone ({loss.reason}) while rank {self.rank} of {self.world_size} "
            f"needs it; see that rank's own error first, then make a new group of the ranks that are left",
            peer,
            wording.globally(place, peer),
        )

    def _check_open(self) -> None:
        if self.rank in self.hub.lost:
            raise TransportError(f"rank {self.rank} used a group that it had closed; make a new group")


class LocalWorld:
    """Makes the ``transports`` of ``world_size`` ranks that are threads; rank r uses ``transports[r]``."""

    def __init__(self, world_size: int, timeout_s: float = 600.0) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size of a LocalWorld: expected at least 1, got {world_size}")
        hub = _Hub(world_size)
        self.world_size = world_size
        self.transports = tuple(LocalTransport(hub, rank, timeout_s) for rank in range(world_size))


def connect(spec: ConnectSpec) -> LocalTransport:
    """Returns the transport of a world of one. Raises ConfigError for more: threads are joined by ``LocalWorld``."""
    if spec.world_size != 1:
        raise ConfigError(
            f"transport 'local' joins threads of one process; this is process {spec.rank} of {spec.world_size}. "
            f"Use transport='shm' or 'torch', or give init() a transport of a LocalWorld in each thread"
        )
    return LocalWorld(1, spec.timeout_s).transports[0]


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    # Not a typed copy: the receiver may name the same bits by another dtype of the same size.
    return flat.view(torch.uint8)
