"""Every registered plan is proven for every world; and a plan with a planted mistake is caught, with rank and round."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from fractions import Fraction

import pytest

from pycomm.algorithms import ALGORITHMS, Algorithm, find_algorithm
from pycomm.algorithms.plan import Chunk, Copy, Plan, Recv, Reduce, Round, Send, Space
from pycomm.algorithms.simulator import Counts, declared, plans_of, prove, simulate
from pycomm.errors import PlanError
from pycomm.topology import Topology

ROOTED = ("reduce", "broadcast", "gather", "scatter")
COMPOSED = (
    "hierarchical(ring,halving_doubling)",
    "hierarchical(halving_doubling,double_binary_tree)",
    "hierarchical(direct,recursive_doubling)",
    "hierarchical(tree,double_binary_tree)",
)
LAYOUTS = (
    Topology.of_sizes((3, 5, 1)),
    Topology.of_sizes((1, 1, 1, 1)),
    Topology.of_sizes((6, 4, 3, 2)),
    Topology.of_sizes((8, 8, 8)),
    Topology(((0, 2, 4), (1, 3, 5))),
    Topology(((0, 5), (1, 2, 4), (3,))),
    Topology.of_sizes((2,) * 6, hosts_per_rack=2),
)


@pytest.fixture(autouse=True)
def few_collections() -> Iterator[None]:
    gc.disable()  # a plan is many small objects, none of which is garbage for long
    yield
    gc.enable()


def roots(verb: str, n: int) -> list[int]:
    return sorted({0, n // 2, n - 1}) if verb in ROOTED else [0]


def hosts_of_four(n: int) -> Topology:
    return Topology.of_sizes([4] * (n // 4) + [n % 4] * (n % 4 > 0))


def cases(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, verb) for name in names for verb in find_algorithm(name).verbs]


@pytest.mark.parametrize(("name", "verb"), cases(ALGORITHMS.names()))
def test_every_plan_in_every_world(name: str, verb: str) -> None:
    """1 to 64 ranks on hosts of four, the last of which holds the rest.

    From 17 ranks on, where a plan repeats what it did before, with one root, and in place or not by turns.
    """
    algorithm = find_algorithm(name)
    for n in range(1, 65):
        topology = hosts_of_four(n)
        if not algorithm.supports(verb, topology):
            topology = Topology.flat(n)
        if n <= 16:
            for root in roots(verb, n):
                check(algorithm, verb, topology, root)
        else:
            of_three = roots(verb, n)
            root = of_three[n % len(of_three)]
            plans = plans_of(algorithm, verb, topology, root)
            check_counts(simulate(plans, root, is_in_place=n // 2 % 2 == 0).counts, algorithm, verb, topology, root)


def check(algorithm: Algorithm, verb: str, topology: Topology, root: int) -> None:
    check_counts(prove(algorithm, verb, topology, root).counts, algorithm, verb, topology, root)


def check_counts(counts: Counts, algorithm: Algorithm, verb: str, topology: Topology, root: int) -> None:
    if topology.world_size == 1:
        assert counts == Counts(0, Fraction(0))
    elif len(set(map(len, topology.hosts))) == 1 or algorithm.name != "hierarchical":
        where = f"{algorithm.name} {verb}, {topology.world_size} ranks, root {root}"
        assert counts == declared(algorithm.name, verb, topology), where


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda topology: str(topology.hosts))
def test_every_plan_on_uneven_hosts(topology: Topology) -> None:
    for name in ALGORITHMS.names():
        algorithm = find_algorithm(name)
        for verb in algorithm.verbs:
            if algorithm.supports(verb, topology):
                for root in roots(verb, topology.world_size):
                    check(algorithm, verb, topology, root)


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda topology: str(topology.hosts))
@pytest.mark.parametrize("name", COMPOSED)
def test_two_algorithms_in_one(name: str, topology: Topology) -> None:
    """Rounds are those of the parts, one after the other."""
    algorithm = find_algorithm(name)
    assert algorithm.verbs
    inner, outer = (find_algorithm(part) for part in name[:-1].partition("(")[2].split(","))
    mates, hosts = Topology.flat(max(map(len, topology.hosts))), Topology.flat(len(topology.hosts))
    phases = {
        "all_reduce": ("reduce_scatter_single", "all_gather_single"),
    }
    for verb in algorithm.verbs:
        if not algorithm.supports(verb, topology):
            assert len(set(map(len, topology.hosts))) > 1
            continue
        for root in roots(verb, topology.world_size):
            proof = prove(algorithm, verb, topology, root)
            inside = sum(prove(inner, phase, mates).rounds for phase in phases.get(verb, (verb,)))
            assert proof.rounds == inside + prove(outer, verb, hosts).rounds


def test_no_rank_stands_idle_while_hosts_talk() -> None:
    """Hosts of 2 and 3: every rank sends its own part of what crosses."""
    topology = Topology.of_sizes((2, 3))
    for rank, plan in enumerate(plans_of(find_algorithm("hierarchical"), "all_reduce", topology)):
        across = sum(
            action.chunk.span
            for action in plan.actions()
            if isinstance(action, Send) and topology.host_of(action.peer) != topology.host_of(rank)
        )
        share = len(topology.hosts[topology.host_of(rank)])
        assert Fraction(across, plan.input_chunks) == Fraction(1, share)  # 2 (m-1)/m = 1 for two hosts


def test_sums_are_worded() -> None:
    ring = prove(find_algorithm("ring"), "all_reduce", Topology.flat(3))
    assert ring.sums == ("(x1 + x2) + x0", "(x2 + x0) + x1", "(x0 + x1) + x2")
    assert prove(find_algorithm("direct"), "all_reduce", Topology.flat(3)).sums == ("x0 + x1 + x2",) * 3
    doubled = prove(find_algorithm("recursive_doubling"), "all_reduce", Topology.flat(4))
    assert doubled.sums == ("(x0 + x1) + (x2 + x3)",)
    assert ring.messages == (4, 4, 4)


# -- planted mistakes --------------------------------------------------------------------------------------------------


def ring_of_four(verb: str = "all_reduce") -> list[Plan]:
    return plans_of(find_algorithm("ring"), verb, Topology.flat(4))


def altered(plans: list[Plan], rank: int, number: int, **changes: object) -> list[Plan]:
    """The plans, with round ``number`` of ``rank`` changed."""
    rounds = list(plans[rank].rounds)
    rounds[number] = rounds[number]._replace(**changes)  # type: ignore[arg-type]
    return [*plans[:rank], with_rounds(plans[rank], rounds), *plans[rank + 1 :]]


def with_rounds(plan: Plan, rounds: list[Round]) -> Plan:
    return Plan(
        verb=plan.verb,
        rank=plan.rank,
        world_size=plan.world_size,
        input_chunks=plan.input_chunks,
        output_chunks=plan.output_chunks,
        rounds=tuple(rounds),
    )


def test_a_wrong_chunk_is_found() -> None:
    plans = ring_of_four()
    recv, send = plans[2].rounds[1].transfers
    wrong = send._replace(chunk=Chunk(Space.INPUT, 3))
    with pytest.raises(PlanError, match="rank 2, round 1: sends .*first=3.*to rank 3, which takes it for .*other size"):
        simulate(altered(plans, 2, 1, transfers=(recv, wrong)))


def test_a_wrong_chunk_of_the_right_size_is_found() -> None:
    plans = ring_of_four("all_gather_single")
    recv, send = plans[2].rounds[1].transfers
    wrong = send._replace(chunk=Chunk(Space.OUTPUT, 2))
    with pytest.raises(
        PlanError, match="rank 3, round 1: output chunk 1: expected x1 of chunk 0, got x2 .*from rank 2"
    ):
        simulate(altered(plans, 2, 1, transfers=(recv, wrong)))


def test_a_contribution_that_comes_twice_is_found() -> None:
    plans = ring_of_four()
    add = plans[1].rounds[0].local[0]
    assert isinstance(add, Reduce)
    twice = Reduce(add.output, (*add.inputs, add.inputs[1]))
    with pytest.raises(PlanError, match=r"rank 1, round 0: adds a contribution twice: x0 \+ x1 \+ x1"):
        simulate(altered(plans, 1, 0, local=(twice,)))


def test_a_missing_contribution_is_found() -> None:
    plans = ring_of_four("reduce_scatter_single")
    add = plans[1].rounds[2].local[0]
    assert isinstance(add, Reduce)
    with pytest.raises(PlanError, match=r"rank 1, round 2: output chunk 0: expected the sum of chunk 1 of all ranks"):
        simulate(altered(plans, 1, 2, local=(Copy(add.output, add.inputs[0]),)))


def test_a_lost_message_is_found() -> None:
    plans = ring_of_four()
    recv, _ = plans[3].rounds[5].transfers
    with pytest.raises(PlanError, match="rank 0, round 5: waits for a message from rank 3, which is through its plan"):
        simulate(altered(plans, 3, 5, transfers=(recv,)))


def test_a_message_that_nobody_takes_is_found() -> None:
    plans = ring_of_four()
    _, send = plans[0].rounds[5].transfers
    with pytest.raises(PlanError, match="rank 3, round 5: waits for rank 0 to receive, which is through its plan"):
        simulate(altered(plans, 0, 5, transfers=(send,)))


def test_a_deadlock_is_found() -> None:
    """All receive first and send in the round after it: everybody waits for everybody."""
    plans = ring_of_four("all_gather_single")
    late = []
    for plan in plans:
        (recv, send), local = plan.rounds[0]
        late.append(with_rounds(plan, [Round((recv,), local), Round((send,)), *plan.rounds[1:]]))
    with pytest.raises(
        PlanError, match="a deadlock: rank 0, round 0: waits for a message from rank 3, .* in round 0; "
    ):
        simulate(late)


def test_rounds_that_do_not_meet_are_found() -> None:
    plans = ring_of_four("broadcast")
    later = [plans[0], *(with_rounds(plan, [Round(), *plan.rounds]) for plan in plans[1:])]
    with pytest.raises(PlanError, match="rank 0, round 0: sends .* to rank 1, which receives it in round 1"):
        simulate(later)


def test_memory_that_is_touched_too_early_is_found() -> None:
    plans = ring_of_four("all_gather_single")
    (recv, send), local = plans[1].rounds[1]
    early = send._replace(chunk=recv.chunk)
    with pytest.raises(PlanError, match="rank 1, round 1: sends .* nothing yet"):
        simulate(altered(plans, 1, 1, transfers=(recv, early)))
    (first, _), _ = plans[1].rounds[0]
    racing = first._replace(chunk=Chunk(Space.INPUT, 0))
    with pytest.raises(PlanError, match="rank 1, round 0: sends .* while a message comes into it"):
        simulate(altered(plans, 1, 0, transfers=(racing, plans[1].rounds[0].transfers[1])))


def test_another_order_of_addition_is_found() -> None:
    plans = plans_of(find_algorithm("recursive_doubling"), "all_reduce", Topology.flat(4))
    add = plans[2].rounds[1].local[0]
    assert isinstance(add, Reduce)
    with pytest.raises(PlanError, match=r"rank 2, round 1: .*another order: \(x2 \+ x3\) \+ \(x0 \+ x1\), rank 0"):
        simulate(altered(plans, 2, 1, local=(Reduce(add.output, add.inputs[::-1]),)))


def test_a_plan_that_spoils_its_input_is_found() -> None:
    """Out of place it is right; in place, output chunk 0 is input chunk 0, which is sent a round later."""
    both = [Chunk(Space.INPUT, 0), Chunk(Space.OUTPUT, 0)]
    plans = []
    for rank in (0, 1):
        peer, coming = 1 - rank, Chunk(Space.SCRATCH, 0)
        early = Round((), (Copy(both[1], both[0]),))
        operands = (both[0], coming) if rank == 0 else (coming, both[0])
        swap = Round((Recv(peer, coming), Send(peer, both[0])), (Reduce(both[1], operands),))
        again = Round((Recv(peer, coming), Send(peer, both[0])), (Reduce(both[1], operands),))
        rounds = (early, swap, again)
        plans.append(Plan(verb="all_reduce", rank=rank, world_size=2, input_chunks=1, output_chunks=1, rounds=rounds))
    simulate(plans)
    with pytest.raises(PlanError, match="round [12]: adds a contribution twice"):
        simulate(plans, is_in_place=True)


def test_plans_that_do_not_belong_together() -> None:
    plans = ring_of_four()
    with pytest.raises(PlanError, match="rank 1 has the plan of all_reduce of rank 0 of 4"):
        simulate([plans[0], plans[0], plans[2], plans[3]])
