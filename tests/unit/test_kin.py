"""Who waits in one group and is waited for in another (``_kin.py``)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from pycomm import CollectiveTimeoutError, PeerLostError
from pycomm.transport import _kin
from pycomm.transport._kin import ANYBODY, EVERYBODY, NOBODY, Kin


class Group:
    """What a transport is to its kin; ``members`` are ranks of the first of them, which this one of is ``me``."""

    def __init__(self, kin: Kin, members: list[int], me: int, awaited_by: AbstractSet[int] = frozenset()) -> None:
        self.rank, self.group_name = members.index(me), f"of {members}"
        self.awaited_by, self.have_done = awaited_by, set[int]()
        self.is_left = self.has_told = False
        kin.add(self, members)  # type: ignore[arg-type]

    def who_waits(self) -> AbstractSet[int]:
        return self.awaited_by

    def is_owed_by(self, rank: int, message: object) -> bool:
        return rank not in self.have_done

    def check_lost(self, doing: str) -> None:
        raise PeerLostError(f"{doing}: rank 3 is lost", rank=3)

    def abandon(self) -> None:
        self.is_left = True

    def tell_done(self) -> None:
        self.has_told = True


@pytest.fixture
def kin(monkeypatch: pytest.MonkeyPatch) -> Kin:
    monkeypatch.setattr(_kin, "_LOOK_S", 0.0)
    return Kin()


def waits_in_vain(kin: Kin, waiting: Any, peer: int, *, has_come: bool = False) -> bool:
    """Says whether a wait for ``peer`` is ended, with the loss."""
    try:
        kin.look(waiting, peer, lambda: has_come)
    except PeerLostError as error:
        assert error.rank == 3 and "waits for this rank there" in error.__notes__[0]
        assert waiting.is_left, "those who wait there for this rank are told"
        waiting.is_left = False
        return True
    assert not waiting.is_left
    return False


def test_who_waits_for_one_that_waits_for_it_elsewhere_is_told(kin: Kin) -> None:
    whole = Group(kin, [0, 1, 2, 3], me=2, awaited_by={1})
    waiting = Group(kin, [1, 2, 0], me=2)
    assert waits_in_vain(kin, waiting, 0) and waits_in_vain(kin, waiting, EVERYBODY)
    assert not waits_in_vain(kin, waiting, 2), "who is waited for is on its way"
    assert not waits_in_vain(kin, waiting, NOBODY)
    assert not waits_in_vain(kin, waiting, 0, has_come=True)
    whole.awaited_by = frozenset()
    assert not waits_in_vain(kin, waiting, 0)


def test_who_has_done_its_part_is_not_waited_for(kin: Kin) -> None:
    whole = Group(kin, [0, 1, 2, 3], me=0, awaited_by={1, 2})
    waiting = Group(kin, [0, 1, 2], me=0)
    assert waits_in_vain(kin, waiting, ANYBODY)
    waiting.have_done = {1}
    assert not waits_in_vain(kin, waiting, 1) and waits_in_vain(kin, waiting, 2)
    assert waits_in_vain(kin, waiting, EVERYBODY)
    assert not waits_in_vain(kin, waiting, ANYBODY), "one message may yet come"
    del whole


def test_a_group_that_ran_out_of_time_is_told_of_too(kin: Kin, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, waiting = Group(kin, [0, 1], me=0, awaited_by={1}), Group(kin, [0, 1], me=0)

    def check_lost(doing: str) -> None:
        raise CollectiveTimeoutError("time is over")

    monkeypatch.setattr(whole, "check_lost", check_lost)
    with pytest.raises(CollectiveTimeoutError):
        kin.look(waiting, 1, None)  # type: ignore[arg-type]
    assert waiting.is_left


def test_groups_that_this_rank_has_left_say_nothing(kin: Kin) -> None:
    whole = Group(kin, [0, 1], me=0, awaited_by={1})
    waiting = Group(kin, [0, 1], me=0)
    kin.remove(whole)  # type: ignore[arg-type]
    assert not waits_in_vain(kin, waiting, 1)
    whole = Group(kin, [0, 1], me=0, awaited_by={1})
    assert waits_in_vain(kin, waiting, 1)
    del whole  # nobody holds it
    assert not waits_in_vain(kin, waiting, 1)


def test_a_group_that_is_broken_itself_is_for_its_own_looks(kin: Kin) -> None:
    waiting = Group(kin, [0, 1], me=0, awaited_by={1})
    assert not waits_in_vain(kin, waiting, 1)


def test_it_looks_now_and_then() -> None:
    kin = Kin()
    whole, waiting = Group(kin, [0, 1], me=0), Group(kin, [0, 1], me=0)
    assert not waits_in_vain(kin, waiting, 1)
    whole.awaited_by = {1}
    assert not waits_in_vain(kin, waiting, 1), "a tenth of a second is not over"


def test_who_goes_on_leaves_word_everywhere(kin: Kin) -> None:
    groups = [Group(kin, [0, 1], me=0) for _ in range(3)]
    kin.go_on()
    assert all(group.has_told for group in groups)
