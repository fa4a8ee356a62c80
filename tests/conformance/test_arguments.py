"""What users pass, on every transport: arrays of other libraries, odd views, NaN; and mistakes, before a byte moves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import ALL_DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

import pycomm
from harness import run_ranks, transport_params
from pycomm import ReduceOp
from pycomm.torch_backend import Options

everywhere = pytest.mark.parametrize("transport", transport_params())


def arrays(rank: int) -> None:
    n = pycomm.world_size()
    total = n * (n + 1) / 2
    for dtype in (np.float32, np.float16, np.int16, np.uint32, np.complex128):
        array = np.full((3, 4), rank + 1, dtype=dtype)
        pycomm.all_reduce(array)
        assert (array == total).all()
    strided = np.zeros((4, 6), dtype=np.int64)
    strided[:, ::2] = rank + 1
    pycomm.all_reduce(strided[:, ::2])
    assert (strided[:, ::2] == total).all() and (strided[:, 1::2] == 0).all()
    scalar = np.array(rank + 1.0)
    pycomm.all_reduce(scalar)
    assert scalar == total
    read_only = np.full(5, rank, dtype=np.int32)
    read_only.flags.writeable = False
    gathered = np.empty(5 * n, dtype=np.int32)
    pycomm.all_gather_single(gathered, read_only)  # an input may be read-only
    assert gathered.reshape(n, 5).tolist() == [[r] * 5 for r in range(n)]
    pycomm.all_gather_single(gathered, np.arange(5, dtype=np.int32)[::-1])  # and run backwards
    assert gathered.reshape(n, 5).tolist() == [[4, 3, 2, 1, 0]] * n
    exporter = Exporter(torch.full((7,), float(rank + 1)))
    pycomm.all_reduce(exporter)
    assert (exporter.tensor == total).all()


class Exporter:
    """An array of a library that only speaks DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def views(rank: int) -> None:
    n = pycomm.world_size()
    total = n * (n + 1) / 2
    # A parameter, and a tensor inside a graph.
    parameter = torch.nn.Parameter(torch.full((4,), rank + 1.0))
    pycomm.all_reduce(parameter)
    assert parameter.requires_grad and parameter.is_leaf and (parameter.detach() == total).all()
    hidden = parameter * 2
    pycomm.all_reduce(hidden)
    assert (hidden.detach() == 2 * total * n).all()
    # No dimension, and an inference tensor.
    scalar = torch.tensor(rank + 1.0)
    pycomm.all_reduce(scalar)
    assert scalar.item() == total
    with torch.inference_mode():
        frozen = torch.full((2, 3), rank + 1.0)
    pycomm.all_reduce(frozen)
    pycomm.all_reduce(frozen.t(), ReduceOp.MAX)
    assert (frozen == total).all()
    with torch.inference_mode():
        long = torch.full((100_000,), rank + 1.0)
    pycomm.all_reduce(long)
    assert (long == total).all()
    with torch.inference_mode():
        frozen.fill_(rank + 1)
        pycomm.all_reduce(frozen, async_op=True).wait()
        pycomm.all_reduce(frozen[:, 1], ReduceOp.MAX)
        made_inside = torch.full((3,), complex(0, rank + 1)).conj()
        pycomm.all_reduce(made_inside)
        values = [None] * n
        pycomm.all_gather_object(values, rank)
        assert values == list(range(n))
    assert (frozen == total).all() and (made_inside == complex(0, -total)).all()
    # A view made without grad of a leaf that has it.
    with torch.no_grad():
        parameter.fill_(rank + 1)
        row = parameter[::2]
    pycomm.all_reduce(row)
    assert (parameter.detach()[::2] == total).all() and (parameter.detach()[1::2] == rank + 1).all()
    # Conjugate and negation bits: the view's values are reduced, not the memory's.
    base = torch.full((3,), complex(rank + 1, rank + 1), dtype=torch.complex64)
    pycomm.all_reduce(base.conj(), ReduceOp.PRODUCT)
    expected = torch.ones(3, dtype=torch.complex64)
    for r in range(n):
        expected *= complex(r + 1, -(r + 1))
    assert torch.equal(base.conj().resolve_conj(), expected)
    mixed = torch.full((3,), complex(rank, 1), dtype=torch.complex128)
    if rank == 0:  # a view of conjugates on one rank, of the same values
        mixed = mixed.conj().resolve_conj().conj()
    pycomm.all_reduce(mixed)
    assert mixed.is_conj() == (rank == 0) and (mixed == complex(n * (n - 1) / 2, n)).all()
    base = torch.full((3,), complex(0, rank + 1), dtype=torch.complex64)
    negated = base.conj().imag
    assert negated.is_neg()
    pycomm.all_reduce(negated, ReduceOp.MAX)
    assert (base.imag == 1).all() and (base.real == 0).all()  # max(-1, -2, ...) = -1
    # Columns, and memory in another order on another rank.
    matrix = torch.zeros(5, 7)
    matrix[:, 3] = rank + 1
    pycomm.all_reduce(matrix[:, 3])
    assert (matrix[:, 3] == total).all() and matrix.sum() == 5 * total
    ordered = torch.arange(6.0).view(2, 3)
    mine = ordered.clone() if rank % 2 == 0 else ordered.t().contiguous().t()
    pycomm.all_reduce(mine)
    assert torch.equal(mine, ordered * n)
    # Results spread over views.
    board = torch.zeros(3, n)
    pycomm.all_gather([board[:, r] for r in range(n)], torch.full((3,), float(rank)))
    assert torch.equal(board, torch.arange(float(n)).expand(3, n))
    rows = torch.zeros(n, 3)
    pycomm.all_gather(list(rows), torch.full((3,), float(rank)))
    assert torch.equal(rows.t(), board)


