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

import contextlib
import json
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from ._crossings import Making
from ._patience import Patience
from ._processes import GONE, Process, Processes
from ._wording import NO_STATUS, Failure
from .base import ANNOUNCEMENT_TAG

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["SLICE_S", "Message", "Watch", "slices_s"]

SLICE_S = 5e-3  # of waiting, between two looks at the processes
_FIRST_BEHIND_S = 40e-3
_LONGEST_SLICE_S = 80e-3
_ASK_STORE_S = 0.03  # of waiting, between two looks at the store; grows to
_ASK_STORE_AT_MOST_S = 0.5
_SUSPICION_S = 0.3  # how long a broken connection may stay unexplained
_SAYS_IT_S = 5.0  # who is to say what broke the group, and was stopped; or died just then


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


class _LastWord(NamedTuple):
    """What a rank has done before it closed the group. Messages are counted by "peer/tag", the tag modulo ``_TAGS``."""

    calls: int
    sent: dict[str, int]
    received: dict[str, int]


class _Job:
    """What the watches of all groups of a job share: the word that somebody makes a group of one that is broken.

    For those who wait in other groups (``_kin.py``): one trip to the store, however many groups there are.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._has_gone_on = False
        self._next_ask_s = 0.0

    def go_on(self) -> None:
        """Leaves that word."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set("going on", "1")

    def has_anyone_gone_on(self) -> bool:
        now_s = time.monotonic()
        if self._store is not None and not self._has_gone_on and now_s >= self._next_ask_s:
            self._next_ask_s = now_s + _ASK_STORE_AT_MOST_S
            with contextlib.suppress(RuntimeError):
                self._has_gone_on = self._store.check(["going on"])
        return self._has_gone_on


