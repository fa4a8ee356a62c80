"""What the transports share that have no eye of their own for who lives (MPI, torch's groups): they have a Watch."""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CollectiveTimeoutError, PeerLostError
from . import _wording as wording
from ._crossings import Crossings
from ._kin import EVERYBODY, GIVEN_UP, NOBODY
from ._watch import SLICE_S
from .base import ANNOUNCEMENT_TAG, Request, Transport

if TYPE_CHECKING:
    import torch

    from ..errors import TransportError
    from ._patience import Look
    from ._tally import Message
    from ._watch import Watch

__all__ = ["Lateness", "WatchedTransport"]

_LATE_S = 1.0  # in which time the others may have given up, if a call's time limit is no shorter


class Lateness:
    """Of one kind of call that all ranks make alike: whether this rank comes to it late."""

    def __init__(self) -> None:
        self._begun_s = -math.inf  # this rank's last such call: nobody has waited for the next one since before that

    def begin(self, limit_s: float) -> bool:
        """Begins a call; says whether others may have waited for it until their time was over."""
        begin_s = time.monotonic()
        waited_s, self._begun_s = begin_s - self._begun_s, begin_s
        return waited_s > min(limit_s, _LATE_S)


class WatchedTransport(Transport):
    """A transport whose ranks are seen by ``watch``; its messages are an object of their own."""

    watch: Watch
    _messages: Any  # each transport's own kind; all have these two
    _crossings: Crossings | None = None
    _glance_s = 0.0  # when who only asks looks around next; 0.0: nobody has yet

    @property
    def failure(self) -> wording.Failure | None:
        """What broke this group, as far as this rank knows; None while it is whole."""
        return self.watch.failure

    @property
    def crossings(self) -> Crossings:
        """What groups its ranks make of this one."""
        if self._crossings is None:
            self._crossings = Crossings(self.watch)
        return self._crossings

    def abandon(self) -> None:
        self.watch.announce("interrupted", self.rank, self.calls)

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        request: Request = self._messages.isend(flat, peer, tag)
        return request

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        request: Request = self._messages.irecv(flat, peer, tag)
        return request

    def check(self, doing: str, message: Message | None, is_done: Callable[[], bool]) -> None:
        """Looks around once in a long wait, for ``message`` or in a collective: raises what broke the group.

        ``is_done`` is asked last: a peer may have gone because it was done with this call, too. What it has taken of
        this rank's is as good as done, whenever this rank's own thread comes to hear of it. Nobody sends to a rank that
        has closed the group.
        """
        failure = self.watch.look(self.calls, message)
        if failure is None:
            if self.watch.is_closed and message is not None and not message.is_sent and not is_done():
                raise wording.used_closed(self.place(doing))
            is_nobodys = message is not None and message.tag == ANNOUNCEMENT_TAG
            peer = EVERYBODY if message is None else NOBODY if is_nobodys else message.peer
            self.look_elsewhere(peer, is_done, message)
            return
        if is_done():
            return
        if message is None or not message.is_sent or not self.watch.has_taken(message):
            self._look_why(failure)
            raise self.failed(doing, self.watch.declare(failure))

    def look_around(self) -> None:
        self.watch.start_wait()
        failure = self.watch.look(self.calls)
        if failure is not None:
            self._look_why(failure)
            raise self.failed("a call", self.watch.declare(failure))
        self.look_elsewhere(NOBODY)

    def leave(self) -> None:
        super().leave()
        self.crossings.leave()

    def who_waits(self, *, at_once: bool = False) -> AbstractSet[int]:
        if self.watch.failure is None and not self.watch.has_anyone_gone_on(at_once=at_once):
            return frozenset()
        self.watch.ask(self.calls)  # of what broke this group
        return self.crossings.who_waits(self)

    def tell_done(self) -> None:
        self.watch.tell_done(self.calls)

    def is_owed_by(self, rank: int, message: Message | None) -> bool:
        return self.watch.is_owed_by(rank, self.calls, message)

    def glance(self, doing: str, message: Message, is_done: Callable[[], bool]) -> None:
        """``check`` once in a while, for who asks again and again whether ``message`` is complete and never waits.

        Not for announcements: a peer may go without having heard them.
        """
        now_s = time.monotonic()
        if now_s < self._glance_s or message.tag == ANNOUNCEMENT_TAG:
            return
        if self._glance_s == 0.0:
            self.watch.start_wait()
        else:
            self.check(doing, message, is_done)
        self._glance_s = now_s + SLICE_S

    @contextlib.contextmanager
    def telling(self, ranks: Sequence[int], theirs: Watch) -> Iterator[None]:
        """The span in which a group of ``ranks`` is made whose watch is ``theirs``: tells its ranks if this one gives
        up.
        """
        try:
            yield
        except PeerLostError:
            raise
        except BaseException as error:  # Ctrl-C, too: while they make it they may not look into this group's word
            kind = "timeout" if isinstance(error, CollectiveTimeoutError) else "interrupted"
            theirs.announce(kind, list(ranks).index(self.rank), 0)
            raise

    def split(
        self, ranks: Sequence[int] | None, key: int, *, with_all: bool = False, look: Look | None = None
    ) -> WatchedTransport | None:
        if ranks is None or self.rank not in ranks:
            return None
        self.check_can_make(ranks)
        with self.crossings.making(self, ranks, key, partial(self.look_at_makers, ranks, look)) as common_key:
            return self.make_group(ranks, common_key, with_all, look)

    @abstractmethod
    def check_can_make(self, ranks: Sequence[int]) -> None:
        """Raises ConfigError if no group of ``ranks`` can be made of this one."""

    @abstractmethod
    def make_group(self, ranks: Sequence[int], key: int, with_all: bool, look: Look | None) -> WatchedTransport:
        """As ``split``, on a member."""

    def look_at_makers(self, ranks: Sequence[int], look: Look | None = None) -> None:
        """Looks around once while ``ranks`` make a group of theirs; raises what ends that, as this group has it."""
        self.check_makers(ranks)
        if look is not None:
            look()

    def check_makers(self, ranks: Sequence[int], *, at_once: bool = False) -> None:
        """Raises if not all of ``ranks``, which make a group, will come to it; ``Crossings`` says when it is looked."""
        seen = self.crossings.look(self, ranks, at_once=at_once)
        if seen.is_second:
            self.check_whole("new_group")
        failure = self.watch.loss_among(ranks) if self.is_broken else None
        if failure is not None:
            raise self.failed("new_group", failure)
        if seen.gone is not None:
            raise self.failed("new_group", self.watch.departure_of(seen.gone))

    def look_at_members(
        self, ranks: Sequence[int], theirs: Watch, with_all: bool, look: Look | None
    ) -> Callable[[], None]:
        """Returns what looks around once while ``ranks`` make a group of theirs: it raises what has ended that.

        ``theirs`` is the watch of the new group. This group may be broken, and the new one be made of those who live:
        then, unless ``with_all``, only what happens to those counts. ``look`` is asked, too.
        """
        own = self.watch if with_all or not self.is_broken else None
        return partial(self._check_members, ranks, theirs, own, with_all, look)

    def _check_members(
        self, ranks: Sequence[int], theirs: Watch, own: Watch | None, with_all: bool, look: Look | None
    ) -> None:
        failure = theirs.look(0)
        if failure is not None:
            failure = theirs.declare(failure)
            if failure.kind == "lost":
                self.watch.tell_ended(ranks[failure.rank])
            else:  # that one may have given it up because of another one, which says more
                self.check_makers(ranks, at_once=True)
            if own is not None and failure.kind == "interrupted":  # in a call of this group, which is not whole either
                own.announce(failure.kind, ranks[failure.rank], self.calls)
            raise self.failed_member(ranks, failure)
        failure = None if own is None else own.look(self.calls)
        if failure is not None and own is not None:
            failure = own.declare(failure)  # for those who wait in it for this rank, which does not come back to it
            if with_all or failure.rank in ranks:  # else the new one does without that rank
                raise self.failed("new_group", failure)
        try:
            self.look_at_makers(ranks, look)
        except PeerLostError:  # of the old group, which the members of the new one need not know of
            theirs.announce("interrupted", list(ranks).index(self.rank), 0)
            raise

    def failed_member(self, ranks: Sequence[int], failure: wording.Failure) -> TransportError:
        """Returns the error of making a group of ``ranks``, which ``failure``, by its rank there, has ended."""
        return self.failed("new_group", failure._replace(rank=ranks[failure.rank]))

    def check_whole(self, doing: str) -> None:
        """Raises what broke the group, if that is known already."""
        if self.watch.failure is not None:
            self._look_why(self.watch.failure)
            raise self.failed(doing, self.watch.failure)

    def _look_why(self, failure: wording.Failure) -> None:
        """Raises why another rank has given up a call of this group, if that is what broke it and can be found."""
        if failure.kind == "interrupted" and failure.rank != self.rank:
            self.look_elsewhere(GIVEN_UP)

    def check_given_up(self, doing: str) -> None:
        # If they gave up in a later call, this one has succeeded for them, and does here.
        failure = self.watch.ask(self.calls)
        if failure is not None and failure.call <= self.calls:
            raise self.failed(doing, self.watch.declare(failure))

    def check_lost(self, doing: str) -> None:
        failure = self.watch.search(self.calls)
        if failure is not None:
            raise self.failed(doing, failure)

    def failed(self, doing: str, failure: wording.Failure) -> TransportError:
        """Returns the error of a call on a group that ``failure`` broke."""
        return wording.failed(self.place(doing), failure)
