"""Laws of compressed collectives, for every codec on every transport: ranks bit-equal, sent + residual == input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import fingerprint

import pycomm
from harness import run_ranks, transport_params
from pycomm import CollectiveMismatchError, ConfigError, PlanError, ReduceOp, TransportError, compression
from pycomm.collectives.context import resolve
from pycomm.compression import CODECS, Combine, parse
from pycomm.topology import Topology

# A codec that is not here runs with its defaults.
SPECS = {
    "cast": ["bf16", "fp16"],
    "quantize": ["int8", "int4", "fp8", "mxfp4:rounding=stochastic"],
    "topk": ["topk:0.1", "topk:0.6", "topk:0.1,exchange=balanced"],
    "randomk": ["randomk:0.1"],
    "threshold": ["threshold:0.5,ratio=0.3"],
    "powersgd": ["powersgd:2"],
}
ALL = [spec for name in CODECS.names() for spec in SPECS.get(name, [name])]
WRAPPED = ["int8+ef21", "topk:0.1+ef21", "topk:0.1+dgc:warmup=2", "int4+ef+every:2", "powersgd:2+policy:min_numel=1"]
NUMELS = (0, 1, 97, 6000)
SHAPES = {97: (97,), 6000: (60, 100)}
STEPS = 3


def inputs(rank: int, numel: int, step: int) -> torch.Tensor:
    """Small whole numbers, so that sums of what is sent as it is are exact."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + 1)
    return torch.randint(-50, 51, (numel,), generator=generator).float().view(SHAPES.get(numel, (numel,)))


# -- ranks are bit-equal, whatever the verb --------------------------------------------------------------------------


def all_results(rank: int) -> dict[str, int]:
    """Runs every codec under every verb and returns checksums of what must be the same on all ranks."""
    seen: dict[str, int] = {}
    world_size = pycomm.world_size()
    for spec in ALL + WRAPPED:
        for numel in NUMELS:
            tensor = inputs(rank, numel, 0)
            pycomm.all_reduce(tensor, ReduceOp.AVG, compression=spec, name=f"reduced{numel}")
            seen[f"{spec} all_reduce {numel}"] = fingerprint(tensor)
        part = torch.full((60,), -1.0)
        scattered = spec if parse(spec).is_for_vectors else None
        pycomm.reduce_scatter_single(part, inputs(rank, 60 * world_size, 1), compression=scattered, name="scattered")
        whole = torch.empty(60 * world_size)
        pycomm.all_gather_single(whole, part)
        seen[f"{spec} reduce_scatter"] = fingerprint(whole)
        routes = parse(spec).routes([compression.Part("x", (60,))])
        if scattered and all(each.is_for_gathers for each, _ in routes):
            pycomm.all_gather_single(whole, part, compression=spec, name="gathered")
            seen[f"{spec} all_gather"] = fingerprint(whole)
            outputs = [torch.empty(60, dtype=torch.bfloat16) for _ in range(world_size)]
            pycomm.all_gather(outputs, part.bfloat16(), compression=spec, name="listed")
            seen[f"{spec} all_gather of a list"] = fingerprint(torch.cat(outputs).view(torch.int16))
    return seen


