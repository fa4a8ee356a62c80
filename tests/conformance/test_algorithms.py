"""Every plan on every transport, in worlds of 1 to 5: equal to torch's arithmetic, bit-equal on all ranks.

The ranks are told of uneven hosts, which changes the plans and nothing else, and of small segments, so that a few
thousand elements walk through all that large data would.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from cases import ALL_DTYPES, contribution, family, fingerprint, guarded, same_bits, total
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from harness import run_ranks, transport_params
from pycomm import ReduceOp
from pycomm.algorithms import ALGORITHMS, find_algorithm
from pycomm.algorithms.engine import Engine
from pycomm.algorithms.executor import Collective
from pycomm.algorithms.selection import Selector, load_table
from pycomm.topology import Topology
from pycomm.transport.base import Transport

LAYOUTS = {1: [[1]], 2: [[2], [1, 1]], 3: [[3], [2, 1]], 4: [[4], [2, 2], [1, 3]], 5: [[5], [2, 3]]}
LARGE_BYTES = (1 << 20) + 3
SEGMENT_BYTES = 1024
REDUCE_VERBS = ("all_reduce", "reduce", "reduce_scatter_single")
PREMUL = 3.0
OPERATORS = [
    *((torch.bfloat16, op) for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.MIN)),
    (torch.float64, ReduceOp.AVG),
    (torch.complex64, ReduceOp.PREMUL_SUM),
    (torch.int16, ReduceOp.PRODUCT),
    (torch.bool, ReduceOp.BXOR),
]


def collective(verb: str, rank: int, n: int, numel: int, dtype: torch.dtype, op: ReduceOp, root: int) -> Collective:
    """A call on fresh tensors; ``numel`` counts one rank's part where the data are parts."""
    has_root = verb in ("reduce", "broadcast", "gather", "scatter")
    whole_in = verb in ("reduce_scatter_single", "all_to_all_single", "scatter")
    whole_out = verb in ("all_gather_single", "all_to_all_single", "gather")
    input = guarded(contribution(rank, n, numel * (n if whole_in else 1), dtype, op)).flat
    output = torch.empty(numel * (n if whole_out else 1), dtype=dtype)
    if verb == "broadcast":
        output = input
    splits = (numel,) * n if verb == "all_to_all_single" else ()
    return Collective(
        verb=verb,
        input=None if verb == "barrier" or (verb == "scatter" and rank != root) else input,
        output=None if verb == "barrier" or (verb in ("reduce", "gather") and rank != root) else output,
        op=op if verb in REDUCE_VERBS else None,
        factor=PREMUL,
        root=root if has_root else 0,
        input_splits=splits,
        output_splits=splits,
    )


@lru_cache(maxsize=256)
def expected(verb: str, rank: int, n: int, numel: int, dtype: torch.dtype, op: ReduceOp, root: int) -> torch.Tensor:
    """What the output must be."""
    whole = numel * (n if verb in ("reduce_scatter_single", "all_to_all_single", "scatter") else 1)
    mine = slice(rank * numel, (rank + 1) * numel)
    if verb in REDUCE_VERBS:
        if op is ReduceOp.PREMUL_SUM:  # by the same factor on all ranks
            result = total(n, whole, dtype, ReduceOp.SUM) * torch.tensor(PREMUL).to(dtype)
        else:
            result = total(n, whole, dtype, op)
        return result[mine] if verb == "reduce_scatter_single" else result
    inputs = [contribution(r, n, whole, dtype, op) for r in range(n)]
    if verb == "broadcast":
        return inputs[root]
    if verb == "scatter":
        return inputs[root][mine]
    return torch.cat([each[mine] for each in inputs] if verb == "all_to_all_single" else inputs)


def check(engine: Engine, transport: Transport, algorithm: str, case: tuple[str, int, torch.dtype, ReduceOp]) -> str:
    """Runs one case; returns what is wrong, or nothing."""
    verb, numel, dtype, op = case
    rank, n = transport.rank, transport.world_size
    root = numel % n
    call = collective(verb, rank, n, numel, dtype, op, root)
    before = None if call.input is None else call.input.clone()
    engine.execute(call, algorithm, None)
    where = f"rank {rank} of {n}: {algorithm} {case} root {root}: "
    if call.output is not None and not same_bits(call.output, expected(verb, rank, n, numel, dtype, op, root)):
        return where + "wrong result"
    if before is not None and verb != "broadcast" and not same_bits(call.input, before):
        return where + "wrote its input"
    return ""


