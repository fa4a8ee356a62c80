"""What a stream moves next: a pure function of what all ranks have submitted."""

from __future__ import annotations

import random
from typing import Any

from pycomm.ops import native

MIB = 1 << 20
ONE_SEGMENT = MIB / native().STREAM_GRANT_S  # bytes a second that make a grant of a MiB


def scheduler_of(*items: tuple[int, int]) -> Any:
    """A scheduler with items of so many segments, and of that priority; they count from 1, their segments from 0."""
    scheduler = native().StreamScheduler()
    for segments, priority in items:
        scheduler.add(priority, segments, MIB)
    return scheduler


def test_the_urgent_overtakes_between_segments() -> None:
    scheduler = scheduler_of((4, 0))
    assert scheduler.grant(1, ONE_SEGMENT) == [(1, 0)]
    assert scheduler.add(1, 1, MIB) == 2
    assert scheduler.grant(1, ONE_SEGMENT) == [(1, 1)], "another rank has not submitted it yet"
    assert scheduler.grant(2, ONE_SEGMENT) == [(2, 0)]
    assert scheduler.grant(2, 3 * ONE_SEGMENT) == [(1, 2), (1, 3)]
    assert not scheduler.has_work


def test_a_grant_is_a_segment_at_least_and_no_more_than_the_credit() -> None:
    scheduler = scheduler_of((10, 0))
    assert scheduler.grant(1, 1.0) == [(1, 0)]
    assert scheduler.grant(1, 3 * ONE_SEGMENT) == [(1, 1), (1, 2), (1, 3)]


def test_equal_priorities_keep_their_order_and_nothing_starves_behind_a_large_one() -> None:
    scheduler = scheduler_of((2, 0), (2, 0), (2, 0))
    order = [granted for _ in range(6) for granted in scheduler.grant(3, 1.0)]
    assert order == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_ranks_that_submit_at_different_moments_move_the_same_in_the_same_order() -> None:
    """Two ranks, any interleaving of submissions: the order is a function of the agreed numbers alone."""
    for seed in range(200):
        dice = random.Random(seed)
        items = [(dice.randint(1, 5), dice.randint(0, 2)) for _ in range(8)]
        ranks = [scheduler_of(), scheduler_of()]
        submitted = [0, 0]
        orders: list[list[tuple[int, int]]] = [[], []]
        while min(submitted) < len(items) or any(each.has_work for each in ranks):
            for rank, each in enumerate(ranks):
                for segments, priority in items[submitted[rank] : submitted[rank] + dice.randint(0, 3)]:
                    submitted[rank] = each.add(priority, segments, MIB)
            if all(each.has_work for each in ranks):
                for each, order in zip(ranks, orders):
                    order += each.grant(min(submitted), 1.0)
        assert orders[0] == orders[1] and len(orders[0]) == sum(segments for segments, _ in items)
