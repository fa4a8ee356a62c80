"""A group that is made again when a rank was lost: killed ranks are started again, the others keep their processes.

    member = Membership(rank, world_size, store)      # the store must outlive every rank: a supervisor's, or a file
    while step < last_step:
        try:
            if generation is None:
                generation = member.join(step)        # the first time, and after each failure
                step = generation.step
                pycomm.broadcast(state, generation.source)
            pycomm.all_reduce(gradients)
            ...
            step += 1
        except pycomm.TransportError:                 # a rank was lost
            generation = None

[Note: generations]
The ranks of a job are numbered 0 to world_size - 1 for good; a process that plays a rank is an *incarnation* of it,
numbered in the order they started. A *generation* is a roll: which incarnation of each rank belongs to the group. It is
agreed upon in the store, by three rules:

1. A rank that wants to belong to generation g writes its entry (incarnation, last finished step) for g, by compare-and-
   set, never over an entry of a later incarnation.
2. Once all entries for g are there, anybody writes them down as the roll of g, by compare-and-set: the first stands.
3. A rank goes on to g + 1 only after it has seen the roll of g: because it is not on it (it was started since), because
   it was a member and the group broke, or because its members did not reach each other. It leaves word that it did.
4. Who is on the roll says so, and connects to the others once all have said it. Who finds that a rank has gone on
   goes on too.

So there is one roll a generation, on which all agree, and nobody waits in a generation that others have left: a rank
looks whether they have (``is_abandoned``) as long as it connects, wherever that makes it wait. A roll that names a dead
incarnation is given up as soon as its successor has come. The timeout of connecting (_PATIENCE_S) is for what no rank
can see: a network between them that swallows what they send. An incarnation that has been replaced while it was stopped
is told so, and takes no further part; ending it is the supervisor's part.

``Joining`` is this protocol alone. It never blocks, sleeps or reads a clock, so that a test can run all ranks of a
world in one thread, with any interleaving, deaths and delays, from a seed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..collectives.context import default_group
from ..collectives.init import finalize, join_ranks
from ..config import Config, seconds
from ..errors import CollectiveTimeoutError, ConfigError, TransportError

if TYPE_CHECKING:
    from ..collectives.group import Group

__all__ = ["Entry", "Generation", "Joining", "KeyValues", "Membership", "Roll"]

_log = logging.getLogger("pycomm")

_POLL_S = 0.002
_PATIENCE_S = 30.0  # for ranks that are all there to reach each other; doubled each time that it was too short


class KeyValues(Protocol):
    """What the protocol needs of a store; torch's stores have it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` have a value."""

    def get(self, key: str) -> bytes:
        """The value of ``key``, which has one."""

    def set(self, key: str, value: str) -> None:
        """Gives ``key`` a value."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at 0, and returns it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets ``key`` if its value is ``expected`` ("": if it has none); returns the value it has then."""


class Entry(NamedTuple):
    """What one rank writes for a generation: which process of it, and the last step that it finished."""

    incarnation: int
    step: int


class Roll(NamedTuple):
    """The members of a generation, by rank."""

    number: int
    entries: tuple[Entry, ...]


class Generation(NamedTuple):
    """A generation that this rank has joined, counted from 1, and its group, which is the default group.

    ``step`` is the last step that any rank has finished, ``source`` the first rank that has: the one to copy from.
    """

    number: int
    group: Group
    step: int
    source: int


