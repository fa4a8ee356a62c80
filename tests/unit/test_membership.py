"""Membership: the protocol over thousands of seeded jobs in one thread; see membership_model.py."""

from __future__ import annotations

import pytest
from membership_model import World

from pycomm import TransportError
from pycomm.fault.membership import Joining, Roll

SEEDS = 1500


@pytest.mark.parametrize("start", range(0, SEEDS, SEEDS // 5))
def test_ranks_come_together_whatever_happens(start: int) -> None:
    for seed in range(start, start + SEEDS // 5):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed} (python tests/unit/membership_model.py {seed}): {error}") from error


class StaysBehind(Joining):
    """Breaks the fourth rule: does not look whether the others have gone on."""

    def _left_key(self) -> str:
        return f"{super()._left_key()} says rank {self._rank}"


class WaitsOn(Joining):
    """Breaks it while it connects: then the successor of a rank that died meanwhile is not noticed."""

    _connects = False

    def advance(self) -> Roll | None:
        self._connects = False
        roll = super().advance()
        self._connects = roll is not None
        return roll

    def is_abandoned(self) -> bool:
        return not self._connects and super().is_abandoned()


class WritesOverRolls(Joining):
    """Breaks the second rule."""

    def _enter_and_decide(self) -> Roll | None:
        roll = super()._enter_and_decide()
        if roll is not None:
            self._store.set(self._roll_key(), "")
        return roll


class WritesOverSuccessors(Joining):
    """Breaks the first rule."""

    def _check_not_replaced(self, entry: object) -> None:
        pass


# The last one needs a process that is replaced and goes on at the worst moment: one seed in a thousand or two.
@pytest.mark.parametrize(
    ("broken", "seed"), [(StaysBehind, 0), (WaitsOn, 0), (WritesOverRolls, 0), (WritesOverSuccessors, 2400)]
)
def test_the_model_finds_planted_mistakes(broken: type[Joining], seed: int) -> None:
    with pytest.raises((AssertionError, ValueError)):
        for each in range(seed, seed + 50):
            World(each, broken).run()


def test_a_replaced_process_is_told() -> None:
    store = Values()
    old, new = Joining(store, 0, 2, 1), Joining(store, 0, 2, 2)
    old.begin(0)
    assert old.advance() is None
    new.begin(0)
    assert new.advance() is None
    other = Joining(store, 1, 2, 1)
    other.begin(7)
    assert other.advance() is None  # the roll is written; rank 0 has not said that it is there
    roll = new.advance()
    assert roll is not None and [tuple(entry) for entry in roll.entries] == [(2, 0), (1, 7)]
    assert other.advance() == roll
    with pytest.raises(TransportError, match="process 1 of rank 0 has been replaced by process 2"):
        old.advance()


class Values(dict[str, str]):
    """A store for one thread."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(dict.get(self, key, "0")) + amount)
        return int(self[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if dict.get(self, key, "") == expected:
            self[key] = desired
        return self[key].encode()
