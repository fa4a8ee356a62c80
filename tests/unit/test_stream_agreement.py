"""What a stream's ranks tell one another: how far all are, and which items are not the same on all."""

from __future__ import annotations

import struct
import time
from typing import Any

from pycomm.ops import native


def agree(ranks: list[Any]) -> tuple[int, list[int]]:
    """One exchange; every rank finds the same."""
    frames = [each.frame(1e6 + rank) for rank, each in enumerate(ranks)]
    found = [each.agree(frames) for each in ranks]
    assert found[1:] == found[:-1]
    submitted, bytes_per_s, refused = found[0]
    assert bytes_per_s == 1e6, "the least"
    return submitted, refused


def submit(ranks: list[Any], *items: list[int]) -> None:
    for rank, each in zip(ranks, items, strict=True):
        for item in each:
            rank.add(item)


def test_the_ranks_agree_on_how_far_all_are_and_on_what_differs() -> None:
    ranks = [native().StreamAgreement() for _ in range(3)]
    assert agree(ranks) == (0, [])
    submit(ranks, [11, 12], [11, 12, 13], [11, 12])  # rank 1 is an item ahead
    assert agree(ranks) == (2, [])
    assert agree(ranks) == (2, [])
    submit(ranks, [13, 14], [14], [13, 15])
    assert agree(ranks) == (4, [4])
    submit(ranks, [16, 1, 2], [16, 2, 1], [16, 1, 2])
    assert agree(ranks) == (7, [6, 7]), "what follows a difference may be the same, and the order counts"


def test_a_rank_may_be_far_ahead() -> None:
    ranks = [native().StreamAgreement() for _ in range(2)]
    submit(ranks, [0, 1, 2], list(range(200)))
    assert agree(ranks) == (3, [])
    submit(ranks, [*range(3, 150), -1 % 2**64, *range(151, 201)], [])
    assert [agree(ranks) for _ in range(5)] == [(67, []), (131, []), (195, [151]), (200, []), (200, [])]


def test_the_bandwidth_is_right_though_segments_end_in_bunches() -> None:
    """Two under way, as between hosts, end together: of the second nothing is to be seen but an instant."""
    bunch_s, segment_bytes, told = 20e-3, 1 << 20, []
    progress, begun = native().StreamProgress(1, segment_bytes), []

    def exchange(frame: bytes) -> bytes:
        told.append(struct.unpack_from("<Qd", frame)[1])
        return frame

    def refuse(number: int) -> None:
        raise AssertionError(f"item {number} differs from itself")

    def move(number: int, _segment: int) -> None:
        begun.append(time.monotonic_ns())
        if len(begun) == 2:
            time.sleep(bunch_s)
            for start_ns in begun:
                progress.ended(number, start_ns)
            begun.clear()

    progress.submit(0, 1, 40, segment_bytes)
    progress.close()
    progress.run(None, exchange, refuse, move, None, lambda: None)
    assert len(told) > 30, "before anything was measured several may be granted at a time, then one"
    assert max(told[20:]) < 3 * 2 * segment_bytes / bunch_s
