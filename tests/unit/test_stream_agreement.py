"""What a stream's ranks tell one another: how far all are, and up to where they submitted the same."""

from __future__ import annotations

from typing import Any

from pycomm.ops import native


def agree(ranks: list[Any]) -> tuple[int, int, float]:
    """One exchange; every rank finds the same."""
    frames = [each.frame(1e6 + rank) for rank, each in enumerate(ranks)]
    found = {each.compare(frames) for each in ranks}
    assert len(found) == 1
    return found.pop()


def test_the_ranks_agree_on_how_far_all_are_and_on_what_is_the_same() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    assert agree(ranks) == (0, 0, 1e6)
    for rank, items in enumerate(([11, 12], [11, 12, 13])):  # rank 1 is an item ahead
        for item in items:
            ranks[rank].add(item)
    assert agree(ranks) == (2, 2, 1e6)
    ranks[0].add(13)
    assert agree(ranks) == (3, 3, 1e6)
    for rank, each in enumerate(ranks):
        each.add(20 + rank)
    assert agree(ranks) == (4, 3, 1e6)
    for each in ranks:
        each.add(14)
    assert agree(ranks) == (5, 3, 1e6), "what follows a difference is no more the same"


def test_the_order_of_what_is_the_same_counts() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    for rank, items in enumerate(([1, 2], [2, 1])):
        for item in items:
            ranks[rank].add(item)
    assert agree(ranks) == (2, 0, 1e6)


def test_what_a_rank_far_ahead_has_forgotten_counts_as_not_compared() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    for rank, submitted in enumerate((3, 67)):
        for item in range(submitted):
            ranks[rank].add(item)
    assert agree(ranks) == (3, 0, 1e6)
    ranks[0].add(3)  # 63 ahead is what is remembered
    assert agree(ranks) == (4, 4, 1e6)
