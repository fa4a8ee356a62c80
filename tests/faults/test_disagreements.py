"""Ranks that do not call the same thing, on every transport: every rank sees both sides, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm
from harness import check_sum, run_ranks, transport_params
from pycomm import CollectiveMismatchError, ReduceOp

everywhere = pytest.mark.parametrize("transport", transport_params())
LARGE = 70_000
MIDDLE = 20_000  # fits a frame of gloo, and no other

# What rank 1 of three calls, what the others call, and what all of them must read.
Calls = tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str, str]


def splits(t: torch.Tensor, sent: list[int]) -> None:
    pycomm.all_to_all_single(torch.empty(6), torch.ones(sum(sent)), [2, 2, 2], sent)


def gather(numel: int) -> None:
    output = torch.full((3 * numel,), -1.0)
    try:
        pycomm.all_gather_single(output, torch.ones(numel))
    finally:
        assert (output == -1).all(), "the output was written"


CASES: dict[str, Calls] = {
    "numel": (
        lambda t: pycomm.all_reduce(t[:3]),
        lambda t: pycomm.all_reduce(t),
        "rank 1: all_reduce(SUM, float32, 3 elements)",
        "rank 2: all_reduce(SUM, float32, 6 elements)",
    ),
    "small and large": (
        lambda t: pycomm.all_reduce(torch.ones(LARGE)),
        lambda t: pycomm.all_reduce(t),
        f"rank 1: all_reduce(SUM, float32, {LARGE} elements)",
        "rank 0: all_reduce(SUM, float32, 6 elements)",
    ),
    "empty and not": (
        lambda t: pycomm.all_reduce(t[:0]),
        lambda t: pycomm.all_reduce(t),
        "rank 1: all_reduce(SUM, float32, 0 elements)",
        "rank 0: all_reduce(SUM, float32, 6 elements)",
    ),
    "large": (
        lambda t: pycomm.all_reduce(torch.ones(LARGE + 1)),
        lambda t: pycomm.all_reduce(torch.ones(LARGE)),
        f"rank 1: all_reduce(SUM, float32, {LARGE + 1} elements)",
        f"rank 2: all_reduce(SUM, float32, {LARGE} elements)",
    ),
    "what gloo sends with the comparison, and not": (
        lambda t: pycomm.all_reduce(torch.ones(MIDDLE)),
        lambda t: pycomm.all_reduce(t if pycomm.rank() else torch.ones(LARGE)),
        f"rank 1: all_reduce(SUM, float32, {MIDDLE} elements)",
        f"rank 0: all_reduce(SUM, float32, {LARGE} elements)",
    ),
    "dtype": (
        lambda t: pycomm.all_reduce(t.view(torch.int32)),
        lambda t: pycomm.all_reduce(t),
        "rank 1: all_reduce(SUM, int32, 6 elements)",
        "rank 0: all_reduce(SUM, float32, 6 elements)",
    ),
    "a dtype that needs a plan": (
        lambda t: pycomm.all_reduce(torch.ones(LARGE, dtype=torch.bfloat16)),
        lambda t: pycomm.all_reduce(torch.ones(LARGE)),
        f"rank 1: all_reduce(SUM, bfloat16, {LARGE} elements)",
        f"rank 0: all_reduce(SUM, float32, {LARGE} elements)",
    ),
    "operator": (
        lambda t: pycomm.all_reduce(t, ReduceOp.PRODUCT),
        lambda t: pycomm.all_reduce(t),
        "rank 1: all_reduce(PRODUCT, float32, 6 elements)",
        "rank 0: all_reduce(SUM, float32, 6 elements)",
    ),
    "verb": (
        lambda t: pycomm.broadcast(t, 0),
        lambda t: pycomm.all_reduce(t),
        "rank 1: broadcast(float32, 6 elements, root 0)",
        "rank 0: all_reduce(SUM, float32, 6 elements)",
    ),
    "root": (
        lambda t: pycomm.broadcast(t, 1),
        lambda t: pycomm.broadcast(t, 2),
        "rank 1: broadcast(float32, 6 elements, root 1)",
        "rank 0: broadcast(float32, 6 elements, root 2)",
    ),
    "root of a large reduce": (
        lambda t: pycomm.reduce(torch.ones(LARGE), 1),
        lambda t: pycomm.reduce(torch.ones(LARGE), 0),
        f"rank 1: reduce(SUM, float32, {LARGE} elements, root 1)",
        f"rank 2: reduce(SUM, float32, {LARGE} elements, root 0)",
    ),
    "order": (
        lambda t: pycomm.barrier(),
        lambda t: pycomm.all_gather_single(torch.empty(18), t),
        "rank 1: barrier()",
        "rank 0: all_gather_single(float32, 6 elements)",
    ),
    "a large all_gather": (
        lambda t: gather(LARGE + 1),
        lambda t: gather(LARGE),
        f"rank 1: all_gather_single(float32, {LARGE + 1} elements)",
        f"rank 0: all_gather_single(float32, {LARGE} elements)",
    ),
    "splits": (
        lambda t: splits(t, [1, 2, 2]),
        lambda t: splits(t, [2, 2, 2]),
        "rank 1 sends 1 elements to rank 0",
        "rank 0 expects 2 from rank 1",
    ),
    "a plan": (
        lambda t: pycomm.all_reduce(t, algorithm="direct"),
        lambda t: (
            pycomm.all_reduce(t, algorithm="direct") if pycomm.rank() else pycomm.all_reduce(t[1:], algorithm="direct")
        ),
        "rank 0: all_reduce(SUM, float32, 5 elements)",
        "rank 1: all_reduce(SUM, float32, 6 elements)",
    ),
    "members of a new group": (
        lambda t: pycomm.new_group([0, 1]),
        lambda t: pycomm.new_group([0, 1, 2]),
        "rank 1: new_group([0, 1])",
        "rank 0: new_group([0, 1, 2])",
    ),
    "a new group and a collective": (
        lambda t: pycomm.new_group([0, 1]),
        lambda t: pycomm.all_reduce(t),
        "rank 1: new_group(",
        "rank 2: all_reduce(SUM, float32, 6 elements)",
    ),
}


def disagree(rank: int) -> None:
    for name, (odd, even, *expected) in CASES.items():
        t = torch.full((6,), float(rank + 1))
        pycomm.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            (odd if rank == 1 else even)(t)
        text = str(caught.value)
        for part in expected:
            assert part in text, (name, text)
        assert f"on group 'world', rank {rank} of 3" in text, (name, text)
        assert (t == rank + 1).all(), f"{name}: the buffer was written"
        check_sums()  # and the group goes on


def disagree_in_a_part(rank: int) -> None:
    """The numbers are the part's there, and the job's beside them."""
    part = pycomm.new_group([1, 2])
    if rank > 0:
        place = f"rank {rank - 1} of 2 (global rank {rank})"
        ones = torch.ones(4)
        splits = [1, 3] if rank == 1 else [2, 2]
        received = torch.full((2 + rank,), 7.0)

        def swap_messages() -> None:
            works = [pycomm.irecv(received, 3 - rank, group=part), pycomm.isend(ones, 3 - rank, group=part)]
            for work in works:
                work.wait()

        for call, expected in (
            (lambda: pycomm.all_reduce(ones[: 1 + rank], group=part), ["rank 1 (global rank 2): all_reduce(SUM, flo"]),
            (
                lambda: pycomm.all_to_all_single(torch.empty(4), ones, splits, splits, group=part),
                ["rank 0 (global rank 1) sends 3 elements to rank 1 (global rank 2), and rank 1 expects 2 from rank 0"],
            ),
            *([(swap_messages, ["message from rank 1 (global rank 2) with tag 0"])] if rank == 1 else ()),
        ):
            with pytest.raises(CollectiveMismatchError) as caught:
                call()
            for part_of_text in (place, *expected):
                assert part_of_text in str(caught.value)
        if rank == 2:
            swap_messages()
        assert repr(part) == f"Group({part.name!r}, {place}, transport {part.transport.name!r})"
        check_sums(part)


@everywhere
def test_errors_in_a_part_of_the_ranks_name_those_by_their_numbers_in_the_job_too(transport: str) -> None:
    run_ranks(3, disagree_in_a_part, transport=transport)


def check_sums(group: Any = None) -> None:
    for numel in (5, LARGE):
        check_sum(group, numel)


@everywhere
def test_ranks_that_disagree_see_all_sides_and_keep_their_buffers(transport: str) -> None:
    run_ranks(3, disagree, transport=transport)


def compress(numel: int = LARGE) -> torch.Tensor:
    t = torch.ones(numel)
    pycomm.all_reduce(t, compression="int8")
    return t


def disagree_at_what_is_counted(rank: int) -> None:
    """New groups and compressed calls are counted: a disagreement must not leave one rank a number ahead."""
    old = pycomm.new_group([0, 1])
    compress()
    for counter in range(2):
        for counted in (lambda: pycomm.new_group([0, 1]), compress):
            with pytest.raises(CollectiveMismatchError):
                counted() if rank == counter else pycomm.barrier()
        check_sums(pycomm.new_group([0, 1]))
        assert (compress() == 2).all()
        check_sums(old)


@pytest.mark.parametrize("transport", [param for param in transport_params() if param.values[0] != "mixed"])
def test_new_groups_and_compressed_calls_go_on_after_a_disagreement(transport: str) -> None:
    run_ranks(2, disagree_at_what_is_counted, transport=transport)


def differ_in_algorithm(rank: int) -> None:
    with pytest.raises(CollectiveMismatchError, match="algorithm direct"):
        pycomm.all_reduce(torch.ones(4), algorithm="direct" if rank == 1 else None)
    check_sums()


@pytest.mark.parametrize("transport", ["torch"])
def test_the_algorithm_is_shown_where_it_is_all_that_differs(transport: str) -> None:
    run_ranks(2, differ_in_algorithm, transport=transport)


def disagree_asynchronously(rank: int) -> None:
    t = torch.ones(4)
    works = [pycomm.all_reduce(t[: 3 + rank], async_op=True), pycomm.all_reduce(torch.ones(9), async_op=True)]
    with pytest.raises(CollectiveMismatchError, match="3 elements"):
        works[0].wait()
    works[1].wait()
    assert (t == 1).all()


@everywhere
def test_asynchronous_calls_compare_too(transport: str) -> None:
    run_ranks(2, disagree_asynchronously, transport=transport)


def groups_without_a_common_rank(rank: int) -> None:
    """Not a disagreement: ranks may make several groups at once, name one they are not in, or join none."""
    group = pycomm.new_group([0, 1] if rank < 2 else [2, 3])
    t = torch.ones(3)
    pycomm.all_reduce(t, group=group)
    assert (t == 2).all()
    outside = pycomm.new_group([1, 3])
    assert bool(outside) == (rank % 2 == 1)
    half = pycomm.split(None if rank == 0 else rank % 2)
    assert bool(half) == (rank != 0)


@everywhere
def test_several_groups_at_once_are_no_disagreement(transport: str) -> None:
    run_ranks(4, groups_without_a_common_rank, transport=transport)
