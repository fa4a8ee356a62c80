"""What a rank of a group has done, counted: enough to say whether something is still to come from another one.

Who closes a group, or goes on without it, leaves word of its counts (``_notices.py``); beside this rank's own they say
whether a message that it waits for is under way yet.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from .base import ANNOUNCEMENT_TAG

__all__ = ["Done", "Message", "Tally"]

_TAGS = 1 << 15  # all of gloo's; over MPI a program may use a new one in each step, for ever


class Message(NamedTuple):
    """One that a rank waits for: the next from ``peer``, or what it sent there after ``order`` others of this tag."""

    peer: int
    tag: int
    order: int = -1  # of a receive

    @classmethod
    def undelivered(cls, peer: int) -> Message:
        """One that has not come to ``peer``, whatever it says."""
        return cls(peer, 0, 1 << 62)  # more than are ever sent

    @property
    def is_sent(self) -> bool:
        """Whether this rank is the one that sends it."""
        return self.order >= 0


class Done(NamedTuple):
    """What a rank has done: so many collectives, and messages by "peer/tag", the tag modulo ``_TAGS``."""

    calls: int
    sent: Mapping[str, int]
    received: Mapping[str, int]


class Tally:
    """The messages that rank ``rank`` has sent and received."""

    def __init__(self, rank: int) -> None:
        """Begins with none."""
        self.counting = threading.RLock()  # messages are completed by several threads; each while it holds this
        self._rank = rank
        self._sent: Counter[tuple[int, int]] = Counter()  # by (peer, tag % _TAGS)
        self._received: Counter[tuple[int, int]] = Counter()

    def send(self, peer: int, tag: int) -> Message:
        """Counts a message that this rank sends."""
        place = peer, tag % _TAGS
        with self.counting:
            self._sent[place] += 1
            return Message(peer, tag, self._sent[place] - 1)

    def receive(self, peer: int, tag: int) -> None:
        """Counts a message that this rank has received."""
        with self.counting:
            self._received[peer, tag % _TAGS] += 1

    def done(self, calls: int) -> Done:
        """Returns what this rank has done, with ``calls`` collectives."""
        with self.counting:
            sent, received = (
                {f"{peer}/{tag}": number for (peer, tag), number in counted.items()}
                for counted in (self._sent, self._received)
            )
        return Done(calls, sent, received)

    def is_short(self, done: Done, rank: int, call: int, message: Message | None) -> bool:
        """Says whether ``rank``, that has ``done`` so much, has left undone what this one waits for: ``call``, or
        ``message`` in it or after it.
        """
        if done.calls < call:
            return True
        if message is None or message.peer != rank:
            return False
        if message.is_sent:
            return done.received.get(f"{self._rank}/{message.tag % _TAGS}", 0) <= message.order
        return self.has_all(done, rank, message.tag)

    def has_all(self, done: Done, rank: int, tag: int) -> bool:
        """Says whether all messages with this tag are here that ``rank`` has sent, as it has ``done`` so much."""
        with self.counting:
            return self._sent_by(done, tag) <= self._received[rank, tag % _TAGS]

    def is_vain(self, all_done: Mapping[int, Done | None], message: Message) -> bool:
        """Says whether ``message``, from any rank, will not come, as those have left who have ``all_done`` so much.

        A transport's standing receive for announcements is not owed any.
        """
        if message.peer >= 0 or message.tag == ANNOUNCEMENT_TAG:
            return False
        with self.counting:
            received = {rank: self._received[rank, message.tag % _TAGS] for rank in all_done}
        return self.none_comes(all_done, message.tag, received)

    def none_comes(self, all_done: Mapping[int, Done | None], tag: int, received: Mapping[int, int]) -> bool:
        """Says whether all others have left (None: not yet) and sent no more with ``tag`` than is ``received``, by
        rank.
        """
        return bool(all_done) and all(
            done is not None and self._sent_by(done, tag) <= received[rank] for rank, done in all_done.items()
        )

    def _sent_by(self, done: Done, tag: int) -> int:
        return done.sent.get(f"{self._rank}/{tag % _TAGS}", 0)
