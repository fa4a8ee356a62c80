"""Plans as data: proven by running all ranks of a plan on symbols instead of numbers."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from pycomm.algorithms import direct
from pycomm.algorithms.plan import Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space
from pycomm.errors import PlanError
from pycomm.types import VERBS

WORLDS = (1, 2, 3, 4, 5, 8, 17, 64)
ROOTED = ("reduce", "broadcast", "gather", "scatter")


def run(verb: str, world_size: int, root: int) -> tuple[list[dict[Chunk, object]], list[int], int]:
    """Runs every rank's plan in lockstep. A chunk's value says whose input it is, or which were reduced in which order.

    Returns each rank's memory, the number of chunks it sent, and the number of rounds.
    """
    plans = [direct.plan(verb, rank, world_size, root) for rank in range(world_size)]
    rounds = len(plans[0].rounds)
    assert all(len(plan.rounds) == rounds for plan in plans)
    memory: list[dict[Chunk, object]] = [
        {Chunk(Space.INPUT, index): (rank, index) for index in range(plan.input_chunks)}
        for rank, plan in enumerate(plans)
    ]
    sent = [0] * world_size
    for number in range(rounds):
        wires: dict[tuple[int, int], list[object]] = defaultdict(list)
        for rank, plan in enumerate(plans):
            for transfer in plan.rounds[number].transfers:
                if isinstance(transfer, Send):
                    wires[rank, transfer.peer].append(memory[rank][transfer.chunk])
                    sent[rank] += 1
        for rank, plan in enumerate(plans):
            for transfer in plan.rounds[number].transfers:
                if isinstance(transfer, Recv):
                    memory[rank][transfer.chunk] = wires[transfer.peer, rank].pop(0)  # nothing there: IndexError
        assert not any(wires.values()), "a message that nobody receives"
        for rank, plan in enumerate(plans):
            for action in plan.rounds[number].local:
                if isinstance(action, Reduce):
                    memory[rank][action.output] = tuple(memory[rank][chunk] for chunk in action.inputs)
                else:
                    memory[rank][action.output] = memory[rank][action.input]
    return memory, sent, rounds


def outputs(memory: dict[Chunk, object], plan: Plan) -> list[object]:
    return [memory.get(Chunk(Space.OUTPUT, index)) for index in range(plan.output_chunks)]


def expected(verb: str, rank: int, n: int, root: int) -> list[object]:
    """What the output chunks of ``rank`` must hold: inputs by (rank, chunk), reductions in rank order."""
    ranks = range(n)
    match verb:
        case "all_reduce":
            return [tuple((r, chunk) for r in ranks) for chunk in ranks]
        case "reduce":
            return [tuple((r, 0) for r in ranks)] if rank == root else []
        case "reduce_scatter_single":
            return [tuple((r, rank) for r in ranks)]
        case "broadcast":
            return [(root, 0)] if rank != root else []
        case "all_gather_single":
            return [(r, 0) for r in ranks]
        case "all_to_all_single":
            return [(r, rank) for r in ranks]
        case "gather":
            return [(r, 0) for r in ranks] if rank == root else []
        case "scatter":
            return [(root, rank)]
        case _:
            return [None if r == rank else (r, 0) for r in ranks]  # barrier: heard from everybody


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("n", WORLDS)
def test_direct_is_right(verb: str, n: int) -> None:
    for root in {0, n // 2, n - 1} if verb in ROOTED else {0}:
        memory, _, _ = run(verb, n, root)
        for rank in range(n):
            assert outputs(memory[rank], direct.plan(verb, rank, n, root)) == expected(verb, rank, n, root)


@pytest.mark.parametrize("n", WORLDS)
def test_direct_costs_what_it_says(n: int) -> None:
    """Rounds, and chunks sent per rank; a chunk is S / (number of chunks) bytes, as the table of direct.py has it."""
    for verb, rounds, of_root, of_others in (
        ("all_reduce", 2, 2 * (n - 1), 2 * (n - 1)),  # chunks of S/n
        ("reduce", 1, 0, 1),  # of S
        ("reduce_scatter_single", 1, n - 1, n - 1),  # of S/n
        ("broadcast", 1, n - 1, 0),  # of S
        ("all_gather_single", 1, n - 1, n - 1),  # of S/n
        ("all_to_all_single", 1, n - 1, n - 1),
        ("gather", 1, 0, 1),  # of S/n
        ("scatter", 1, n - 1, 0),  # of S/n
        ("barrier", 1, n - 1, n - 1),  # of a byte
    ):
        _, sent, ran = run(verb, n, root=0)
        assert (ran, sent[0], set(sent[1:])) == (rounds, of_root, {of_others} if n > 1 else set()), verb


def test_plans_need_no_torch() -> None:
    code = "import sys, pycomm.algorithms.direct as d; d.plan('all_reduce', 0, 4); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plan_is_pure_and_hashable() -> None:
    plan = direct.plan("all_reduce", 1, 3)
    assert plan == direct.plan("all_reduce", 1, 3) and hash(plan) == hash(direct.plan("all_reduce", 1, 3))


@pytest.mark.parametrize(
    ("verb", "rank", "n", "root"),
    [("all_redcue", 0, 2, 0), ("all_reduce", 2, 2, 0), ("reduce", 0, 2, 2), ("reduce", -1, 2, 0)],
)
def test_what_has_no_plan(verb: str, rank: int, n: int, root: int) -> None:
    with pytest.raises(PlanError, match="direct"):
        direct.plan(verb, rank, n, root)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (Send(0, Chunk(Space.INPUT, 0)), "other than 0"),
        (Recv(2, Chunk(Space.OUTPUT, 0)), "peer in 0..1"),
        (Send(1, Chunk(Space.INPUT, 1)), "chunk below 1"),
        (Copy(Chunk(Space.OUTPUT, 2), Chunk(Space.INPUT, 0)), "chunk below 2"),
        (Reduce(Chunk(Space.OUTPUT, 0), (Chunk(Space.INPUT, 0),)), "one input a rank"),
    ],
)
def test_a_wrong_plan_cannot_be_made(action: object, problem: str) -> None:
    is_transfer = isinstance(action, (Send, Recv))
    round_ = Round((action,), ()) if is_transfer else Round((), (action,))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=problem):
        Plan(verb="x", rank=0, world_size=2, input_chunks=1, output_chunks=2, rounds=(round_,))


def test_lanes() -> None:
    assert direct.plan("all_reduce", 1, 4).lanes() == {1: 3}
    assert direct.plan("reduce", 2, 4, root=2).lanes() == {0: 3}
    assert direct.plan("broadcast", 0, 4).lanes() == {}