def cases_of(verb: str, n: int, turn: int | None) -> Iterator[tuple[str, int, torch.dtype, ReduceOp]]:
    """0, 1, a prime, one past a chunk, one past a segment, and over a MiB; then operators on a few types.

    All of these, or, so that each meets some plans on every transport, the half of the lengths and the quarter of the
    operators that are on ``turn``.
    """
    segment = SEGMENT_BYTES // 4
    if verb == "barrier":
        yield verb, 0, torch.uint8, ReduceOp.SUM
        return
    large = LARGE_BYTES // (1 if verb in ("all_reduce", "broadcast", "reduce") else n)
    lengths: list[tuple[str, int, torch.dtype, ReduceOp]] = [
        *((verb, numel, torch.float32, ReduceOp.SUM) for numel in (0, 7 * n + 1, 1, 257, segment * n + 1)),
        (verb, large, torch.uint8, ReduceOp.MAX),
    ]
    yield from lengths if turn is None else lengths[turn % 2 :: 2]
    if verb in REDUCE_VERBS:
        of_turn = OPERATORS if turn is None else OPERATORS[turn % 4 :: 4]
        yield from ((verb, 13, dtype, op) for dtype, op in of_turn)


def plans_of(topology: Topology, rank: int) -> Iterator[tuple[str, str]]:
    """Yields the algorithms and verbs that have plans; where there are hosts, those whose plans differ by it."""
    flat = Topology.flat(topology.world_size)
    for name in ALGORITHMS.names():
        found = find_algorithm(name)
        for verb in found.verbs:
            if not found.supports(verb, topology):
                continue
            if len(topology.hosts) == 1 or not found.supports(verb, flat):
                yield name, verb
            elif any(found.plan(verb, r, topology) != found.plan(verb, r, flat) for r in range(topology.world_size)):
                yield name, verb


def all_plans(rank: int) -> tuple[list[str], list[int]]:
    """Runs everything; returns what was wrong, and checksums that must be equal on all ranks."""
    transport = pycomm.collectives.context.resolve(None).transport
    n = transport.world_size
    wrong, prints = [], []
    for sizes in LAYOUTS[n]:
        engine = Engine(transport, Selector(transport, Topology.of_sizes(sizes), load_table("")))
        for number, (name, verb) in enumerate(plans_of(engine.selector.topology, rank)):
            for case in cases_of(verb, n, None if transport.name == "local" else number + n):
                transport.segment_bytes = 1 << 16 if case[2] == torch.uint8 else SEGMENT_BYTES
                wrong.append(check(engine, transport, name, case))
            if verb == "all_reduce":  # sums that round: the ranks must still agree to the last bit
                floats = torch.rand(1000, generator=torch.Generator().manual_seed(rank))
                engine.execute(Collective(verb=verb, input=floats, output=floats, op=ReduceOp.SUM), name, None)
                prints.append(fingerprint(floats))
        engine.close()
    return [text for text in wrong if text], prints


@pytest.mark.parametrize("transport", transport_params())
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_all_plans(transport: str, n: int) -> None:
    results = run_ranks(n, all_plans, transport=transport)
    assert [wrong for wrong, _ in results] == [[]] * n
    assert len({tuple(prints) for _, prints in results}) == 1 and results[0][1]


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[int], str, tuple[str, int, torch.dtype, ReduceOp], int]:
    """Hosts of any sizes, an algorithm that suits them, a call, and a segment size."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    topology = Topology.of_sizes(sizes)
    name = draw(st.sampled_from(ALGORITHMS.names()))
    verbs = [verb for verb in find_algorithm(name).verbs if find_algorithm(name).supports(verb, topology)]
    dtype = draw(st.sampled_from(ALL_DTYPES))
    verb = draw(st.sampled_from([verb for verb in verbs if verb != "barrier"] or ["all_reduce"]))
    case = verb, draw(st.integers(0, 700)), dtype, draw(st.sampled_from(EXACT_OPS[family(dtype)]))
    return sizes, name, case, draw(st.integers(1, 900))


def one_call(rank: int, sizes: list[int], name: str, case: tuple[str, int, torch.dtype, ReduceOp], segment: int) -> str:
    transport = pycomm.collectives.context.resolve(None).transport
    transport.segment_bytes = segment
    return check(
        Engine(transport, Selector(transport, Topology.of_sizes(sizes), load_table(""))), transport, name, case
    )


# Operators whose results are exact for any number of ranks, however they are grouped.
EXACT_OPS = {
    "float": [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM],
    "float8": [ReduceOp.MIN, ReduceOp.MAX],
    "int": [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.BXOR],
    "uint": [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR],
    "bool": [ReduceOp.SUM, ReduceOp.BAND],
    "complex": [ReduceOp.SUM],
}


@settings(max_examples=60, deadline=None)
@given(calls())
def test_any_call(drawn: tuple[list[int], str, tuple[str, int, torch.dtype, ReduceOp], int]) -> None:
    sizes, name, case, segment = drawn
    assert run_ranks(sum(sizes), one_call, sizes, name, case, segment, transport="local") == [""] * sum(sizes)
