"""The cost model: closed forms where there are any, and large worlds held to what counting all ranks gives."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest

from pycomm.algorithms import ALGORITHMS, cost, find_algorithm
from pycomm.algorithms.cost import IN_FLIGHT, Level, LinkModel, predict, profile, seconds
from pycomm.algorithms.simulator import declared
from pycomm.algorithms.tuned import predict_call
from pycomm.cli.tune.fit import Measured, error_of, fit
from pycomm.errors import PlanError
from pycomm.topology import Topology

ALPHA, BETA = 5e-6, 3e9
NETWORK = Level(latency_s=ALPHA, bytes_per_s=BETA, shared_bytes_per_s=BETA)
FREE = Level(latency_s=0.0, bytes_per_s=math.inf)
ONE_RANK_A_HOST = LinkModel(host=FREE, rack=NETWORK, far=NETWORK)
MIB = 2**20


def hosts(*sizes: int) -> Topology:
    return Topology.of_sizes(sizes)


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_a_ring_takes_what_the_textbook_says(n: int) -> None:
    ring = find_algorithm("ring")
    got = predict(ring, "all_reduce", hosts(*[1] * n), ONE_RANK_A_HOST, 16 * MIB)
    assert got == pytest.approx(2 * (n - 1) * (ALPHA + 16 * MIB / n / BETA))
    rounds = declared("ring", "all_reduce", Topology.flat(n))
    assert rounds is not None and profile(ring, "all_reduce", hosts(*[1] * n)).rounds == rounds.rounds


@pytest.mark.parametrize("n", [2, 4, 16])
def test_butterflies(n: int) -> None:
    log2 = n.bit_length() - 1
    args = "all_reduce", hosts(*[1] * n), ONE_RANK_A_HOST, 4 * MIB
    doubling, halving = (predict(find_algorithm(name), *args) for name in ("recursive_doubling", "halving_doubling"))
    assert doubling == pytest.approx(log2 * (ALPHA + 4 * MIB / BETA))
    assert halving == pytest.approx(2 * log2 * ALPHA + 2 * (n - 1) / n * 4 * MIB / BETA)


def test_the_ranks_of_a_host_share_its_link() -> None:
    """Two hosts of four: of a flat ring's 2 (n-1)/n S, all crosses; of hierarchical's only 2 (m-1)/m S."""
    topology, nbytes = hosts(4, 4), 64 * MIB
    wire_s = nbytes / BETA
    flat = predict(find_algorithm("ring"), "all_reduce", topology, ONE_RANK_A_HOST, nbytes)
    assert flat == pytest.approx(14 * ALPHA + 2 * 7 / 8 * wire_s)
    crossing = predict(find_algorithm("hierarchical"), "all_reduce", topology, ONE_RANK_A_HOST, nbytes)
    assert crossing == pytest.approx(2 * ALPHA + wire_s)
    direct = predict(find_algorithm("direct"), "all_reduce", topology, ONE_RANK_A_HOST, nbytes)
    assert direct == pytest.approx(2 * (ALPHA + 4 * 4 / 8 * wire_s))


def test_an_uplink_that_racks_share() -> None:
    uplink = Level(latency_s=ALPHA, bytes_per_s=BETA, shared_bytes_per_s=BETA / 2)
    model = LinkModel(host=FREE, rack=NETWORK, far=uplink)
    topology = Topology.of_sizes((1,) * 8, hosts_per_rack=4)
    got = predict(find_algorithm("recursive_doubling"), "all_reduce", topology, model, MIB)
    assert got == pytest.approx(3 * ALPHA + 2 * MIB / BETA + 4 * MIB / (BETA / 2))  # all four cross in the last round


def test_adding_and_messages_take_time() -> None:
    model = LinkModel(host=FREE, rack=FREE, far=FREE, added_bytes_per_s=1e9, message_s=1e-6)
    direct = find_algorithm("direct")
    assert predict(direct, "all_reduce", Topology.flat(4), model, 4e6) == pytest.approx(3 * 1e6 / 1e9 + 2 * 6e-6)
    assert predict(direct, "broadcast", Topology.flat(4), model, 4e6) == pytest.approx(3e-6)


def test_factors_lie_between_those_of_measured_sizes() -> None:
    factors = {"all_reduce ring": [(MIB, 2.0), (4 * MIB, 8.0)], "all_reduce tree": []}
    model = replace(ONE_RANK_A_HOST, factors=factors)
    for name, nbytes, factor in (
        ("ring", 1, 2),
        ("ring", MIB, 2),
        ("ring", 2 * MIB, 4),
        ("ring", 64 * MIB, 8),
        ("tree", 1, 1),
    ):
        found = find_algorithm(name)
        plain = predict(found, "all_reduce", hosts(1, 1), ONE_RANK_A_HOST, nbytes)
        assert predict(found, "all_reduce", hosts(1, 1), model, nbytes) == pytest.approx(factor * plain)
        assert predict(found, "broadcast", hosts(1, 1), model, nbytes) == predict(
            found, "broadcast", hosts(1, 1), ONE_RANK_A_HOST, nbytes
        )


def test_a_fit_meets_what_was_measured_and_judges_itself_by_the_rest() -> None:
    topology, segment_bytes = Topology.flat(4), 1 << 20
    truth = LinkModel(host=Level(latency_s=2e-6, bytes_per_s=4e9), rack=FREE, far=FREE, added_bytes_per_s=8e9)
    names = ("direct", "ring", "tree")
    measured = [
        Measured(
            "all_reduce",
            nbytes,
            name,
            strange * predict_call(name, "all_reduce", topology, truth, nbytes, segment_bytes=segment_bytes),
        )
        for nbytes in (MIB, 4 * MIB, 16 * MIB)
        for name, strange in zip(names, (1.0, 1.0, 3.0), strict=True)
    ]
    fitted = fit(replace(truth, added_bytes_per_s=2e9), measured, topology, segment_bytes)
    for each in measured:
        got = predict_call(each.algorithm, each.verb, topology, fitted, each.nbytes, segment_bytes=segment_bytes)
        assert got == pytest.approx(each.seconds)
    assert median(error_of(fitted, measured, topology, segment_bytes)) < 0.1
    spoilt = [*measured[:-1], measured[-1]._replace(seconds=10 * measured[-1].seconds)]
    refitted = fit(truth, spoilt, topology, segment_bytes)
    assert error_of(refitted, spoilt, topology, segment_bytes)[-1] > 0.5  # its own factor does not hide it


def test_segments_fill_a_chain() -> None:
    """n - 1 hops of S become n - 1 hops of S/k and k - 1 further segments, for each of which a rank passes S/k on."""
    chain = profile(find_algorithm("ring"), "broadcast", hosts(*[1] * 9))
    wire_s = 64 * MIB / BETA
    assert seconds(chain, ONE_RANK_A_HOST, 64 * MIB) == pytest.approx(8 * (ALPHA + wire_s))
    assert 8 / IN_FLIGHT > 1  # more hops than instances under way: the chain is not full
    expected = 8 * (ALPHA + wire_s / 16) * (1 + 15 / IN_FLIGHT)
    assert seconds(chain, ONE_RANK_A_HOST, 64 * MIB, 16) == pytest.approx(expected)
    short = profile(find_algorithm("ring"), "broadcast", hosts(1, 1, 1))
    assert seconds(short, ONE_RANK_A_HOST, 64 * MIB, 16) == pytest.approx(2 * ALPHA + (2 + 15) * wire_s / 16)


def test_a_world_of_one_takes_no_time() -> None:
    assert all(
        predict(find_algorithm(name), "all_reduce", Topology.flat(1), ONE_RANK_A_HOST, MIB) == 0
        for name in ALGORITHMS.names()
    )


def test_what_has_no_plan_has_no_cost() -> None:
    with pytest.raises(PlanError, match="tree has no plan for 'all_gather_single'"):
        predict(find_algorithm("tree"), "all_gather_single", Topology.flat(4), ONE_RANK_A_HOST, MIB)


CLUSTER = LinkModel(
    host=Level(latency_s=1e-6, bytes_per_s=8e9, shared_bytes_per_s=3e10),
    rack=Level(latency_s=5e-6, bytes_per_s=BETA, shared_bytes_per_s=BETA),
    far=Level(latency_s=9e-6, bytes_per_s=BETA, shared_bytes_per_s=4 * BETA),
    added_bytes_per_s=1e10,
    message_s=2e-7,
)


@pytest.mark.parametrize("name", [*ALGORITHMS.names(), "hierarchical(ring,halving_doubling)"])
def test_symmetry_gives_what_counting_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 hosts of 4 in racks of 8, once counted, once from a few ranks."""
    algorithm = find_algorithm(name)
    topology = Topology.of_sizes([4] * 32, hosts_per_rack=8)
    for verb in algorithm.verbs:
        counted = profile.__wrapped__(algorithm, verb, topology)
        monkeypatch.setattr(cost, "COUNTED_RANKS", 127)
        guessed = profile.__wrapped__(algorithm, verb, topology)
        monkeypatch.undo()
        assert (counted.method, guessed.method) == ("counted", "symmetry")
        assert counted.rounds == guessed.rounds, verb
        for nbytes in (1024, 64 * MIB):
            for segments in (1, 16):
                exact, guess = (seconds(each, CLUSTER, nbytes, segments) for each in (counted, guessed))
                is_alike = verb in ("all_reduce", "reduce_scatter_single", "all_gather_single")
                tolerance = 0.01 if is_alike and name != "double_binary_tree" else 0.3
                assert guess == pytest.approx(exact, rel=tolerance), (verb, nbytes, segments)


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_65536_ranks(name: str) -> None:
    topology = Topology.of_sizes([8] * 8192, hosts_per_rack=32)
    algorithm = find_algorithm(name)
    found = profile(algorithm, "all_reduce", topology)
    counts = declared(name, "all_reduce", topology)
    assert counts is not None and (found.method, found.rounds) == ("symmetry", counts.rounds)
    bound = float(counts.sent) * 64 * MIB / 8e9
    assert bound < seconds(found, CLUSTER, 64 * MIB) < 100
