"""All ranks of a job and their membership in one thread, driven from a seed: deaths, restarts, stops, zombies.

    python tests/unit/membership_model.py 4711         # replays a seed, telling what happens
    python tests/unit/membership_model.py --count 100000

A rank runs until it touches the store; there the model may let others run first, stop it for long, or kill it. So every
point between two accesses to the store is a place where anything may happen. A supervisor starts dead ranks again, and
sometimes one that was merely stopped: then two processes play one rank. Time is counted in actions.

A rank that connects to the others of a roll has no timeout here: what it goes by is ``Joining.is_abandoned`` alone, or,
in every other world, also a death that it sees (a connection that breaks, a process that ends).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from pycomm.errors import TransportError
from pycomm.fault.membership import Joining, Roll

TROUBLE = 250  # actions in which ranks die
PEACE = 6000  # actions after that, in which all of them have to come together

Trace = Callable[[str], None]


class Dies(Exception):
    """The process that touched the store is no more."""


class Process:
    """One incarnation of a rank: what the rank's program does around ``Joining``."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.incarnation = world.started[rank] = world.started[rank] + 1
        self.joining = world.machine(Model(self), rank, world.size, self.incarnation)
        self.roll: Roll | None = None  # that it tries to reach the members of, or is a member of
        self.is_member = False
        self.step = 0
        self.is_alive = True
        self.is_busy = False  # in the middle of an access to the store
        self.stopped_until = 0
        self.joining.begin(0)

    def __str__(self) -> str:
        return f"rank {self.rank}.{self.incarnation}"

    def act(self) -> None:
        """Does the next thing that its program does."""
        self.is_busy = True
        try:
            if self.roll is None:
                self._advance()
            elif not self.is_member:
                self._connect(self.roll)
            else:
                self._work(self.roll)
        except Dies:
            self.is_alive = False
            self.world.trace(f"{self} dies at the store")
        except TransportError:  # replaced
            assert self.world.started[self.rank] > self.incarnation, f"{self} was told that it is replaced: it is not"
            self.is_alive = False
            self.world.trace(f"{self} learns that it is replaced")
        finally:
            self.is_busy = False

    def _advance(self) -> None:
        roll = self.joining.advance()
        if roll is None:
            if not self.world.is_peace and self.world.random.random() < 0.02:
                self.joining.begin(self.step)  # its join timed out, and is called again
            return
        self.world.check_roll(self, roll)
        self.roll = roll
        self.world.arrived.setdefault(roll.number, set()).add(self.rank)

    def _connect(self, roll: Roll) -> None:
        if len(self.world.arrived[roll.number]) == self.world.size:
            self.is_member = True
            self.step = max(entry.step for entry in roll.entries)
            self.world.trace(f"{self} is a member of generation {roll.number}, step {self.step}")
        elif self.joining.is_abandoned() or self._sees_a_death(roll):
            self.world.trace(f"{self} gives generation {roll.number} up")
            self.roll = None
            self.joining.reject()

    def _work(self, roll: Roll) -> None:
        """Takes part in one collective: it ends only once all others have begun it, and fails if one is gone."""
        if self._misses_one(roll):
            self.roll, self.is_member = None, False
            self.joining.begin(self.step)
            return
        peers = [self.world.player(rank, roll) for rank in range(self.world.size)]
        if all(peer is not None and peer.is_member and peer.step >= self.step for peer in peers):
            self.step += 1

    def _sees_a_death(self, roll: Roll) -> bool:
        return self.world.can_see_deaths and self.world.random.random() < 0.3 and self._misses_one(roll)

    def _misses_one(self, roll: Roll) -> bool:
        """Whether a member of ``roll`` has died, or has gone on from it."""
        for rank in range(self.world.size):
            player = self.world.player(rank, roll)
            has_arrived = rank in self.world.arrived[roll.number]
            if player is None or (has_arrived and player.roll is not roll and player.roll != roll):
                return True
        return False


