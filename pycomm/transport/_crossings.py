"""How ranks that make groups of one that is broken find one another, or are told that they will not.

[Note: one key for a group]
The members of a new group call it by a key: who they are, and how often they have made one of these. After a failure
they may have counted differently: some were told before they came to the last one, some had a try at it. So who makes a
group leaves word of its key for as long as that takes, and in a group that is broken the others take the first
member's. A group that is a part of what all ranks do (``with_all``) has keys of its own: it fails on who makes it, once
that hears of the loss, and those who go on would find a group that is left again.

[Note: crossing groups]
After a failure the ranks are told of it at different moments. One that has been told makes a group without the lost
rank; one that has not may come to a ``new_group`` of its program, of other ranks, and the two would wait for each other
until their time is over. So they leave word of the members, too. Who waits for a rank that waits for it in another
group looks who goes first: the group without the rank that was lost, and of two such (or two with it, as one that was
interrupted may be taken back) the larger one, as those who have been told go on with all that live. The other one is
given up, with the error of the loss: then this rank has been told, too.

Groups that this rank has given up, or that have a dead member, go after all others: their makers will hear of it.

[Note: who leaves]
One that has been told may also leave the broken group, to begin anew (``Membership``), and comes to no group of it. So
who closes a group leaves word of the last that it has made of it; who makes another, and waits for it there, is told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ._wording import timed_out

if TYPE_CHECKING:
    from ._patience import Look
    from .base import Transport

__all__ = ["Crossings", "Making", "Seen", "key_of"]

_COUNT_BITS = 31
_NONE = 1  # no group's key
_POLL_S = 2e-3
_LOOK_S = 0.1  # between two looks at what groups others make: over gloo each takes trips to a store


class Making(NamedTuple):
    """A new group that a rank is making: ``members`` by their ranks in the old one, and its key; none: no group.

    Of a rank that has closed the old one: no members, and the key of the last that it made, or ``_NONE``.
    """

    members: AbstractSet[int] = frozenset()
    key: int = 0


class Seen(NamedTuple):
    """What keeps the members of a group that this rank makes from coming to it, by what groups they make instead."""

    is_second: bool = False  # another one, which this rank is to make too, goes before it
    gone: int | None = None  # a rank in the old group that has left that, and comes to none of it


def key_of(ranks: Sequence[int], count: int, with_all: bool) -> int:
    """Returns the key, a positive int64, of the ``count``-th group of its kind that the members ``ranks`` make."""
    digest = blake2b(repr((tuple(ranks), with_all)).encode(), digest_size=4).digest()
    return (int.from_bytes(digest) | 1) << _COUNT_BITS | count % (1 << _COUNT_BITS)


class _Words(Protocol):
    """Where the ranks of a group leave word for one another, also when it is broken or closed."""

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        """Leaves word that this rank makes a group of ``ranks``; none: it does not any more. See ``Making``."""

    def made_by(self, rank: int) -> Making:
        """Returns the group that ``rank`` makes, by its word."""

    def ended(self) -> AbstractSet[int]:
        """Returns the ranks whose processes have ended, as far as this host knows."""


class Crossings:
    """Of one rank of one group, whose ``words`` these are."""

    def __init__(self, words: _Words) -> None:
        self._words = words
        self._key = 0  # of the group that this rank makes
        self._made = _NONE
        self._given_up: set[AbstractSet[int]] = set()
        self._taken: dict[int, int] = {}  # the last key that was the first member's, by its part but for the count
        self._next_look_s = 0.0

    @contextlib.contextmanager
    def making(self, old: Transport, ranks: Sequence[int], key: int, look: Look) -> Iterator[int]:
        """The span in which this rank makes a group of ``ranks`` of ``old``; what it gives is the key that they share.

        ``look`` raises what makes it vain to wait for the first member. Raises CollectiveTimeoutError if that does not
        come. Inside another such span, of a transport that is made of several, the key is the one that is given.
        """
        if self._key:
            yield key
            return
        self._key = key
        self._words.tell_making(ranks, key)
        try:
            if old.is_broken and ranks[0] != old.rank:
                its_key = self._key_of_first(old, ranks, key, look)
                if its_key != key:
                    self._words.tell_making(ranks, key := its_key)
            self._taken[key >> _COUNT_BITS] = self._key = key
            yield key
            self._made = key
        except BaseException:
            self._given_up.add(frozenset(ranks))
            raise
        finally:
            self._words.tell_making((), 0)
            self._key = 0

    def _key_of_first(self, old: Transport, ranks: Sequence[int], key: int, look: Look) -> int:
        kind, first = key >> _COUNT_BITS, ranks[0]
        deadline = time.monotonic() + old.timeout_s
        while first not in self._words.ended():  # else it is for who makes the group to say so
            members, theirs = self._words.made_by(first)
            if members and theirs >> _COUNT_BITS == kind and theirs != self._taken.get(kind):
                return theirs
            look()
            if time.monotonic() > deadline:
                raise timed_out(old.place("new_group"), old.timeout_s, f"rank {first}", is_broken=False)
            time.sleep(_POLL_S)
        return key

    def look(self, old: Transport, ranks: Sequence[int], *, at_once: bool = False) -> Seen:
        """Looks, while this rank waits for ``ranks`` to make a group of ``old``, what groups those make.

        Now and then, or ``at_once``: a member that gives the group up because of what it sees breaks it for the others,
        who hear of that member first.
        """
        now_s = time.monotonic()
        if not old.is_broken or (now_s < self._next_look_s and not at_once):  # in one that is whole, who waits sees it
            return Seen()
        self._next_look_s = now_s + _LOOK_S
        made = {rank: self._words.made_by(rank) for rank in ranks if rank != old.rank}
        gone = (rank for rank, (members, key) in made.items() if not members and key not in (0, self._key))
        return Seen(self._is_second(old, set(ranks), [making.members for making in made.values()]), next(gone, None))

    def _is_second(self, old: Transport, mine: AbstractSet[int], others: Sequence[AbstractSet[int]]) -> bool:
        if old.failure is None:
            return False
        lost = -1 if old.failure.kind == "timeout" else old.failure.rank
        ended = self._words.ended()
        return any(
            old.rank in theirs
            and theirs not in self._given_up
            and not theirs & ended
            and (lost in mine if (lost in mine) != (lost in theirs) else theirs > mine)
            for theirs in others
        )

    def leave(self) -> None:
        """Leaves word that this rank has closed the group, and comes to none that is made of it."""
        self._words.tell_making((), self._made)

    def who_waits(self, old: Transport) -> AbstractSet[int]:
        """Returns the ranks that wait for this one in a group that they make of ``old``, which is broken."""
        if self._key or not old.is_broken:
            return frozenset()
        ended = self._words.ended()
        made = {rank: self._words.made_by(rank) for rank in range(old.world_size) if rank != old.rank}
        return {
            rank
            for rank, (members, key) in made.items()
            if old.rank in members
            and key != self._taken.get(key >> _COUNT_BITS)  # one that this rank has made, too
            and members not in self._given_up
            and not members & ended
        }