def laws_of_error_feedback(rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns, for every codec: the sums of the results and of this rank's inputs, and its residual."""
    rows = []
    for spec in ALL:
        compressor = compression.error_feedback(parse(spec))
        total, given = torch.zeros(6000), torch.zeros(6000)
        for step in range(STEPS):
            tensor = inputs(rank, 6000, step)
            given += tensor.view(-1)
            pycomm.all_reduce(tensor, compression=compressor, name="w")
            total += tensor.view(-1)
        rows.append((spec, total, given, compressor.residual("w")))
    return rows


def both(rank: int) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return all_results(rank), laws_of_error_feedback(rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("transport", transport_params())
def test_laws(transport: str, world_size: int) -> None:
    outcomes = run_ranks(world_size, both, transport=transport)
    for checksums, _ in outcomes:
        different = [key for key, value in checksums.items() if value != outcomes[0][0][key]]
        assert not different
    for row in zip(*(laws for _, laws in outcomes), strict=True):
        spec, total = row[0][:2]
        given, owed = sum(each[2] for each in row), sum(each[3] for each in row)
        codec = parse(spec)
        if codec.is_sparse and codec.combine is not Combine.SUM:
            assert torch.equal(total + owed, given), spec
            continue
        slack = 1e-5 * STEPS * world_size * 50  # what float32 rounds
        assert (total + owed - given).abs().max() <= slack, spec


# -- agreement, and mistakes -----------------------------------------------------------------------------------------


def disagree(rank: int) -> list[str]:
    told = []
    choices = [
        ("int8", "fp8"),  # the same bytes on the wire
        ("topk:0.1", "topk:0.2"),
        ("bf16", "fp16"),
        ("int8", "int8+policy:min_numel=1"),
    ]
    for choice in choices:
        tensor = torch.ones(64, 64)
        with pytest.raises(CollectiveMismatchError) as caught:
            pycomm.all_reduce(tensor, compression=choice[rank % 2], name="w")
        told.append(str(caught.value))
        assert torch.equal(tensor, torch.ones(64, 64)), "an error before a byte moved leaves the input as it was"
    return told


@pytest.mark.parametrize("transport", transport_params())
def test_compressors_that_differ_are_told_on_every_rank(transport: str) -> None:
    told = run_ranks(3, disagree, transport=transport)
    assert told[0] == [text.replace("rank 1 of 3", "rank 0 of 3") for text in told[1]]
    assert all("format=int8" in texts[0] and "format=fp8_e4m3" in texts[0] for texts in told)


def put_aside(compressor: compression.Compressor) -> list[torch.Tensor]:
    """What a compressor keeps."""
    return [each for kept in compressor.state_dict()["error_feedback"].values() for each in kept.values()]


def ask_for_what_has_no_plan(rank: int) -> None:
    world_size = pycomm.world_size()
    whole, part = torch.ones(97 * world_size), torch.empty(97)
    for verb, spec, algorithm in (
        ("all_reduce", "int8", "recursive_doubling"),
        ("all_reduce", "topk:0.1", "tree"),
        ("reduce_scatter_single", "int8", "halving_doubling"),
        ("reduce_scatter_single", "none", "recursive_doubling"),
    ):
        arguments = (whole,) if verb == "all_reduce" else (part, whole)
        for is_async in (False, True):
            compressor = compression.error_feedback(parse(spec))
            options = {"compression": compressor, "name": "w", "algorithm": algorithm, "async_op": is_async}
            with pytest.raises(PlanError, match=f"{algorithm} has no plan of"):
                getattr(pycomm, verb)(*arguments, **options)
            assert not put_aside(compressor), "nothing was taken of the input"
    for algorithm in ("tree", "recursive_doubling", "double_binary_tree"):
        tensor = torch.full((1000,), rank + 1.0)
        pycomm.all_reduce(tensor, compression="bf16", algorithm=algorithm)
        assert torch.equal(tensor, torch.full((1000,), world_size * (world_size + 1) / 2))


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_an_algorithm_that_cannot_carry_the_payloads_is_refused_before_anything_is_put_aside(transport: str) -> None:
    run_ranks(3, ask_for_what_has_no_plan, transport=transport)


def be_elsewhere(rank: int) -> None:
    """Ranks whose calls are alike, and not what their compressors make of them."""
    for spec, other in (("powersgd:1+ef", (1024,)), ("int8+ef+policy:min_numel=1", (1024,))):
        compressor = parse(spec)
        with pytest.raises(CollectiveMismatchError, match=r"shaped \[\(32, 32\)\].*shaped \[\(1024,\)\]"):
            pycomm.all_reduce(torch.ones(other if rank else (32, 32)), compression=compressor, name="w")
    for spec in ("int8+ef+every:2", "topk:0.1+dgc:warmup=3", "topk:0.1+dgc:warmup=3+policy:min_numel=1,min_dim=1"):
        compressor = parse(spec)
        pycomm.all_reduce(torch.ones(1000), compression=compressor, name="w")
        if rank == 1:  # went on from a state of another step
            compressor = parse(spec)
        with pytest.raises(CollectiveMismatchError, match=r"calls \[1\] of its parts.*calls \[0\] of its parts"):
            pycomm.all_reduce(torch.ones(1000), compression=compressor, name="w")
    for algorithms in (("ring", None), ("ring", "direct")):
        with pytest.raises(CollectiveMismatchError, match="algorithm ring"):
            pycomm.all_reduce(torch.ones(1000), compression="int8", algorithm=algorithms[rank % 2])
    pycomm.all_reduce(torch.ones(10), compression="int8", algorithm=("auto", None)[rank % 2])


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_ranks_that_would_send_different_payloads_are_told(transport: str) -> None:
    run_ranks(2, be_elsewhere, transport=transport)


def misuse(rank: int) -> None:
    group, whole, part = resolve(None), torch.ones(2 * pycomm.world_size()), torch.ones(2)
    whole_numbers, doubles = torch.ones(4, dtype=torch.int32), torch.ones(4).double()
    calls: list[tuple[str, Any]] = [
        ("expected float32, float16 or bfloat16, got torch.int32", lambda: reduce_(whole_numbers, "int8")),
        ("expected float32, float16 or bfloat16, got torch.float64", lambda: reduce_(doubles, "topk:0.1")),
        ("expected op SUM or AVG, got MAX", lambda: reduce_(torch.ones(4), "int8", op=ReduceOp.MAX)),
        ("pass name='...'", lambda: reduce_(torch.ones(4), "int8+ef")),
        ("name: expected the tensor's name, a str", lambda: reduce_(torch.ones(4), "int8+ef", name=5)),
        ("unknown compression 'int9'; known: .*int8", lambda: reduce_(torch.ones(4), "int9")),
        ("broadcast cannot be compressed", lambda: pycomm.broadcast(part, 0, compression="int8")),
        ("compresses sums", lambda: pycomm.all_gather_single(whole, part, compression="int8+every:2", name="g")),
        ("takes tensors as flat, so that nothing", lambda: scatter(part, whole, "powersgd", "s")),
        ("use another codec, or policy:min_dim=1", lambda: scatter(part, whole, "int8+policy", "s")),
        ("takes tensors as flat", lambda: pycomm.all_gather_single(whole, part, compression="int8+policy")),
        ("had 4 when its state was made", lambda: [reduce_(torch.ones(n), "int8+ef", name="grows") for n in (4, 5)]),
    ]  # fmt: skip
    for message, call in calls:
        with pytest.raises(ConfigError, match=message):
            call()
    reduce_(torch.ones(4), "int8+ef", name="fine")  # and the group still works
    assert group.compression.last.calls == 1


def reduce_(tensor: torch.Tensor, spec: Any, op: Any = ReduceOp.SUM, name: Any = None) -> None:
    pycomm.all_reduce(tensor, op, compression=spec, name=name)


def scatter(part: torch.Tensor, whole: torch.Tensor, spec: Any, name: str) -> None:
    pycomm.reduce_scatter_single(part, whole, compression=spec, name=name)


def test_mistakes_raise_before_a_byte_moves() -> None:
    run_ranks(2, misuse, transport="shm")


def reach_the_edges(rank: int) -> None:
    world_size = pycomm.world_size()
    whole = torch.empty(3 * world_size)
    pycomm.all_gather_single(whole, torch.full((3,), 60000.0), compression="fp16")
    assert whole.tolist() == [60000.0] * 3 * world_size, "nobody adds to what is gathered"
    mean = torch.eye(3).half().mul_(60000).to_sparse_coo()
    pycomm.all_reduce(mean, ReduceOp.AVG)
    assert mean.to_dense().tolist() == (torch.eye(3) * 60000).half().tolist(), "a mean in range, of a sum that is not"


def test_16_bit_floats_reach_their_largest() -> None:
    run_ranks(3, reach_the_edges, transport="local")


# -- states ----------------------------------------------------------------------------------------------------------


def save_and_load(rank: int) -> None:
    group = resolve(None)
    empty = group.compression.state_dict()
    tensor = torch.linspace(-1, 1, 64)
    works = [pycomm.all_reduce(tensor.clone(), compression="sign+ef", name="w", async_op=True) for _ in range(20)]
    saved = group.compression.state_dict()  # of all twenty
    assert all(work.is_completed() for work in works if work)
    kept = group.compression.compressor("sign+ef")
    owed = kept.residual("w")
    assert saved["calls"] == 20 and torch.equal(
        owed, saved["compressors"]["sign+ef"]["error_feedback"]["residuals"]["w"]
    )

    broken = {"compressors": {"sign+ef": parse("sign+ef").state_dict(), "int8+ef": {"inner": {}}}, "calls": 3}
    with pytest.raises(pycomm.CheckpointError, match="expected a state with the entries"):
        group.compression.load_state_dict(broken)
    assert torch.equal(kept.residual("w"), owed), "nothing has changed"
    group.compression.load_state_dict(empty)
    assert group.compression.compressor("sign+ef") is kept
    assert not kept.owes([compression.Part("w", (64,))]), "what the state does not have begins anew"
    group.compression.load_state_dict(saved)
    assert torch.equal(kept.residual("w"), owed)


def test_a_groups_state_is_of_all_calls_and_loads_whole_or_not_at_all() -> None:
    run_ranks(2, save_and_load, transport="shm")


def grow(rank: int) -> None:
    """Two tensors in one call, by two compressors; the second is longer than before."""
    first, second = parse("int8+ef"), parse("sign+ef")
    policy = compression.policy(second, min_numel=1, min_dim=1, rules={"a": first})

    def reduce_both(numel: int) -> None:
        with pycomm.coalescing():
            pycomm.all_reduce(torch.linspace(0, 1, 64), compression=policy, name="a")
            pycomm.all_reduce(torch.linspace(0, 1, numel), compression=policy, name="b")

    reduce_both(64)
    (owed,) = put_aside(first)
    with pytest.raises(ConfigError, match="'b' has 65 elements, and had 64"):
        reduce_both(65)
    assert owed.any() and torch.equal(put_aside(first)[0], owed), "nothing was sent of the first"


def test_a_tensor_of_another_length_is_refused_before_others_are_sent() -> None:
    run_ranks(2, grow, transport="shm")


# -- the other ways to call ------------------------------------------------------------------------------------------


def other_ways(rank: int) -> None:
    group = resolve(None)
    records: list[Any] = []
    group.add_hook(records.append)
    given = inputs(rank, 6000, 0)
    plain = given.clone()
    pycomm.all_reduce(plain, compression="int8")
    assert records[-1].compression.ratio > 3.5
    assert 0 < records[-1].compression.wire_bytes < records[-1].nbytes

    later = given.clone()
    work = pycomm.all_reduce(later, async_op=True, compression="int8")
    assert work is not None and work.wait()
    assert torch.equal(later, plain)

    half = given.to(torch.bfloat16)
    pycomm.all_reduce(half, compression="int8", algorithm="direct")
    assert (half.float() - plain).abs().max() < 0.05 * plain.abs().max()

    transposed = given.t().contiguous().t()  # a result that is copied back
    pycomm.all_reduce(transposed, compression="int8")
    assert torch.equal(transposed, plain)

    group.compression.measure_error = True
    again = given.clone()
    pycomm.all_reduce(again, compression="int8")
    exact = given.clone()
    pycomm.all_reduce(exact)
    error = group.compression.last.relative_error
    assert error is not None and error == pytest.approx(float((again - exact).norm() / exact.norm()), rel=1e-3)
    assert 0 < error < 0.02
    group.compression.measure_error = False
    assert group.compression.total.calls == 5


@pytest.mark.parametrize("transport", transport_params())
def test_async_hooks_errors_and_other_dtypes(transport: str) -> None:
    run_ranks(2, other_ways, transport=transport)


def coalesce(rank: int) -> None:
    """Residuals go by name: alone, or with others in any order, nothing is lost."""
    compressor = compression.error_feedback(compression.topk(0.2))
    names = {"a": 40, "b": 7, "c": 90}
    given = {name: torch.zeros(numel) for name, numel in names.items()}
    got = {name: torch.zeros(numel) for name, numel in names.items()}
    for step, layout in enumerate([["a", "b", "c"], ["c", "a"], ["b"], ["b", "c", "a"]]):
        tensors = {name: inputs(rank, names[name], step).view(-1) for name in layout}
        for name, tensor in tensors.items():
            given[name] += tensor
        with pycomm.coalescing():
            for name, tensor in tensors.items():
                pycomm.all_reduce(tensor, compression=compressor, name=name)
        for name, tensor in tensors.items():
            got[name] += tensor
    for name in names:
        owed = compressor.residual(name)
        pycomm.all_reduce(owed)
        pycomm.all_reduce(given[name])
        assert torch.equal(got[name] + owed, given[name]), name


def test_coalesced_calls_are_one_and_keep_state_by_name() -> None:
    run_ranks(3, coalesce, transport="shm")


def overlap(rank: int) -> tuple[int, float]:
    """Enough elements for segments; the result must be that of the same chunks without them."""
    torch.set_num_threads(1)
    from pycomm.collectives import compressed

    generator = torch.Generator().manual_seed(rank)
    given = torch.randn(1_500_000, generator=generator)
    tensor = given.clone()
    pycomm.all_reduce(tensor, compression="int8:block_numel=4096")
    compressed._MAX_SEGMENTS = 1
    whole = given.clone()
    pycomm.all_reduce(whole, compression="int8:block_numel=4096")
    assert torch.equal(tensor, whole)
    return fingerprint(tensor), float(tensor.abs().max())


def test_segments_change_nothing() -> None:
    outcomes = run_ranks(2, overlap, transport="torch")
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] > 3


def between_hosts(rank: int, sizes: tuple[int, ...]) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As ``laws_of_error_feedback``, on ranks that are told they stand on several hosts."""
    group = resolve(None)
    group.engine.selector.topology = Topology.of_sizes(sizes)
    rows = []
    for spec in ("bf16", "int8", "topk:0.1", "topk:0.1,exchange=balanced", "randomk:0.1", "sign"):
        compressor = compression.error_feedback(parse(spec))
        for numel in (1, 97, 6000):
            total, given = torch.zeros(numel), torch.zeros(numel)
            for step in range(STEPS):
                tensor = inputs(rank, numel, step)
                given += tensor.view(-1)
                pycomm.all_reduce(tensor, compression=compressor, name=f"w{numel}", algorithm="hierarchical")
                total += tensor.view(-1)
            rows.append((spec, total, given, compressor.residual(f"w{numel}")))
        assert group.compression.last.logical_bytes == 4 * 6000 * 2 * (len(sizes) - 1) // len(sizes) // sizes[0]
    with pytest.raises(ConfigError, match="has to see each rank's own tensor"):
        pycomm.all_reduce(torch.ones(4, 4), compression="powersgd", name="m", algorithm="hierarchical")
    return rows


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("transport", ["local", "torch"])
def test_laws_between_hosts(transport: str, sizes: tuple[int, ...]) -> None:
    outcomes = run_ranks(sum(sizes), between_hosts, sizes, transport=transport)
    for row in zip(*outcomes, strict=True):
        spec, total = row[0][:2]
        assert all(torch.equal(total, each[1]) for each in row), spec
        given, owed = sum(each[2] for each in row), sum(each[3] for each in row)
        slack = 0.0 if spec.startswith("topk") else 0.1
        assert (total + owed - given).abs().max() <= slack, spec


class Breaks(type(parse("int8"))):  # type: ignore[misc]
    """int8 until the third segment of rank 3."""

    rank = 0
    calls = 0

    def encode(self, *arguments: Any, **named: Any) -> None:
        type(self).calls += self.rank == 3
        if type(self).calls == 3:
            raise RuntimeError("the codec broke")
        super().encode(*arguments, **named)


def break_in_the_middle(rank: int) -> str:
    resolve(None).engine.selector.topology = Topology.of_sizes((2, 2))
    compressor = Breaks()
    object.__setattr__(compressor, "rank", rank)
    pycomm.all_reduce(torch.ones(97), compression="int8")
    flat = torch.ones(6_000_000)  # several segments
    with pytest.raises((RuntimeError, TransportError)) as told:
        pycomm.all_reduce(flat, compression=compressor, timeout=500)
    with pytest.raises(TransportError):
        pycomm.all_reduce(flat, compression="int8", timeout=500)
    return str(told.value)


def test_a_rank_that_fails_between_hosts_is_told_to_all() -> None:
    told = run_ranks(4, break_in_the_middle, transport="torch")
    assert told[3] == "the codec broke"
    assert all(text and "within" not in text for text in told[:3]), told  # told, and not by running out of time


def ask_for_hosts(rank: int) -> None:
    with pytest.raises(ConfigError, match="expected several hosts with equally many ranks"):
        pycomm.all_reduce(torch.ones(4), compression="int8", algorithm="hierarchical")


def test_hierarchical_on_one_host_is_refused() -> None:
    run_ranks(2, ask_for_hosts, transport="shm")
