"""What a stream's ranks tell one another: how far all are, and up to where they submitted the same."""

from __future__ import annotations

import torch

import pycomm
from harness import run_ranks
from pycomm.overlap.agreement import Agreed, Agreement


def compare(rank: int) -> list[Agreed]:
    agreement = Agreement(pycomm.get_group())
    found = []

    def say(*items: object) -> None:
        for item in items:
            agreement.add(item)
        said.extend(items)
        agreement.fill(len(said), 1e6 + rank)
        found.append(agreement.run())

    said: list[object] = []
    say(*("same", torch.float32, "only here")[: 3 if rank else 2])  # rank 1 is an item ahead
    say(*() if rank else ("only here",))
    say("zero" if rank else "one")
    say("same")
    return found


def test_the_ranks_agree_on_how_far_all_are_and_on_what_is_the_same() -> None:
    expected = [Agreed(2, 2, 1e6), Agreed(3, 3, 1e6), Agreed(4, 3, 1e6), Agreed(5, 3, 1e6)]
    assert run_ranks(2, compare, transport="local") == [expected, expected]


def run_ahead(rank: int) -> Agreed:
    agreement = Agreement(pycomm.get_group())
    submitted = 200 if rank else 3
    for item in range(submitted):
        agreement.add(item)
    agreement.fill(submitted, 5.0)
    return agreement.run()


def test_what_a_rank_far_ahead_has_forgotten_counts_as_not_compared() -> None:
    assert run_ranks(2, run_ahead, transport="local") == [Agreed(3, 0, 5.0)] * 2
