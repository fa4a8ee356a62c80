"""Plans as data: what a wrong one is refused for, and what all algorithms have in common."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pycomm.algorithms import ALGORITHMS, find_algorithm
from pycomm.algorithms.plan import Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space
from pycomm.errors import ConfigError, PlanError
from pycomm.topology import Topology
from pycomm.types import VERBS

DIRECT = find_algorithm("direct")


def test_plans_need_no_torch() -> None:
    code = (
        "import sys; from pycomm.algorithms import ALGORITHMS, find_algorithm, cost, simulator; "
        "from pycomm.topology import Topology; "
        "[find_algorithm(name).plan('all_reduce', 0, Topology.of_sizes((2, 2))) for name in ALGORITHMS.names()]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_the_reference_has_every_verb() -> None:
    assert DIRECT.verbs == VERBS


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_a_plan_is_pure_and_hashable(name: str) -> None:
    algorithm = find_algorithm(name)
    plan = algorithm.plan("all_reduce", 1, Topology.of_sizes((2, 1)))
    again = algorithm.build("all_reduce", 1, Topology.of_sizes((2, 1)), 0)
    assert plan == again and hash(plan) == hash(again) and plan is not again
    assert algorithm.plan("all_reduce", 1, Topology.of_sizes((2, 1))) is plan  # kept for the next call


@pytest.mark.parametrize(
    ("verb", "rank", "n", "root"),
    [("all_redcue", 0, 2, 0), ("all_reduce", 2, 2, 0), ("reduce", 0, 2, 2), ("reduce", -1, 2, 0)],
)
def test_what_has_no_plan(verb: str, rank: int, n: int, root: int) -> None:
    with pytest.raises(PlanError, match="direct"):
        DIRECT.plan(verb, rank, Topology.flat(n), root)


def test_a_world_that_does_not_suit() -> None:
    uneven = Topology.of_sizes((3, 1))
    hierarchical = find_algorithm("hierarchical")
    assert hierarchical.supports("all_reduce", uneven) and not hierarchical.supports("all_gather_single", uneven)
    with pytest.raises(PlanError, match=r"hierarchical has no plan of all_gather_single for 4 ranks on hosts of 3, 1;"):
        hierarchical.plan("all_gather_single", 0, uneven)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rnig", r"unknown algorithm 'rnig'; known: direct, double_binary_tree,"),
        ("", "unknown algorithm ''; known: direct"),
        ("ring(", "unknown algorithm 'ring\\('"),
        ("ring(tree)", "ring is not made of parts"),
        ("hierarchical(ring)", "expected two parts"),
        ("hierarchical(ring,rnig)", "unknown algorithm 'rnig'"),
        ("hierarchical(tree,recursive_doubling)", "no collective that can be made of both"),
    ],
)
def test_names_that_mean_nothing(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_algorithm(name)


def test_names_with_parts() -> None:
    composed = find_algorithm("hierarchical(tree, double_binary_tree)")
    assert composed.name == "hierarchical(tree,double_binary_tree)"
    assert composed.verbs == ("broadcast", "reduce")  # a tree cannot reduce-scatter inside a host
    assert find_algorithm("hierarchical(direct,ring)").plan(
        "all_reduce", 0, Topology.of_sizes((2, 2))
    ) == find_algorithm("hierarchical").plan("all_reduce", 0, Topology.of_sizes((2, 2)))


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (Send(0, Chunk(Space.INPUT, 0)), "other than 0"),
        (Recv(2, Chunk(Space.OUTPUT, 0)), "peer in 0..1"),
        (Send(1, Chunk(Space.INPUT, 1)), "chunk below 1"),
        (Send(1, Chunk(Space.OUTPUT, 1, 0, 2)), "chunk below 2"),
        (Copy(Chunk(Space.OUTPUT, 2), Chunk(Space.INPUT, 0)), "chunk below 2"),
        (Copy(Chunk(Space.OUTPUT, 0, 0, 2), Chunk(Space.INPUT, 0)), "pieces of one span"),
        (Reduce(Chunk(Space.OUTPUT, 0), (Chunk(Space.INPUT, 0),)), "two inputs or more"),
    ],
)
def test_a_wrong_plan_cannot_be_made(action: object, problem: str) -> None:
    is_transfer = isinstance(action, (Send, Recv))
    round_ = Round((action,), ()) if is_transfer else Round((), (action,))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=problem):
        Plan(verb="x", rank=0, world_size=2, input_chunks=1, output_chunks=2, rounds=(round_,))


def test_lanes() -> None:
    assert DIRECT.plan("all_reduce", 1, Topology.flat(4)).lanes() == {0: (1, 2), 1: (1, 2), 2: (1, 2)}
    assert DIRECT.plan("reduce", 2, Topology.flat(4), root=2).lanes() == {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    assert DIRECT.plan("broadcast", 0, Topology.flat(4)).lanes() == {}
    halves = find_algorithm("halving_doubling").plan("all_reduce", 3, Topology.flat(4))
    assert halves.lanes() == {0: (2, 4), 1: (2, 4)}


def test_topology() -> None:
    topology = Topology.of_hosts(["b", "a", "b", "c"])
    assert topology.hosts == ((0, 2), (1,), (3,)) and topology.racks == ((0, 1, 2),)
    assert topology.world_size == 4 and topology.host_of(2) == 0 and topology.local_rank_of(2) == 1
    racks = Topology.of_sizes((2, 3, 1), hosts_per_rack=2)
    assert racks.hosts == ((0, 1), (2, 3, 4), (5,)) and racks.racks == ((0, 1), (2,)) and racks.rack_of(2) == 1
    assert Topology.flat(3) == Topology.of_sizes((3,)) and hash(Topology.flat(3)) == hash(Topology.of_sizes((3,)))


@pytest.mark.parametrize(
    ("hosts", "racks"), [((), ()), (((0, 2),), ()), (((0,), ()), ()), (((0, 1), (1,)), ()), (((0,), (1,)), ((0,),))]
)
def test_a_topology_that_cannot_be(hosts: tuple[tuple[int, ...], ...], racks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="topology: expected"):
        Topology(hosts, racks)