class Joining:
    """One rank on its way into a generation; see [Note: generations].

    ``advance`` says which roll to try; the caller then connects to its members, and says ``reject`` if that fails.
    """

    def __init__(self, store: KeyValues, rank: int, world_size: int, incarnation: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._incarnation = incarnation
        self._target = 0  # the generation that this rank wants to belong to; 0: it has not looked yet
        self._step = 0
        self._is_entered = False  # there
        self._has_seen_roll = False  # of there
        self._is_here = False  # has said so

    def begin(self, step: int) -> None:
        """Starts over, for the generation after the last one, as a rank that has finished ``step``."""
        self._step = step
        self._go_on()

    def reject(self) -> None:
        """Gives up the roll that ``advance`` returned: its members did not reach each other."""
        self._go_on()

    def advance(self) -> Roll | None:
        """Takes a step, if there is one to take, and returns the roll to try, or None if ranks are still awaited.

        Raises TransportError if a later process has taken this rank's place.
        """
        if self._target == 0:
            self._find_target()
        while (roll := self._read_roll() or self._enter_and_decide()) is not None:
            self._has_seen_roll = True
            mine = roll.entries[self._rank]
            if mine.incarnation == self._incarnation:
                if not self._is_here:
                    self._store.set(self._here_key(self._rank), "1")
                    self._is_here = True
                if not self.is_abandoned():
                    is_complete = self._store.check([self._here_key(rank) for rank in range(self._world_size)])
                    return roll if is_complete else None
            else:
                self._check_not_replaced(mine)
            self._go_on()
        return None

    def is_abandoned(self) -> bool:
        """Whether a rank has gone on from the generation whose roll ``advance`` returned last."""
        return self._store.check([self._left_key()])

    def missing(self) -> list[int]:
        """Returns the ranks that have not come to the generation that this one wants."""
        key_of = self._here_key if self._has_seen_roll else self._entry_key
        return [rank for rank in range(self._world_size) if not self._store.check([key_of(rank)])]

    def _go_on(self) -> None:
        # Not past a generation whose roll is not written: the others may be waiting for this rank there.
        if self._has_seen_roll:
            self._store.set(self._left_key(), "1")
            self._target += 1
        self._has_seen_roll = self._is_entered = self._is_here = False

    def _find_target(self) -> None:
        """Finds where to begin. What the store remembers as the newest may be older, but not newer, than the newest."""
        self._target = int(self._store.get("newest")) if self._store.check(["newest"]) else 1

    def _enter(self) -> None:
        key, mine = self._entry_key(self._rank), json.dumps([self._incarnation, self._step])
        present = self._store.get(key).decode() if self._store.check([key]) else ""
        while True:
            if present:
                self._check_not_replaced(Entry(*json.loads(present)))
            now = self._store.compare_set(key, present, mine).decode()
            if now == mine:
                self._is_entered = True
                return
            present = now

    def _check_not_replaced(self, entry: Entry) -> None:
        if entry.incarnation > self._incarnation:
            raise TransportError(
                f"process {self._incarnation} of rank {self._rank} has been replaced by process {entry.incarnation} "
                f"while it was stopped or cut off; end this one"
            )

    def _enter_and_decide(self) -> Roll | None:
        if not self._is_entered:
            self._enter()
        keys = [self._entry_key(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            return None
        entries = [json.loads(self._store.get(key)) for key in keys]
        stands = self._store.compare_set(self._roll_key(), "", json.dumps(entries))
        self._store.set("newest", str(self._target))
        return self._parse(stands)

    def _read_roll(self) -> Roll | None:
        key = self._roll_key()
        return self._parse(self._store.get(key)) if self._store.check([key]) else None

    def _parse(self, text: bytes) -> Roll:
        entries = tuple(Entry(*map(int, entry)) for entry in json.loads(text))
        if len(entries) != self._world_size:
            raise ConfigError(
                f"membership: rank {self._rank} expects {self._world_size} ranks, the roll of generation "
                f"{self._target} has {len(entries)}; give every process the same world_size"
            )
        return Roll(self._target, entries)

    def _roll_key(self) -> str:
        return f"{self._target}/roll"

    def _entry_key(self, rank: int) -> str:
        return f"{self._target}/entry/{rank}"

    def _here_key(self, rank: int) -> str:
        return f"{self._target}/here/{rank}"

    def _left_key(self) -> str:
        return f"{self._target}/left"


class Membership:
    """This process's place among the ranks of a job in which ranks may be lost and started again.

    ``store`` is a torch store that outlives every rank: one that the supervisor of the job serves, or a FileStore.
    ``transport`` and ``config`` are as for ``pycomm.init``. Used by one thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Any, *, transport: str = "auto", config: Config | None = None
    ) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, though not in its __all__

        if not 0 <= rank < world_size:
            raise ConfigError(f"membership: expected 0 <= rank < world_size, got rank {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self._config = Config() if config is None else config
        if transport != "auto":
            self._config = replace(self._config, transport=transport)
        self._prefixed: Callable[[str], Any] = lambda name: PrefixStore(f"pycomm/members/{name}", store)
        incarnation = int(self._prefixed("incarnations").add(str(rank), 1))
        self._joining = Joining(self._prefixed("generations"), rank, world_size, incarnation)

    def join(self, step: int = 0, *, timeout: float | timedelta | None = None) -> Generation:
        """Returns the next generation, once every rank of the job has come to it; closes the default group if open.

        Called by every rank: when it starts, and after each error that broke its group. ``step`` is the last step that
        this rank has finished, 0 for a process that has just been started. Ranks that die meanwhile are waited for,
        until they have been started again. Raises CollectiveTimeoutError, naming the missing ranks, after ``timeout``
        (default: that of ``config``), and TransportError if a later process plays this rank.
        """
        limit_s = self._config.timeout_s if timeout is None else seconds(timeout)
        deadline = time.monotonic() + limit_s
        if default_group() is not None:
            finalize()
        self._joining.begin(step)
        patience_s = _PATIENCE_S
        while True:
            roll = self._await_roll(deadline, limit_s)
            try:
                group = self._connect(roll, min(patience_s, max(deadline - time.monotonic(), 0.1)))
            except TransportError as error:
                _log.info("rank %d: generation %d failed as it began: %s", self.rank, roll.number, error)
                if time.monotonic() > deadline:
                    raise
                patience_s *= 2
                self._joining.reject()
                continue
            last = max(entry.step for entry in roll.entries)
            source = next(rank for rank, entry in enumerate(roll.entries) if entry.step == last)
            return Generation(roll.number, group, last, source)

    def _await_roll(self, deadline: float, limit_s: float) -> Roll:
        while (roll := self._joining.advance()) is None:
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"membership: rank {self.rank} of {self.world_size} waited {limit_s:.3g} s for ranks "
                    f"{self._joining.missing()}; see whether they are being started again, or raise the timeout"
                )
            time.sleep(_POLL_S)
        return roll

    def _connect(self, roll: Roll, patience_s: float) -> Group:
        store = self._prefixed(f"generation{roll.number}")
        config = replace(self._config, timeout_s=patience_s)
        group = join_ranks(store, self.rank, self.world_size, config, self._look)
        group.timeout_s = group.transport.timeout_s = self._config.timeout_s
        return group

    def _look(self) -> None:
        if self._joining.is_abandoned():
            raise TransportError("a rank has left this generation: it was started again, or could not connect")