class Model:
    """The store, as one process sees it: every access may be delayed, or be the process's last."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def _access(self) -> dict[str, str]:
        self.process.world.interleave(self.process)
        return self.process.world.values

    def check(self, keys: list[str]) -> bool:
        values = self._access()
        return all(key in values for key in keys)

    def get(self, key: str) -> bytes:
        return self._access()[key].encode()

    def set(self, key: str, value: str) -> None:
        self._access()[key] = value

    def add(self, key: str, amount: int) -> int:
        values = self._access()
        values[key] = str(int(values.get(key, "0")) + amount)
        return int(values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        values = self._access()
        if values.get(key, "") == expected:
            values[key] = desired
        return values.get(key, "").encode()


class World:
    """A job of two to five ranks, its store, and what must hold of it."""

    def __init__(self, seed: int, machine: type[Joining] = Joining, trace: Trace = lambda text: None) -> None:
        self.random = random.Random(seed)
        self.machine = machine
        self.trace = trace
        self.size = self.random.randint(2, 5)
        self.can_see_deaths = self.random.random() < 0.5
        self.values: dict[str, str] = {}
        self.now = 0
        self.depth = 0
        self.is_peace = False
        self.started = [0] * self.size
        self.rolls: dict[int, Roll] = {}
        self.arrived: dict[int, set[int]] = {}
        self.processes = [Process(self, rank) for rank in range(self.size)]
        self.everybody = list(self.processes)

    def player(self, rank: int, roll: Roll) -> Process | None:
        """Returns the living process that ``roll`` names for ``rank``."""
        for process in self.everybody:
            if (process.rank, process.incarnation) == (rank, roll.entries[rank].incarnation):
                return process if process.is_alive else None
        raise AssertionError(f"generation {roll.number} has a member that never was: {roll}")

    def check_roll(self, process: Process, roll: Roll) -> None:
        """Holds a roll that ``process`` was given to the laws."""
        known = self.rolls.setdefault(roll.number, roll)
        assert known == roll, f"two rolls of one generation: {known} and {roll}"
        assert roll.entries[process.rank].incarnation == process.incarnation, f"{process} is not on {roll}"
        assert process.rank not in self.arrived.get(roll.number, ()), f"{process} was given {roll} twice"
        before = self.rolls.get(roll.number - 1)
        if before is not None:
            pairs = list(zip(before.entries, roll.entries, strict=True))
            assert all(old.incarnation <= new.incarnation for old, new in pairs), f"{before}, then {roll}"
            stayed = [new.step for old, new in pairs if old.incarnation == new.incarnation]
            assert all(new.step >= old.step for old, new in pairs if old.incarnation == new.incarnation)
            if stayed and self.arrived.get(before.number, set()) >= set(range(self.size)):
                assert max(entry.step for entry in roll.entries) >= max(stayed)

    def interleave(self, process: Process) -> None:
        """What may happen before ``process`` gets to the store."""
        while self.depth < 3 and self.random.random() < 0.25:
            self.depth += 1
            self.turn()
            self.depth -= 1
        if not self.is_peace and self.random.random() < 0.01:
            raise Dies

    def turn(self) -> None:
        """Lets one process act, or strikes one."""
        self.now += 1
        process = self.random.choice(self.everybody)
        if self.is_peace or self.random.random() > 0.06:
            if process.is_alive and not process.is_busy and process.stopped_until <= self.now:
                process.act()
            return
        match self.random.choice(("kill", "kill", "stop", "start", "start")):
            case "kill" if not process.is_busy:
                process.is_alive = False
                self.trace(f"{process} is killed")
            case "stop":
                process.stopped_until = self.now + self.random.randint(1, 200)
                self.trace(f"{process} is stopped")
            case "start":
                self.start(process.rank, even_if_stopped=self.random.random() < 0.3)

    def start(self, rank: int, even_if_stopped: bool = False) -> None:
        """What the supervisor does: a new process for a rank whose latest is dead, or seems to be."""
        latest = self.processes[rank]
        if not latest.is_alive or (even_if_stopped and latest.stopped_until > self.now):
            self.processes[rank] = Process(self, rank)
            self.everybody.append(self.processes[rank])
            self.trace(f"{self.processes[rank]} is started")

    def run(self) -> None:
        """Trouble, then peace; raises AssertionError if a law is broken or the ranks do not come together."""
        while self.now < TROUBLE:
            self.turn()
        self.is_peace = True
        self.trace("peace")
        for process in self.everybody:
            process.stopped_until = 0
            # A replaced process that is in a group with all the others works on; ending it is the supervisor's part.
            process.is_alive = process.is_alive and process is self.processes[process.rank]
        for rank in range(self.size):
            self.start(rank)
        end = self.now + PEACE
        while not self.is_together():
            assert self.now < end, "the ranks did not come together: " + ", ".join(
                f"{process} in {process.roll and process.roll.number}" for process in self.processes
            )
            self.turn()
        first = min(process.step for process in self.processes)
        while min(process.step for process in self.processes) < first + 3:  # and they can work
            assert self.now < end, "the ranks are together and do not get on"
            self.turn()

    def is_together(self) -> bool:
        """Whether every rank's latest process is a member of the same generation."""
        return all(each.is_member for each in self.processes) and len({each.roll for each in self.processes}) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.count):
        try:
            World(seed, trace=print if options.count == 1 else lambda text: None).run()
        except BaseException:
            print(f"seed {seed}")
            raise


if __name__ == "__main__":
    main()