def sparse(rank: int) -> None:
    """Entries that are one in the end, as of an embedding of which a batch has one row; and values that lie apart."""
    n = pycomm.world_size()
    row = torch.sparse_coo_tensor(torch.tensor([[2, 2, 2]]), torch.ones(3, 4), (5, 4), check_invariants=True)
    pycomm.all_reduce(row)
    assert row.is_coalesced() and row.indices().tolist() == [[2]] and (row.values() == 3 * n).all()
    values = torch.full((4,), complex(0, rank + 1))[1::2].conj()[:1]
    apart = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (3,), check_invariants=True, is_coalesced=True)
    pycomm.all_reduce(apart)
    assert apart.to_dense().tolist() == [0, complex(0, -n * (n + 1) / 2), 0]


def board(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column of ``numel`` elements, and the canaries around and between them."""
    canaries = torch.full((numel + 2, 3), -7.0)
    return canaries, canaries[1:-1, 1]


def holds(canaries: torch.Tensor, expected: torch.Tensor) -> bool:
    want = torch.full_like(canaries, -7.0)
    want[1:-1, 1] = expected
    return torch.equal(canaries, want)


def results_keep_to_their_views(rank: int) -> None:
    """What lies between and around the elements of a view stays as it was, whatever is received into it."""
    n = pycomm.world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    for numel in (3, 400):  # in a frame, or beyond it
        mine = torch.full((numel,), float(rank))
        everybody = torch.arange(float(n)).repeat_interleave(numel)
        canaries, view = board(n * numel)
        pycomm.all_gather_single(view, mine)
        assert holds(canaries, everybody)
        canaries, view = board(numel)
        pycomm.reduce_scatter_single(view, torch.ones(n * numel) * rank)
        assert holds(canaries, mine * 0 + n * (n - 1) / 2)
        canaries, view = board(numel)
        view.fill_(rank)
        pycomm.broadcast(view, n - 1)
        assert holds(canaries, mine * 0 + n - 1)
        canaries, view = board(numel)
        view.fill_(rank)
        pycomm.reduce(view, 0, ReduceOp.MAX)
        assert holds(canaries, mine * 0 + (n - 1 if rank == 0 else rank))
        canaries, view = board(n * numel)
        pycomm.all_to_all_single(view, torch.full((n * numel,), float(rank)))
        assert holds(canaries, everybody)
        canaries, view = board(numel)
        work = pycomm.isend(mine, right)
        pycomm.recv(view, left)
        work.wait()
        assert holds(canaries, mine * 0 + left)
        # Into a view whose memory has the other sign.
        base = torch.full((numel,), complex(-7, 1))
        negated = base.conj().imag
        assert negated.is_neg()
        pycomm.broadcast(negated.fill_(rank), 0)
        assert (base.imag == 0).all() and (base.real == -7).all()


def every_type_moves(rank: int) -> None:
    """Bits of every type, NaNs of float8 too, by broadcast, gather and messages."""
    n = pycomm.world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype in ALL_DTYPES:
        raw = torch.arange(256, dtype=torch.int64).remainder(2 if dtype is torch.bool else 256).to(torch.uint8)
        sent = raw.roll(rank).view(dtype)
        got = torch.zeros_like(sent)
        work = pycomm.isend(sent, right)
        pycomm.recv(got, left)
        work.wait()
        assert torch.equal(got.view(torch.uint8), raw.roll(left)), dtype
        pycomm.broadcast(got, n - 1)
        assert torch.equal(got.view(torch.uint8), raw.roll((n - 2) % n)), dtype
        gathered = [torch.zeros_like(sent) for _ in range(n)] if rank == 0 else None
        pycomm.gather(sent, gathered, dst=0)
        for source, each in enumerate(gathered or []):
            assert torch.equal(each.view(torch.uint8), raw.roll(source)), dtype


def not_a_numbers(rank: int) -> None:
    n = pycomm.world_size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            tensor = torch.arange(float(n + 40)).remainder(8).to(dtype)
            tensor.view(torch.uint8 if dtype.itemsize == 1 else dtype)[rank] = (
                0x7F if dtype.itemsize == 1 else float("nan")
            )
            pycomm.all_reduce(tensor, op)
            is_nan = tensor.float().isnan()
            assert is_nan[:n].all() and not is_nan[n:].any(), (dtype, op)


def all_arguments(rank: int) -> None:
    arrays(rank)
    views(rank)
    sparse(rank)
    not_a_numbers(rank)
    results_keep_to_their_views(rank)
    every_type_moves(rank)


@everywhere
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_users_pass(transport: str, world_size: int) -> None:
    run_ranks(world_size, all_arguments, transport=transport)


def mistakes(n: int) -> list[tuple[str, Callable[[], Any]]]:
    """(part of the message, call) of what must raise ConfigError on every rank."""
    t = torch.zeros(4)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    buffer = torch.zeros(4 * n + 4)
    whole, part = torch.zeros(4 * n), torch.zeros(4)
    stream = pycomm.CommStream()
    return [
        ("unknown op", lambda: pycomm.all_reduce(t, "sum")),
        ("unknown op", lambda: pycomm.all_reduce(t, 77)),
        ("premul_sum", lambda: pycomm.all_reduce(t, ReduceOp.PREMUL_SUM)),
        ("BAND is not defined", lambda: pycomm.all_reduce(t, ReduceOp.BAND)),
        ("MAX is not defined", lambda: pycomm.all_reduce(t.to(torch.complex64), ReduceOp.MAX)),
        ("AVG is not defined", lambda: pycomm.all_reduce(t.bool(), ReduceOp.AVG)),
        ("AVG is not defined", lambda: pycomm.all_reduce_mean(t.int())),
        ("unknown algorithm 'ringg'; known: auto, native, direct", lambda: pycomm.all_reduce(t, algorithm="ringg")),
        ("unknown compression 'int9'; known: auto, cast", lambda: pycomm.all_reduce(t, compression="int9")),
        ("more than 0 seconds", lambda: pycomm.all_reduce(t, timeout=0)),
        ("expected a torch tensor", lambda: pycomm.all_reduce([1.0, 2.0])),
        ("expected a torch tensor", lambda: pycomm.all_reduce(3.0)),
        ("read-only", lambda: pycomm.all_reduce(read_only)),
        ("negative strides", lambda: pycomm.all_reduce(np.zeros(4)[::-1])),
        ("cannot be shared", lambda: pycomm.all_reduce(np.array(["a"]))),
        ("dense", lambda: pycomm.all_reduce(torch.eye(3).to_sparse_csr())),
        ("dense", lambda: pycomm.broadcast(t.to_sparse(), 0)),
        ("not defined on sparse", lambda: pycomm.all_reduce(t.to_sparse(), ReduceOp.MAX)),
        ("expected a dense tensor", lambda: pycomm.all_reduce(t.to_sparse(), compression="int8")),
        ("meta", lambda: pycomm.all_reduce(torch.zeros(4, device="meta"))),
        ("cannot be moved", lambda: pycomm.all_reduce(torch.empty(4, dtype=torch.int4))),
        ("cannot be moved", lambda: pycomm.broadcast(torch.empty(4, dtype=torch.uint1), 0)),
        ("inside vmap, grad or func", lambda: torch.func.functionalize(pycomm.all_reduce)(torch.ones(4))),
        ("call pycomm outside", lambda: torch.func.vmap(pycomm.all_reduce)(torch.ones(2, 4))),
        ("call pycomm outside", lambda: torch.func.grad(pycomm.all_reduce)(torch.ones(4))),
        ("memory of its own, got FakeTensor", lambda: pycomm.all_reduce(FakeTensorMode().from_tensor(t))),
        ("got a nested one", lambda: pycomm.all_reduce(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))),
        ("overlap", lambda: pycomm.all_reduce(torch.zeros(1).expand(4))),
        ("overlap", lambda: pycomm.all_reduce(torch.zeros(9).as_strided((3, 3), (1, 1)))),
        ("expected a pycomm.Group", lambda: pycomm.all_reduce(t, group="world")),
        ("expected src", lambda: pycomm.broadcast(t)),
        ("got both", lambda: pycomm.broadcast(t, 0, group_src=0)),
        (f"rank {n} is not in group", lambda: pycomm.broadcast(t, n)),
        ("group_dst: expected", lambda: pycomm.reduce(t, group_dst=-1)),
        ("elements", lambda: pycomm.all_gather_single(torch.zeros(4 * n + 1), t)),
        ("same dtype", lambda: pycomm.all_gather_single(torch.zeros(4 * n, dtype=torch.float64), t)),
        ("share memory", lambda: pycomm.all_gather_single(buffer[: 4 * n], buffer[1:5])),
        ("share memory", lambda: pycomm.reduce_scatter_single(buffer[1:5], buffer[: 4 * n])),
        ("elements", lambda: pycomm.reduce_scatter_single(torch.zeros(3), whole)),
        ("divisible", lambda: pycomm.all_to_all_single(torch.zeros(3 * n + 1), torch.zeros(3 * n + 1))),
        ("divisible", lambda: pycomm.all_to_all_single(torch.zeros(n + 1, n), torch.zeros(n + 1, n))),
        ("one a rank", lambda: pycomm.gather(part, [part.clone()] * (n + 1), pycomm.rank())),
        ("receive results", lambda: pycomm.gather(t, [part] * n, pycomm.rank())),
        ("share memory", lambda: pycomm.scatter(buffer[1:5], [buffer[:4]] * n, pycomm.rank())),
        ("expected 4 elements", lambda: pycomm.scatter(part, [torch.zeros(3)] * n, pycomm.rank())),
        ("expected None on ranks", lambda: pycomm.scatter(part, [part] * n, (pycomm.rank() + 1) % n)),
        ("sum to", lambda: pycomm.all_to_all_single(whole, whole.clone(), [1] * n, [4] * n)),
        ("expected an integer", lambda: pycomm.all_to_all_single(t, t.clone(), [4.0 / n] * n, [4.0 / n] * n)),
        ("expected an integer", lambda: pycomm.all_to_all_single(t, t.clone(), np.ones(n), np.ones(n))),
        ("input_split_sizes: expected one number", lambda: pycomm.all_to_all_single(t, t.clone(), None, 4)),  # type: ignore[arg-type]
        ("share memory", lambda: pycomm.all_to_all_single(whole, whole)),
        ("one a rank", lambda: pycomm.all_gather([part] * (n + 1), t)),
        ("receive results", lambda: pycomm.all_gather([part] * n, t)),
        ("expected 4 elements", lambda: pycomm.all_to_all([torch.zeros(3) for _ in range(n)], [torch.zeros(4)] * n)),
        ("expected the same dtype", lambda: pycomm.reduce_scatter(t, [torch.zeros(4, dtype=torch.int32)] * n)),
        ("expected a list", lambda: pycomm.all_gather_object([None] * (n + 1), 1)),
        ("tag: expected", lambda: pycomm.isend(t, 0, tag=-1)),
        ("tag: expected", lambda: pycomm.irecv(t, 0, tag=1 << 20)),
        ("tag: expected", lambda: pycomm.irecv(t, 0, tag=1.5)),
        ("expected dst", lambda: pycomm.send(t)),
        ("at least one P2POp", lambda: pycomm.batch_isend_irecv([])),
        ("isend or pycomm.irecv", lambda: pycomm.P2POp(print, t, 0)),
        ("expected at least one rank", lambda: pycomm.new_group([])),
        ("none twice", lambda: pycomm.new_group([0, 0])),
        ("not in group", lambda: pycomm.new_group([n])),
        ("backend: a group uses the transport of its parent", lambda: pycomm.new_group([0], None, "gloo")),
        ("pg_options: a group has the settings", lambda: pycomm.new_group(pg_options=Options())),
        ("False, or all 2 ranks, got True and [1]", lambda: pycomm.new_group([1], use_local_synchronization=True)),
        ("got both: 'a' and 'b'", lambda: pycomm.new_group(group_desc="b", name="a")),
        ("expected a torch.device", lambda: pycomm.new_group(device_id="cuda:0")),  # type: ignore[arg-type]
        ("expected several ranks or None", lambda: pycomm.new_group(0)),  # type: ignore[arg-type]
        ("name: expected a str", lambda: pycomm.new_group(group_desc=7)),  # type: ignore[arg-type]
        ("name: expected a str", lambda: pycomm.split(0, name=7)),  # type: ignore[arg-type]
        ("segment_bytes: expected an integer from 1", lambda: pycomm.CommStream(segment_bytes=0)),
        ("priority: expected an integer", lambda: stream.all_reduce(t, priority="high")),  # type: ignore[arg-type]
        ("priority: expected an integer", lambda: stream.submit(pycomm.barrier, priority=1 << 63)),
        ("nbytes: expected an integer from 0", lambda: stream.submit(pycomm.barrier, nbytes=-1)),
        ("color: expected an integer from 0", lambda: pycomm.split(-3)),
        ("color: expected an integer from 0", lambda: pycomm.split(1 << 70)),
        ("color: expected an integer from 0", lambda: pycomm.split("red")),  # type: ignore[arg-type]
        ("key: expected an integer", lambda: pycomm.split(0, key=1 << 63)),
        ("not a member", lambda: pycomm.all_reduce(t, group=torch.distributed.GroupMember.NON_GROUP_MEMBER)),
        ("not a member", lambda: pycomm.send(t, 0, group=torch.distributed.GroupMember.NON_GROUP_MEMBER)),
        ("cannot be copied or pickled", lambda: copy.deepcopy(pycomm.get_group())),
        ("cannot be copied or pickled", lambda: pickle.dumps(pycomm.get_group())),
        ("already initialized", lambda: pycomm.init()),
    ]


def make_mistakes(rank: int) -> list[str]:
    n = pycomm.world_size()
    problems = []
    for expected, call in mistakes(n):
        try:
            call()
            problems.append(f"{expected!r}: did not raise")
        except pycomm.ConfigError as error:
            if expected not in str(error):
                problems.append(f"{expected!r} is not in {error}")
        except Exception as error:
            problems.append(f"{expected!r}: raised {type(error).__name__}: {error}")
        # Nothing has moved, so the ranks still agree on what comes next.
        tensor = torch.ones(2)
        pycomm.all_reduce(tensor)
        if not (tensor == n).all():
            problems.append(f"after {expected!r}: {tensor.tolist()}")
    with pytest.raises(TypeError):
        pycomm.all_reduce(torch.zeros(1), colour="red")  # type: ignore[call-arg]
    with pytest.raises(pycomm.ConfigError, match=rf"all_reduce, group 'world', rank {rank} of {n}"):
        pycomm.all_reduce(3.0)
    return problems


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@everywhere
def test_mistakes_raise_before_a_byte_moves(transport: str) -> None:
    for rank, problems in enumerate(run_ranks(2, make_mistakes, transport=transport)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)
