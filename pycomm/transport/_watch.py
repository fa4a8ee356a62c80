"""Who of a group's ranks lives: for transports that have no such eye of their own (MPI, gloo).

[Note: watching]
Nobody sends heartbeats. On one host every rank holds a pidfd of every other one and looks at them, and at what /proc
says of the processes, when a wait turns long (``SLICE_S``): the kernel knows at once who ended, of what, and never
takes one process for another. Between hosts, and for what the kernel does not show (a rank that was interrupted, that
ran out of time, that closed the group), the ranks leave word in the job's store, where a rank that waits looks now and
then. What broke a group is written there once, by the rank that finds it; the first discovery is everybody's. So nobody
waits for a rank that has been told of it, and goes on without the group.

A rank that has ended or closed may have done all that was asked of it, and its last bytes may still be under way: on a
slow cable for seconds, as TCP takes megabytes from a sender who then goes. So who closes the group leaves word of how
many calls it made, and how many messages it sent and received; it counts as gone only where that is not enough. Who
died without a word counts after one more slice.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from ._notices import Notices, part_of
from ._processes import GONE, Process, Processes
from ._tally import Message, Tally
from ._wording import NO_STATUS, Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ._crossings import Making
    from ._patience import Patience
    from ._tally import Done

__all__ = ["SLICE_S", "Watch", "slices_s"]

SLICE_S = 5e-3  # of waiting, between two looks at the processes
_FIRST_BEHIND_S = 40e-3
_LONGEST_SLICE_S = 80e-3
_ASK_STORE_S = 0.03  # of waiting, between two looks at the store; grows to
_ASK_STORE_AT_MOST_S = 0.5
_SUSPICION_S = 0.3  # how long a broken connection may stay unexplained


def slices_s() -> Iterator[float]:
    """Yields how long to wait, one slice after the other, where the end of a slice costs more than a look.

    torch ends one by an exception with the stack of its C++ code, 0.2 to 0.3 ms of a core. So slices grow, and
    they start long in other threads than the main one: these have no signals to handle, and may run beside a
    computation. gloo itself tells at once of a connection that ends.
    """
    slice_s = SLICE_S if threading.current_thread() is threading.main_thread() else _FIRST_BEHIND_S
    while True:
        yield slice_s
        slice_s = min(2 * slice_s, _LONGEST_SLICE_S)


class Watch:
    """The ranks of one group, as seen from this one. ``failure`` is what broke the group, None as long as it works."""

    def __init__(self, processes: Processes, ranks: Sequence[int], rank: int, notices: Notices) -> None:
        """``ranks`` are the members by their rank in ``init``, ``notices`` those of this group."""
        self.failure: Failure | None = None
        self.tally = Tally(rank)
        self._processes = processes
        self._ranks = tuple(ranks)
        self._notices = notices
        self._members = [processes.members[member] for member in ranks] if processes.members else []
        self._poll = select.poll()
        self._polling = threading.Lock()  # messages are waited for by several threads
        self._fds = {member.fd: index for index, member in enumerate(self._members) if member.fd >= 0}
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)
        self._suspect = -1
        self._next = 0  # whose process is looked at closely
        self._next_ask = 0.0
        self._ask_s = _ASK_STORE_S

    @classmethod
    def connect(cls, store: Store, rank: int, world_size: int, patience: Patience) -> Watch:
        """Tells the others which process this is, and learns theirs. Called by every rank.

        Raises CollectiveTimeoutError if one does not come within ``patience``.
        """
        keys = patience.meet(store, "process", rank, world_size, word=Process.description(), to="come to connect")
        can_multi_get = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
        told = store.multi_get(keys) if can_multi_get else [store.get(key) for key in keys]
        members = [Process.described(bytes(value).decode()).look_up() for value in told]
        notices = Notices(part_of(store, "watch"), rank, world_size)
        return cls(Processes(members), range(world_size), rank, notices)

    @classmethod
    def nobody(cls, rank: int) -> Watch:
        """A watch that sees no process and has no store: all it does is to remember ``failure``."""
        return cls(Processes(()), (), rank, Notices(None, rank, 0))

    def split(self, ranks: Sequence[int], rank: int, key: str) -> Watch:
        """Returns the watch of a new group of ``ranks`` of this one, where this rank is ``rank``."""
        members = [self._ranks[member] for member in ranks] if self._ranks else ()
        return Watch(self._processes, members, rank, self._notices.of_new_group(key, rank, len(members)))

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return self._notices.is_closed

    # -- looking ----------------------------------------------------------------------------------------------------

    def start_wait(self) -> None:
        """To be called when a wait turns long, before the first ``look`` of it.

        One that follows another goes on where that was: who waits in short pieces would never come to ask.
        """
        now_s = time.monotonic()
        if now_s > self._next_ask + _ASK_STORE_AT_MOST_S:
            self._suspect = -1
            self._ask_s = _ASK_STORE_S
            self._next_ask = now_s + self._ask_s

    def look(self, call: int, message: Message | None = None) -> Failure | None:
        """Looks around once and says what has broken the group, or does unless the wait is over by now.

        In a wait of collective ``call``, or, in it or after it, for ``message``, which may have come meanwhile: it is
        for the caller to ``declare`` what ends the wait.
        """
        if self.failure is not None:
            return self.failure
        dead, found = self._find_dead(), None
        if dead >= 0 and self._suspect == dead:
            if self._owes(dead, call, message):
                found = self._failure_of("lost", dead, call)
        else:
            self._suspect = dead
        if self._notices.is_open and time.monotonic() >= self._next_ask:
            self._ask_s = min(2 * self._ask_s, _ASK_STORE_AT_MOST_S)
            found = found or self._ask(call, message)
            self._next_ask = time.monotonic() + self._ask_s
        return self.failure or found

    def ask(self, call: int) -> Failure | None:
        """Says, as ``look`` does, what the others left in the store; it takes a trip to it."""
        return self.failure or self._ask(call, None)

    def search(self, call: int, peer: int = -1) -> Failure | None:
        """Looks for a while for what broke a call, and declares it: a rank's process may just be ending.

        What is still awaited from ``peer`` will not come.
        """
        lost = None if peer < 0 else Message.undelivered(peer)
        deadline = time.monotonic() + _SUSPICION_S
        self.start_wait()
        while time.monotonic() < deadline:
            found = self.look(call, lost) or self._ask(call, lost)
            if found is not None:
                return self.declare(found)
            time.sleep(2e-3)
        return None

    def explain(self, call: int, peer: int = -1) -> Failure:
        """Says who is behind a connection that broke, and declares it."""
        return self.search(call, peer) or self.declare(self._failure_of("lost", peer, call))

    # -- telling ----------------------------------------------------------------------------------------------------

    def announce(self, kind: str, rank: int, call: int) -> None:
        """Declares the group broken in collective ``call`` by ``rank``, which may be this one."""
        self.declare(self._failure_of(kind, rank, call))

    def declare(self, found: Failure) -> Failure:
        """Declares the group broken, here and, through the store, for the other ranks. Returns what broke it: the first
        to say so is right.
        """
        if self.failure is None and self._notices.is_open:
            found = self._notices.declare(found)
        self.failure = self.failure or found
        return self.failure

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        """As ``Crossings`` needs it."""
        self._notices.say_making(ranks, key)
        if ranks and self.failure is not None:
            self._notices.job.go_on()

    def has_anyone_gone_on(self, *, at_once: bool = False) -> bool:
        """Says, now and then (or ``at_once``) by a trip to the store, whether a rank makes, or has made, a group of a
        broken one.
        """
        return self._notices.job.has_anyone_gone_on(at_once=at_once)

    def tell_ended(self, rank: int) -> None:
        """Leaves word that ``rank`` has ended, for those of other hosts who wait for it though the group is broken."""
        self._notices.say_ended(rank)

    def loss_among(self, ranks: Sequence[int]) -> Failure | None:
        """Says which of ``ranks`` has ended, by what this host knows and what other ranks have left word of."""
        rank = min(self.ended() & set(ranks), default=-1)
        return None if rank < 0 else self._failure_of("lost", rank, 0)

    def departure_of(self, rank: int) -> Failure:
        """Returns what to say of ``rank``, that has closed the group."""
        return self._failure_of("closed", rank, 0)

    def made_by(self, rank: int) -> Making:
        """As ``Crossings`` needs it."""
        return self._notices.made_by(rank)

    def close(self, calls: int) -> None:
        """Tells the others that this rank leaves after ``calls`` collectives, in good order or as another did."""
        if self._notices.is_open and (self.failure is None or self.failure.kind == "closed"):
            self._notices.say_closed(self.tally.done(calls))
        self._notices.close()

    def tell_done(self, calls: int) -> None:
        """Leaves word of what this rank has done so far, which may go on."""
        if self._notices.is_open:
            self._notices.say_done(self.tally.done(calls))

    def is_owed_by(self, rank: int, call: int, message: Message | None) -> bool:
        """Says whether ``rank`` has left undone what this one waits for, by the word that it has left last."""
        done = self._notices.done_by(rank) if self._notices.is_open else None
        if done is None:
            return False
        if message is not None and message.peer < 0:  # it has sent no more than is here
            return self.tally.has_all(done, rank, message.tag)
        return self.tally.is_short(done, rank, call, message)

    def all_left(self, tag: int, received: Mapping[int, int]) -> Failure | None:
        """Says, by a trip to the store, whether all others have closed the group and what they sent with ``tag`` is
        here: ``received`` are that many, by rank.
        """
        closed = self._notices.closed() if self._notices.is_open and self._notices.has_news() else {}
        return self._failure_of("closed", min(closed), 0) if self.tally.none_comes(closed, tag, received) else None

    def has_taken(self, message: Message) -> bool:
        """Says whether ``message``, which this rank has sent, had come to its peer before that closed the group."""
        done = self._closed_by(message.peer)
        return done is not None and not self.tally.is_short(done, message.peer, 0, message)

    def _closed_by(self, rank: int) -> Done | None:
        return self._notices.closed_by(rank) if self._notices.is_open else None

    def _ask(self, call: int, message: Message | None) -> Failure | None:
        """Reads what the others left in the store: what broke the group, or whose leaving ends this wait."""
        notices = self._notices
        if not notices.is_open or not notices.has_news():
            return self.failure
        self.failure = self.failure or notices.failure()
        if self.failure is not None:
            return self.failure
        closed = notices.closed()
        for rank, done in closed.items():
            if done is not None and self.tally.is_short(done, rank, call, message):
                return self._failure_of("closed", rank, call)
        if message is not None and self.tally.is_vain(closed, message):
            return self._failure_of("closed", min(closed), call)
        return self.failure

    def _owes(self, rank: int, call: int, message: Message | None) -> bool:
        """Says whether a rank that is dead, and may have closed the group in good order, has left undone what this one
        waits for.
        """
        done = self._closed_by(rank)
        return done is None or self.tally.is_short(done, rank, call, message)

    def _find_dead(self) -> int:
        """Returns a rank whose process has ended or is being ended, -1 if there is none in sight.

        Of those that are being ended (csrc/shm/process.h) it sees who was suspected before, and one other, in turn.
        """
        found = self._ended()
        if not found and self._members:
            self._next = (self._next + 1) % len(self._members)
            found = {rank for rank in {self._suspect, self._next} if rank >= 0 and self._members[rank].is_dying()}
        return min(found, default=-1)

    def _ended(self) -> set[int]:
        """Returns the ranks whose processes have ended, as far as this host knows."""
        with self._polling:
            found = {self._fds[fd] for fd, _ in self._poll.poll(0)}
        return found | {rank for rank, member in enumerate(self._members) if member.fd == GONE}

    def ended(self) -> AbstractSet[int]:
        """As ``Crossings`` needs it: also those that others have told of."""
        return self._ended() | self._notices.ended()

    def _failure_of(self, kind: str, rank: int, call: int) -> Failure:
        member = self._members[rank] if self._members and rank >= 0 else None
        status = NO_STATUS if member is None or kind != "lost" else member.exit_status()
        return Failure(kind, rank, 0 if member is None else member.pid, status, call)
