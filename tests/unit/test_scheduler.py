"""What a stream moves next: a pure function of what all ranks have submitted."""

from __future__ import annotations

import random

from pycomm.overlap.scheduler import GRANT_S, Item, Scheduler

MIB = 1 << 20
ONE_SEGMENT = MIB / GRANT_S  # bytes a second that make a grant of a MiB


def item(name: str, segments: int = 1, priority: int = 0) -> Item:
    return Item([f"{name}{number}" for number in range(segments)], priority, MIB)


def names(chosen: list[tuple[Item, str]]) -> list[str]:
    return [segment for _, segment in chosen]


def test_the_urgent_overtakes_between_segments() -> None:
    scheduler = Scheduler()
    scheduler.add(item("large", 4))
    assert names(scheduler.grant(1, ONE_SEGMENT)) == ["large0"]
    scheduler.add(item("urgent", priority=1))
    assert names(scheduler.grant(1, ONE_SEGMENT)) == ["large1"], "another rank has not submitted it yet"
    assert names(scheduler.grant(2, ONE_SEGMENT)) == ["urgent0"]
    assert names(scheduler.grant(2, 3 * ONE_SEGMENT)) == ["large2", "large3"]
    assert not scheduler.has_work and scheduler.submitted == 2


def test_a_grant_is_a_segment_at_least_and_no_more_than_the_credit() -> None:
    scheduler = Scheduler()
    scheduler.add(item("a", 10))
    assert names(scheduler.grant(1, 1.0)) == ["a0"]
    assert names(scheduler.grant(1, 3 * ONE_SEGMENT)) == ["a1", "a2", "a3"]


def test_equal_priorities_keep_their_order_and_nothing_starves_behind_a_large_one() -> None:
    scheduler = Scheduler()
    for name in "abc":
        scheduler.add(item(name, 2))
    order = [name for _ in range(6) for name in names(scheduler.grant(3, 1.0))]
    assert order == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_ranks_that_submit_at_different_moments_move_the_same_in_the_same_order() -> None:
    """Two ranks, any interleaving of submissions: the order is a function of the agreed numbers alone."""
    for seed in range(200):
        dice = random.Random(seed)
        items = [(dice.randint(1, 5), dice.randint(0, 2)) for _ in range(8)]
        ranks = [Scheduler(), Scheduler()]
        orders: list[list[str]] = [[], []]
        while any(len(items) > each.submitted or each.has_work for each in ranks):
            for each in ranks:
                for _ in range(dice.randint(0, 3)):
                    if each.submitted < len(items):
                        segments, priority = items[each.submitted]
                        each.add(item(f"{each.submitted}.", segments, priority))
            agreed = min(each.submitted for each in ranks)
            if not all(each.has_work for each in ranks):
                continue
            for each, order in zip(ranks, orders):
                order += names(each.grant(agreed, dice.choice([1.0])))
        assert orders[0] == orders[1] and len(orders[0]) == sum(segments for segments, _ in items)
