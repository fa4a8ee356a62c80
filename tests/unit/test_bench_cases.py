"""The benchmark's exactness: what goes in, what must come out, and that a wrong element is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycomm.cli.bench.worker.cases import OPS, VERBS, Case, count_wrong, expected_blocks, fill, template
from pycomm.cli.bench.worker.library import Buffer, Call, Library, UnsupportedCaseError
from pycomm.cli.bench.worker.runner import Runner


def make_case(verb: str, numel: int, op: str = "SUM", place: str = "out", buffers: str = "private") -> Case:
    return Case(verb=verb, numel=numel, dtype="float32", itemsize=4, op=op, place=place, buffers=buffers)


def simulate(verb: str, inputs: list[np.ndarray], rank: int, root: int) -> np.ndarray | None:
    """The plain definition of each verb on whole arrays; None where this rank gets nothing."""
    world_size = len(inputs)
    parts = [np.split(x, world_size) for x in inputs] if len(inputs[0]) % world_size == 0 else []
    total = np.sum(inputs, axis=0)
    results: dict[str, Any] = {
        "all_reduce": lambda: total,
        "reduce": lambda: total if rank == root else None,
        "reduce_scatter": lambda: np.split(total, world_size)[rank],
        "broadcast": lambda: inputs[root].copy(),
        "all_gather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs) if rank == root else None,
        "scatter": lambda: parts[root][rank].copy(),
        "all_to_all": lambda: np.concatenate([p[rank] for p in parts]),
        "sendrecv": lambda: inputs[(rank - 1) % world_size].copy(),
        "send": lambda: inputs[root].copy() if rank == (root + 1) % world_size else None,
    }
    result: np.ndarray | None = results[verb]()
    return result


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "barrier"])
def test_expected_result_is_the_definition_of_the_verb(verb: str, world_size: int) -> None:
    numel = 1031 * world_size  # more than one cycle, not a multiple of it
    input_numel = numel if VERBS[verb].input_is_whole else numel // world_size
    inputs = []
    for rank in range(world_size):
        x = np.empty(input_numel)
        fill(x, template("SUM", rank, world_size))
        inputs.append(x)
    for rank in range(world_size):
        for root in range(world_size):
            blocks = expected_blocks(make_case(verb, numel), rank, world_size, root)
            result = simulate(verb, inputs, rank, root)
            assert (blocks is None) == (result is None)
            if blocks is not None and result is not None:
                assert count_wrong(result, blocks) == 0
                result[7] += 1
                assert count_wrong(result, blocks) == 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_reductions_are_exact_in_eight_significant_bits(op: str, world_size: int) -> None:
    blocks = expected_blocks(make_case("all_reduce", 4096, op), 0, world_size, 0)
    assert blocks is not None
    assert (blocks[0] == np.rint(blocks[0])).all()
    assert 0 <= blocks[0].min() and blocks[0].max() <= 256  # bfloat16 holds integers up to 256
    assert len(np.unique(blocks[0])) > 1, "one value everywhere would hide a block in the wrong place"


def test_no_shift_and_no_other_rank_looks_the_same() -> None:
    values = template("SUM", 0, 2)
    for shift in range(1, len(values)):
        assert (np.roll(values, shift) != values).mean() > 0.5
    assert (template("SUM", 1, 2) != values).mean() > 0.5


class OneRank(Library):
    """A world of one, whose all_reduce is right except at ``broken_index``."""

    version, rank, world_size = "one rank", 0, 1

    def __init__(self, broken_index: int | None = None) -> None:
        self.broken_index = broken_index
        self.calls = 0

    def buffer(self, numel: int, dtype: str, is_shared: bool) -> Buffer:
        array = np.zeros(numel, dtype)
        return Buffer(array, array.view(np.int32))

    def encode(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return values.astype(dtype).view(np.int32)

    def bind(self, case: Case, output: Buffer, input: Buffer, root: int) -> Call:
        if case.verb != "all_reduce":
            raise UnsupportedCaseError("only all_reduce")

        def all_reduce(out: np.ndarray, x: np.ndarray) -> None:
            self.calls += 1
            out[:] = x
            if self.broken_index is not None:
                out[self.broken_index] += 1

        return all_reduce, (output.tensor, input.tensor)

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize("buffers", ["private", "shared"])
@pytest.mark.parametrize("place", ["in", "out"])
def test_a_planted_error_is_counted(place: str, buffers: str) -> None:
    case = make_case("all_reduce", 5000, place=place, buffers=buffers)
    for broken_index, is_wrong in ((None, False), (4999, True)):
        runner = Runner(OneRank(broken_index))
        assert runner.prepare(case) == {}
        answer = runner.run(num_chunks=0, chunk_calls=0, samples=3, round_index=0)
        assert (answer["wrong"] > 0) == is_wrong


def test_run_makes_the_calls_it_was_asked_for() -> None:
    library = OneRank()
    runner = Runner(library)
    runner.prepare(make_case("all_reduce", 16))
    answer = runner.run(num_chunks=4, chunk_calls=10, samples=5, round_index=2)
    assert library.calls == 1 + 2 + 4 * 10 + 5  # the check, the warm-up, the chunks, the samples
    assert len(answer["marks"]) == 5 and len(answer["starts"]) == len(answer["ends"]) == 5
    assert answer["marks"] == sorted(answer["marks"])


def test_a_library_may_decline() -> None:
    assert Runner(OneRank()).prepare(make_case("broadcast", 16, place="in")) == {"unsupported": "only all_reduce"}