class Watch:
    """The ranks of one group, as seen from this one. ``failure`` is what broke the group, None as long as it works."""

    def __init__(
        self, processes: Processes, ranks: Sequence[int], rank: int, store: Store | None, job: _Job | None = None
    ) -> None:
        """``ranks`` are the members by their rank in ``init``, ``store`` this group's own part of the job's store;
        ``job`` is that of the group that this one is made of.
        """
        self.failure: Failure | None = None
        self._processes = processes
        self._ranks = tuple(ranks)
        self._rank = rank
        self._store: Any = store  # None once there is nothing to ask, which another thread may find at any moment
        self._job = job or _Job(store)
        self._closed_store: Any = None  # once this rank has closed the group: for those made of it yet
        self._members = [processes.members[member] for member in ranks] if processes.members else []
        self._poll = select.poll()
        self._polling = threading.Lock()  # messages are waited for by several threads
        self._fds = {member.fd: index for index, member in enumerate(self._members) if member.fd >= 0}
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)
        self.counting = threading.RLock()  # messages are completed by several threads, too; each while it holds this
        self._sent: Counter[tuple[int, int]] = Counter()  # by (peer, tag % _TAGS)
        self._received: Counter[tuple[int, int]] = Counter()
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
        return cls(Processes(members), range(world_size), rank, _part(store, "watch"))

    @classmethod
    def nobody(cls, rank: int) -> Watch:
        """A watch that sees no process and has no store: all it does is to remember ``failure``."""
        return cls(Processes(()), (), rank, None)

    def split(self, ranks: Sequence[int], rank: int, key: str) -> Watch:
        """Returns the watch of a new group of ``ranks`` of this one, where this rank is ``rank``."""
        members = [self._ranks[member] for member in ranks] if self._ranks else ()
        store = self._lasting_store
        return Watch(self._processes, members, rank, None if store is None else _part(store, key), self._job)

    # -- messages ---------------------------------------------------------------------------------------------------

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
        if self._store is not None and time.monotonic() >= self._next_ask:
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
        store = self._store
        if self.failure is None and store is not None:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the rank
                if store.add("failures", 1) == 1:
                    store.set("failure", json.dumps(found))
                    store.set("news", "1")
                else:
                    found = _soon_told(store) or found
        self.failure = self.failure or found
        return self.failure

    @property
    def _lasting_store(self) -> Any:
        """The store also after this rank has closed the group: for those that are made of it yet."""
        return self._store or self._closed_store

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        """As ``Crossings`` needs it."""
        store = self._lasting_store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"making{self._rank}", json.dumps([list(ranks), key]))
        if ranks and self.failure is not None:
            self._job.go_on()

    def has_anyone_gone_on(self) -> bool:
        """Says, now and then by a trip to the store, whether a rank makes, or has made, a group of a broken one."""
        return self._job.has_anyone_gone_on()

    def tell_ended(self, rank: int) -> None:
        """Leaves word that ``rank`` has ended, for those of other hosts who wait for it though the group is broken."""
        store = self._lasting_store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"ended{rank}", "1")
                store.set("ended", "1")

    def loss_among(self, ranks: Sequence[int]) -> Failure | None:
        """Says which of ``ranks`` has ended, by what this host knows and what other ranks have left word of."""
        rank = min(self.ended() & set(ranks), default=-1)
        return None if rank < 0 else self._failure_of("lost", rank, 0)

    def made_by(self, rank: int) -> Making:
        """As ``Crossings`` needs it."""
        store, name = self._lasting_store, f"making{rank}"
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([name]):
                members, key = json.loads(store.get(name))
                return Making(frozenset(members), key)
        return Making()

    def close(self, calls: int) -> None:
        """Tells the others that this rank leaves after ``calls`` collectives, in good order or as another did."""
        store = self._store
        if store is not None and (self.failure is None or self.failure.kind == "closed"):
            with contextlib.suppress(RuntimeError):
                store.set(f"closed{self._rank}", json.dumps(self._done(calls)))
                store.set("news", "1")
        self._store, self._closed_store = None, store or self._closed_store

    def _done(self, calls: int) -> _LastWord:
        with self.counting:
            sent, received = (
                {f"{peer}/{tag}": number for (peer, tag), number in counted.items()}
                for counted in (self._sent, self._received)
            )
        return _LastWord(calls, sent, received)

    def tell_done(self, calls: int) -> None:
        """Leaves word of what this rank has done so far, which may go on."""
        store = self._store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"done{self._rank}", json.dumps(self._done(calls)))

    def is_owed_by(self, rank: int, call: int, message: Message | None) -> bool:
        """Says whether ``rank`` has left undone what this one waits for, by the word that it has left last."""
        store = self._store
        with contextlib.suppress(RuntimeError):
            word = None if store is None else _word_of(store, f"done{rank}")
            if word is not None and message is not None and message.peer < 0:  # it has sent no more than is here
                return self._has_all(word, rank, message.tag)
            return word is not None and self._is_short(word, rank, call, message)
        return False

    def all_left(self, tag: int, received: Mapping[int, int]) -> Failure | None:
        """Says, by a trip to the store, whether all others have closed the group and what they sent with ``tag`` is
        here: ``received`` are that many, by rank.
        """
        store = self._store
        with contextlib.suppress(RuntimeError):
            words = {} if store is None or not store.check(["news"]) else self._last_words(store)
            if self._none_comes(words, tag, received):
                return self._failure_of("closed", min(words), 0)
        return None

    def has_taken(self, message: Message) -> bool:
        """Says whether ``message``, which this rank has sent, had come to its peer before that closed the group."""
        store = self._store
        with contextlib.suppress(RuntimeError):
            word = None if store is None else _last_word(store, message.peer)
            return word is not None and not self._is_short(word, message.peer, 0, message)
        return False

    def _last_words(self, store: Any) -> dict[int, _LastWord | None]:
        return {rank: _last_word(store, rank) for rank in range(len(self._ranks)) if rank != self._rank}

    def _ask(self, call: int, message: Message | None) -> Failure | None:
        """Reads what the others left in the store: what broke the group, or whose leaving ends this wait."""
        store = self._store
        try:
            if store is None or not store.check(["news"]):
                return self.failure
            self.failure = self.failure or _told(store)
            if self.failure is not None:
                return self.failure
            words = self._last_words(store)
            for rank, word in words.items():
                if word is not None and self._is_short(word, rank, call, message):
                    return self._failure_of("closed", rank, call)
            if message is not None and self._is_vain(words, message):
                return self._failure_of("closed", min(words), call)
        except RuntimeError:  # the store has gone with the process that kept it; the pidfds remain
            self._store = None
        return self.failure

    def _is_short(self, word: _LastWord, rank: int, call: int, message: Message | None) -> bool:
        """Says whether a rank that closed the group has left undone what this one waits for."""
        if word.calls < call:
            return True
        if message is None or message.peer != rank:
            return False
        if message.is_sent:
            return word.received.get(f"{self._rank}/{message.tag % _TAGS}", 0) <= message.order
        return self._has_all(word, rank, message.tag)

    def _is_vain(self, words: dict[int, _LastWord | None], message: Message) -> bool:
        """Says whether ``message``, from any rank, will not come.

        A transport's standing receive for announcements is not owed any.
        """
        if message.peer >= 0 or message.tag == ANNOUNCEMENT_TAG:
            return False
        with self.counting:
            received = {rank: self._received[rank, message.tag % _TAGS] for rank in words}
        return self._none_comes(words, message.tag, received)

    def _none_comes(self, words: dict[int, _LastWord | None], tag: int, received: Mapping[int, int]) -> bool:
        """Says whether all others have closed the group and sent no more with ``tag`` than is ``received``, by rank."""
        return bool(words) and all(
            word is not None and self._sent_by(word, tag) <= received[rank] for rank, word in words.items()
        )

    def _has_all(self, word: _LastWord, rank: int, tag: int) -> bool:
        """Says whether all messages are here that ``rank`` had sent, by its last word, with this tag."""
        with self.counting:
            return self._sent_by(word, tag) <= self._received[rank, tag % _TAGS]

    def _sent_by(self, word: _LastWord, tag: int) -> int:
        return word.sent.get(f"{self._rank}/{tag % _TAGS}", 0)

    def _owes(self, rank: int, call: int, message: Message | None) -> bool:
        """Says the same of a rank that is dead, and may have closed the group in good order."""
        store = self._store
        try:
            word = None if store is None else _last_word(store, rank)
        except RuntimeError:
            word = None
        return word is None or self._is_short(word, rank, call, message)

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
        found, store = self._ended(), self._lasting_store
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check(["ended"]):
                found |= {rank for rank in range(len(self._ranks)) if store.check([f"ended{rank}"])}
        return found

    def _failure_of(self, kind: str, rank: int, call: int) -> Failure:
        member = self._members[rank] if self._members and rank >= 0 else None
        status = NO_STATUS if member is None or kind != "lost" else member.exit_status()
        return Failure(kind, rank, 0 if member is None else member.pid, status, call)


_TAGS = 1 << 15  # all of gloo's; over MPI a program may use a new one in each step, for ever


def _told(store: Any) -> Failure | None:
    """Returns what broke the group, if somebody has said so in ``store``."""
    return Failure(*json.loads(store.get("failure"))) if store.check(["failure"]) else None


def _soon_told(store: Any) -> Failure | None:
    """Returns what the rank says that was the first to find the group broken, and may be about to say it.

    Who did not wait for that would close the group, and a third rank would find it gone, of nothing that anybody knows.
    """
    deadline = time.monotonic() + _SAYS_IT_S
    while (told := _told(store)) is None and time.monotonic() < deadline:
        time.sleep(2e-3)
    return told


def _last_word(store: Any, rank: int) -> _LastWord | None:
    """Returns what a rank had done when it closed the group, None if it has not closed it."""
    return _word_of(store, f"closed{rank}")


def _word_of(store: Any, key: str) -> _LastWord | None:
    return _LastWord(*json.loads(store.get(key))) if store.check([key]) else None


def _part(store: Any, name: str) -> Any:
    return torch.distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
