"""How a rank that waits in one group learns that it is waited for in another one.

[Note: waited for elsewhere]
A rank that is told of a loss makes a group of those who live, and waits there for all of them. One of these may not
have been told: it waits for the first in a group without the lost rank, as a mesh has them, where nobody is lost; and
the two would wait for each other until their time is over. So who waits long looks at the other groups that it is in
and that have one ancestor with this: if one is broken, and whom it waits for makes a group of that and waits for it
there (``_crossings.py``), it gets the error of the loss. The group in which it waited is broken then, for those who
wait in it for this rank: it has given up their call, and they look why at once, as those who go on wait for them, too.
Nothing happens to groups that nobody waits in: those who live may use them as before.

Who makes that group may have done its part of what is waited for: then it is not waited for, and the rest comes. Where
that does not show (bytes may be under way), it leaves word of what it had done.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import TransportError
from . import _wording as wording

if TYPE_CHECKING:
    from ._tally import Message
    from .base import Transport

__all__ = ["ANYBODY", "EVERYBODY", "GIVEN_UP", "NOBODY", "Kin"]

# Whom a wait is for, if not for one rank (csrc/shm/wait.h): whoever sends a message; nobody, who may never come; and
# all, in a collective, where who is missing does not show. GIVEN_UP: it is in vain, a rank has given up what it is for.
ANYBODY, NOBODY, EVERYBODY, GIVEN_UP = -1, -2, -3, -4
_LOOK_S = 0.1


class _Place:
    """Of one transport: the ranks of its members in the group that all come from, and when it looks next."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.next_s = 0.0


class Kin:
    """The transports of one rank that were made of one another, as far as they are open."""

    def __init__(self) -> None:
        """Begins with none."""
        self._changing = threading.Lock()
        self._places: weakref.WeakKeyDictionary[Transport, _Place] = weakref.WeakKeyDictionary()

    def add(self, transport: Transport, members: Sequence[int]) -> None:
        """Takes in ``transport``, whose rank r is ``members[r]`` of the group that all come from."""
        with self._changing:
            self._places[transport] = _Place(members)

    def remove(self, transport: Transport) -> None:
        """Forgets ``transport``, whose group this rank has left."""
        with self._changing:
            self._places.pop(transport, None)

    def _all(self) -> list[tuple[Transport, _Place]]:
        with self._changing:
            return list(self._places.items())

    def go_on(self) -> None:
        """Leaves word in all groups of what this rank has done there: it is about to make one of those who live."""
        for transport, _ in self._all():
            transport.tell_done()

    def look(
        self, waiting: Transport, peer: int, has_come: Callable[[], bool] | None, message: Message | None = None
    ) -> None:
        """Looks once in a long wait of ``waiting`` for its rank ``peer``, or for ANYBODY or EVERYBODY, in a collective
        or for ``message``. Raises what has broken another group, if the wait is in vain because of that, and
        ``has_come``, asked last, says no; where it is GIVEN_UP, what has made other ranks wait for this one elsewhere.
        """
        if peer == GIVEN_UP:
            self._look_why(waiting)
            return
        place, now_s = self._places.get(waiting), time.monotonic()
        if place is None or peer == NOBODY or now_s < place.next_s:
            return
        place.next_s = now_s + _LOOK_S
        others = {member: rank for rank, member in enumerate(place.members) if rank != waiting.rank}
        awaited = others.keys() if peer in (ANYBODY, EVERYBODY) else {place.members[peer]}
        for other, its in self._all():
            gone_on = awaited & {its.members[rank] for rank in other.who_waits()} if other is not waiting else set()
            owing = {member for member in gone_on if waiting.is_owed_by(others[member], message)}
            if not owing or (peer == ANYBODY and owing != others.keys()) or (has_come is not None and has_come()):
                continue
            _raise_loss(waiting, other)

    def _look_why(self, waiting: Transport) -> None:
        for other, _ in self._all():
            if other is not waiting and other.who_waits(at_once=True):
                _raise_loss(waiting, other)


def _raise_loss(waiting: Transport, other: Transport) -> None:
    try:
        other.check_lost("a call")
    except TransportError as error:
        waiting.abandon()
        wording.mark_elsewhere(error)
        error.add_note(
            f"found while waiting in group {waiting.group_name!r}, for a rank that makes a group of those who live of "
            f"{other.group_name!r} and waits for this rank there"
        )
        raise
