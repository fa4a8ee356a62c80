"""What a stream's ranks tell one another: how far all are, and up to where they submitted the same."""

from __future__ import annotations

import struct
import time
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
    assert agree(ranks) == (4, 3, 0), "so one segment at a time"
    for each in ranks:
        each.add(14)
    assert agree(ranks) == (5, 3, 0), "what follows a difference is no more the same"


def test_the_order_of_what_is_the_same_counts() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    for rank, items in enumerate(([1, 2], [2, 1])):
        for item in items:
            ranks[rank].add(item)
    assert agree(ranks) == (2, 0, 0)


def test_what_a_rank_far_ahead_has_forgotten_counts_as_not_compared() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    for rank, submitted in enumerate((3, 67)):
        for item in range(submitted):
            ranks[rank].add(item)
    assert agree(ranks) == (3, 0, 1e6)
    ranks[0].add(3)  # 63 ahead is what is remembered
    assert agree(ranks) == (4, 4, 1e6)


def test_the_bandwidth_is_right_though_segments_end_in_bunches() -> None:
    """Two under way, as between hosts, end together: of the second nothing is to be seen but an instant."""
    bunch_s, segment_bytes, told = 20e-3, 1 << 20, []
    progress, begun = native().StreamProgress(1, segment_bytes), []

    def exchange(frame: bytes) -> bytes:
        told.append(struct.unpack_from("<Qd", frame)[1])
        return frame

    def move(number: int, _segment: int, _is_agreed: bool) -> None:
        begun.append(time.monotonic_ns())
        if len(begun) == 2:
            time.sleep(bunch_s)
            for start_ns in begun:
                progress.ended(number, start_ns)
            begun.clear()

    progress.submit(0, 1, 40, segment_bytes)
    progress.close()
    progress.run(None, exchange, move, None, lambda: None)
    assert len(told) > 30, "before anything was measured several may be granted at a time, then one"
    assert max(told[20:]) < 3 * 2 * segment_bytes / bunch_s
