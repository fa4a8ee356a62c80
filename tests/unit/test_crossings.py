"""Which of two groups goes first, and by which key their members find one another (``_crossings.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pycomm import CollectiveTimeoutError
from pycomm.transport import _crossings
from pycomm.transport._crossings import Crossings, Making
from pycomm.transport._wording import Failure

LOST = Failure("lost", 3)


def key_of(ranks: list[int], count: int, with_all: bool = False) -> int:
    return _crossings.key_of(ranks, count, with_all)


class Words:
    """What the other ranks have said, which the test writes."""

    def __init__(self, **made: Making) -> None:
        self.made = {int(rank[1:]): making for rank, making in made.items()}
        self.dead: set[int] = set()
        self.told: list[tuple[tuple[int, ...], int]] = []

    def tell_making(self, ranks: Sequence[int], key: int) -> None:
        self.told.append((tuple(ranks), key))

    def made_by(self, rank: int) -> Making:
        return self.made.get(rank, Making())

    def ended(self) -> set[int]:
        return self.dead


def old_group(failure: Failure | None, rank: int = 0) -> Any:
    """Returns the group that groups are made of."""
    return SimpleNamespace(
        rank=rank,
        world_size=4,
        failure=failure,
        is_broken=failure is not None,
        timeout_s=0.05,
        place=lambda verb: f"{verb} here",
    )


def ignore() -> None:
    """Looks at nothing."""


@pytest.mark.parametrize(
    ("mine", "theirs", "failure", "expected"),
    [
        ([0, 1], {0, 1, 2}, LOST, True),
        ([0, 1, 2], {0, 1}, LOST, False),
        ([0, 1], {0, 1}, LOST, False),
        ([0, 1, 3], {0, 1}, LOST, True),
        ([0, 1], {0, 1, 2, 3}, LOST, False),
        ([0, 1], {1, 2}, LOST, False),
        ([0, 1], {0, 1, 2}, None, False),
        ([0, 1], {0, 1, 3}, Failure("timeout", 3), True),
        ([0, 1, 3], {0, 1, 2, 3}, Failure("interrupted", 3), True),
    ],
)
def test_which_group_goes_first(mine: list[int], theirs: set[int], failure: Failure | None, expected: bool) -> None:
    crossings = Crossings(Words(r1=Making(frozenset(theirs), 5)))
    assert crossings.look(old_group(failure), mine).is_second is expected


def test_a_group_with_a_dead_member_and_one_that_was_given_up_go_last() -> None:
    words = Words(r1=Making(frozenset({0, 1, 2}), 5))
    words.dead = {2}
    assert not Crossings(words).look(old_group(LOST), [0, 1]).is_second
    words.dead = set()
    crossings = Crossings(words)
    with pytest.raises(ValueError, match="x"), crossings.making(old_group(LOST), [0, 1, 2], 7, ignore):
        raise ValueError("x")
    assert not crossings.look(old_group(LOST), [0, 1]).is_second


def test_the_others_take_the_key_of_the_first() -> None:
    words = Words(r0=Making(frozenset({0, 1}), key_of([0, 1], 5)))
    crossings, old = Crossings(words), old_group(LOST, rank=1)
    with (
        crossings.making(old, [0, 1], key_of([0, 1], 2), ignore) as key,
        crossings.making(old, [0, 1], 3, ignore) as my,
    ):
        assert key == key_of([0, 1], 5)
        assert my == 3, "inside a span the key is the one that is given"
    assert words.told == [((0, 1), key_of([0, 1], 2)), ((0, 1), key_of([0, 1], 5)), ((), 0)]


@pytest.mark.parametrize("first", [key_of([1, 0], 5), key_of([0, 1], 5), key_of([0, 1], 6, with_all=True), 0])
def test_a_key_of_another_group_or_kind_or_of_one_that_was_made_is_not_taken(first: int) -> None:
    words = Words(r0=Making(frozenset({0, 1}), key_of([0, 1], 5)))
    crossings, old = Crossings(words), old_group(LOST, rank=1)
    with crossings.making(old, [0, 1], key_of([0, 1], 2), ignore):
        words.made[0] = Making(frozenset({0, 1}), first)
    late = pytest.raises(CollectiveTimeoutError, match="waiting for rank 0")
    with late, crossings.making(old, [0, 1], key_of([0, 1], 3), ignore):
        raise AssertionError("it has a key")


@pytest.mark.parametrize("failure", [None, LOST])
def test_who_needs_no_other_key_keeps_its_own(failure: Failure | None) -> None:
    words = Words()
    words.dead = {0}  # which is for who makes the group to find
    old = old_group(failure, rank=1)
    for ranks in ([0, 1], [1, 0]):
        with Crossings(words).making(old, ranks, 11, ignore) as key:
            assert key == 11


def test_what_the_wait_for_the_key_looks_at_ends_it() -> None:
    def look() -> None:
        raise RuntimeError("enough")

    wait: Callable[..., Any] = Crossings(Words()).making
    with pytest.raises(RuntimeError, match="enough"), wait(old_group(LOST, rank=1), [0, 1], key_of([0, 1], 1), look):
        pass


def test_who_waits_for_this_rank() -> None:
    with_me, without = Making(frozenset({0, 1, 2}), key_of([0, 1, 2], 5)), Making(frozenset({1, 2}), 7)
    words = Words(r1=with_me, r2=without)
    crossings, old = Crossings(words), old_group(LOST)
    assert crossings.who_waits(old) == {1}
    assert crossings.who_waits(old_group(None)) == set(), "of a group that is whole all ranks make groups together"
    words.dead = {2}
    assert crossings.who_waits(old) == set(), "they will hear of it"
    words.dead = set()
    with crossings.making(old, [0, 1, 2], key_of([0, 1, 2], 5), ignore):
        assert crossings.who_waits(old) == set(), "this rank is coming"
    assert crossings.who_waits(old) == set(), "it has come, and that one does not know yet"
    words.made[1] = Making(frozenset({0, 1, 2}), key_of([0, 1, 2], 6))
    assert crossings.who_waits(old) == {1}, "once more"
    with pytest.raises(ValueError, match="x"), crossings.making(old, [0, 1, 2], key_of([0, 1, 2], 6), ignore):
        raise ValueError("x")
    words.made[1] = Making(frozenset({0, 1, 2}), key_of([0, 1, 2], 7))
    assert crossings.who_waits(old) == set(), "it was given up"


def test_who_has_left_is_not_waited_for_unless_it_has_come_before() -> None:
    mine = key_of([0, 1, 2], 5)
    left = Words()
    Crossings(left).leave()
    [(nobody, none)] = left.told
    assert nobody == () and none != 0, "it has made no group"
    words = Words(r1=Making(frozenset(), mine), r2=Making(frozenset({0, 1, 2}), mine))
    words.made[3] = Making(frozenset(), none)
    crossings, old = Crossings(words), old_group(LOST)
    with crossings.making(old, [0, 1, 2], mine, ignore):
        assert crossings.look(old, [0, 1, 2]).gone is None, "it has made this one"
        words.made[1] = Making(frozenset(), key_of([0, 1, 2], 4))
        assert crossings.look(old, [0, 1, 2]).gone is None, "it asks now and then"
        crossings._next_look_s = 0.0
        assert crossings.look(old_group(None), [0, 1, 2]).gone is None, "there it is found otherwise"
        assert crossings.look(old, [0, 2]).gone is None
        crossings._next_look_s = 0.0
        assert crossings.look(old, [0, 1, 2]).gone == 1
        crossings._next_look_s = 0.0
        assert crossings.look(old, [0, 2, 3]).gone == 3
    crossings.leave()
    assert words.told[-1] == ((), mine)


def test_keys_are_positive_and_differ() -> None:
    groups = [(ranks, with_all) for ranks in ([0, 1], [1, 0], [0, 1, 1]) for with_all in (False, True)]
    keys = [key_of(ranks, count, with_all) for ranks, with_all in groups for count in (1, 2, 2**31 - 1)]
    assert len(set(keys)) == len(keys) and all(0 < key < 1 << 63 for key in keys)
