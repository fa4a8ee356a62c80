"""The NCCL transport over a fake of NCCL: every verb, plans over its messages, and the ways in which NCCL fails."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import Fake

from pycomm.algorithms import find_algorithm
from pycomm.algorithms.executor import Collective, Executor
from pycomm.errors import CollectiveTimeoutError, ConfigError, NativeUnavailableError, PeerLostError, TransportError
from pycomm.topology import Topology
from pycomm.transport import ConnectSpec, nccl
from pycomm.types import ReduceOp

SIZES = (0, 1, 1009)
WORLDS = (1, 2, 3)


def run(world_size: int, body: Callable[[nccl.NcclTransport], Any], timeout_s: float = 600.0) -> list[Any]:
    """Returns ``body(transport)`` of each rank, a thread; the transport is closed afterwards."""
    worlds: dict[Any, Any] = {}
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[str] = []

    def rank_main(rank: int) -> None:
        try:
            spec = ConnectSpec(
                rank=rank, world_size=world_size, store=store, host_ids=("host",) * world_size, timeout_s=timeout_s
            )
            transport = nccl.join(Fake(worlds), spec)
            results[rank] = body(transport)
            transport.close()
        except BaseException:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not failures and not any(thread.is_alive() for thread in threads), "\n".join(failures) or "a rank hangs"
    return results


def alone(timeout_s: float = 600.0) -> tuple[nccl.NcclTransport, Fake]:
    """A world of one, and its fake."""
    fake = Fake({})
    spec = ConnectSpec(rank=0, world_size=1, store=dist.HashStore(), host_ids=("host",), timeout_s=timeout_s)
    return nccl.join(fake, spec), fake


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) % 7 + rank).to(dtype)


def finish(transport: nccl.NcclTransport) -> None:
    """Waits for the stream, as a user of CUDA does before he looks at results."""
    transport.barrier(None)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions(world_size: int, dtype: torch.dtype) -> None:
    def body(transport: nccl.NcclTransport) -> None:
        rank = transport.rank
        for numel in SIZES:
            total = sum(values(r, world_size * numel, torch.float64) for r in range(world_size))
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
                if not transport.supports("all_reduce", dtype, op):
                    assert dtype.is_floating_point == (op is ReduceOp.MAX)
                    continue
                expected = {ReduceOp.SUM: total, ReduceOp.AVG: total / world_size}.get(
                    op, values(world_size - 1, world_size * numel, torch.float64)
                )
                whole, part = values(rank, world_size * numel, dtype), torch.empty(numel, dtype=dtype)
                transport.reduce_scatter_single(part, whole.clone(), op, 1.0, None)
                rooted = whole.clone()
                transport.reduce(rooted, rooted, op, 1.0, world_size - 1, None)
                transport.all_reduce(whole, whole, op, 1.0, None)
                finish(transport)
                assert torch.equal(whole, expected.to(dtype))
                assert torch.equal(part, expected.to(dtype)[rank * numel : (rank + 1) * numel])
                if rank == world_size - 1:
                    assert torch.equal(rooted, expected.to(dtype))

    run(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
def test_moves(world_size: int) -> None:
    def body(transport: nccl.NcclTransport) -> None:
        rank, root = transport.rank, world_size - 1
        for numel in SIZES:
            joined = torch.cat([values(r, numel, torch.bool) for r in range(world_size)])
            own = values(rank, numel, torch.bool)
            copy, gathered, rooted = own.clone(), torch.empty_like(joined), torch.empty_like(joined)
            mine = torch.empty_like(own)
            transport.broadcast(copy, root, None)
            transport.all_gather_single(gathered, own, None)
            transport.gather(rooted if rank == root else None, own, root, None)
            transport.scatter(mine, joined if rank == root else None, root, None)
            finish(transport)
            assert torch.equal(copy, values(root, numel, torch.bool)) and torch.equal(gathered, joined)
            assert torch.equal(mine, own) and (rank != root or torch.equal(rooted, joined))

    run(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
def test_uneven_all_to_all(world_size: int) -> None:
    def body(transport: nccl.NcclTransport) -> None:
        rank = transport.rank
        rows = [[(source + 2 * target) % 3 * 5 for target in range(world_size)] for source in range(world_size)]
        sent = torch.cat([torch.full((rows[rank][peer],), 10 * rank + peer) for peer in range(world_size)])
        expected = torch.cat([torch.full((rows[peer][rank],), 10 * peer + rank) for peer in range(world_size)])
        received = torch.zeros_like(expected)
        transport.all_to_all_single(received, sent, [row[rank] for row in rows], rows[rank], None)
        finish(transport)
        assert torch.equal(received, expected)

    run(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "recursive_doubling", "tree"])
def test_plans_over_messages(world_size: int, algorithm: str) -> None:
    """Several segments, so that the groups of messages hold those of several rounds."""

    def body(transport: nccl.NcclTransport) -> torch.Tensor:
        transport.segment_bytes = 1024
        plan = find_algorithm(algorithm).plan("all_reduce", transport.rank, Topology.flat(world_size))
        tensor = values(transport.rank, 5003)
        call = Collective(verb="all_reduce", input=tensor, output=tensor, op=ReduceOp.SUM)
        Executor(transport).run(plan, call, None)
        finish(transport)
        return tensor

    expected = sum(values(rank, 5003) for rank in range(world_size))
    assert all(torch.equal(result, expected) for result in run(world_size, body))


def test_two_that_both_send_first() -> None:
    """As sends and receives of their own, one after the other on a stream, these would wait for each other."""

    def body(transport: nccl.NcclTransport) -> list[int]:
        peer, received = 1 - transport.rank, torch.zeros(2, 100)
        sends = [transport.isend(torch.full((100,), float(10 * transport.rank + tag)), peer, tag) for tag in (1, 2)]
        receives = [transport.irecv(received[tag - 1], peer, tag) for tag in (1, 2)]
        for request in (*sends, *receives):
            request.wait(60)
        assert torch.equal(received[:, 0], torch.tensor([10.0 * peer + 1, 10.0 * peer + 2]))
        return transport._library.group_sizes

    assert run(2, body) == [[4], [4]]


def test_messages_to_self() -> None:
    transport, fake = alone()
    received = torch.zeros(5)
    receive, send = transport.irecv(received, 0), transport.isend(torch.arange(5.0), 0)
    assert fake.group_sizes == []  # noted only
    send.wait()
    receive.wait()
    assert receive.test() and torch.equal(received, torch.arange(5.0)) and fake.group_sizes == [2]
    with pytest.raises(ConfigError, match="has to know the sender"):
        transport.irecv(received, None)


def test_split() -> None:
    def body(transport: nccl.NcclTransport) -> Any:
        odd = transport.rank % 2
        child = transport.split([2, 0] if not odd else None, 1)
        if child is None:
            return None
        tensor = torch.full((3,), float(transport.rank + 1))
        child.all_reduce(tensor, tensor, ReduceOp.SUM, 1.0, None)
        finish(child)
        assert torch.equal(tensor, torch.full((3,), 4.0))
        return child.rank, child.world_size

    assert run(3, body) == [(1, 2), None, (0, 2)]


@pytest.mark.parametrize("code, kind", [(6, PeerLostError), (1, TransportError), (3, TransportError)])
def test_an_error_ends_the_group(code: int, kind: type[TransportError]) -> None:
    transport, fake = alone()
    communicator, message = transport._communicator, transport.isend(torch.ones(3), 0)
    fake.fail_with = code
    with pytest.raises(kind, match="as the fake was told"):
        transport.all_reduce(torch.ones(3), torch.ones(3), ReduceOp.SUM, 1.0, None)
    assert communicator.ended_by == ["abort"]
    for call in (
        message.wait,
        message.test,
        lambda: transport.barrier(None),
        lambda: transport.isend(torch.ones(3), 0),
    ):
        with pytest.raises(TransportError, match="make a new group|make a new one"):
            call()
    transport.close()
    assert communicator.ended_by == ["abort"]


def test_a_refused_call_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, _ = alone()
    communicator = transport._communicator

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")

    monkeypatch.setattr(communicator, "broadcast", refuse)
    with pytest.raises(TransportError, match="broadcast failed in NCCL: NCCL_ERROR_INVALID_ARGUMENT"):
        transport.broadcast(torch.ones(3), 0, None)
    assert communicator.ended_by == ["abort"]


def test_timeouts() -> None:
    """Of a call that does not settle, and of a message that does not come."""
    for is_stuck in (True, False):
        transport, fake = alone()
        communicator, fake.is_stuck = transport._communicator, is_stuck
        with pytest.raises(CollectiveTimeoutError, match=r"did not finish within 0\.05 s"):
            if is_stuck:
                transport.broadcast(torch.ones(3), 0, 0.05)
            else:
                transport.irecv(torch.ones(3), 0).wait(0.05)
        assert communicator.ended_by == ["abort"]


def test_a_rank_that_does_not_come() -> None:
    spec = ConnectSpec(rank=1, world_size=2, store=dist.HashStore(), host_ids=("host",) * 2, timeout_s=0.05)
    with pytest.raises(CollectiveTimeoutError, match="rank 0 did not start NCCL"):
        nccl.join(Fake({}), spec)


def test_close(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, fake = alone()
    communicator = transport._communicator
    transport.close()
    transport.close()
    assert communicator.ended_by == ["finalize", "destroy"]
    with pytest.raises(TransportError, match="closed"):
        transport.barrier(None)
    monkeypatch.setattr(nccl, "_CLOSE_S", 0.02)  # others have not closed: this rank does not wait for them
    transport, fake = alone()
    communicator, fake.is_stuck = transport._communicator, True
    transport.close()
    assert communicator.ended_by == ["finalize", "abort"]


def test_what_is_missing_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu runs NCCL itself")
    spec = ConnectSpec(rank=0, world_size=1, store=dist.HashStore(), host_ids=("host",), timeout_s=1.0)
    with pytest.raises(NativeUnavailableError, match="needs a CUDA device"):
        nccl.connect(spec)


def test_the_fake_has_the_methods_of_nccl4py() -> None:
    import inspect

    core = pytest.importorskip("nccl.core", reason="nccl4py is not installed: pip install 'pycomm[cuda13]'")
    from fake_nccl import FakeCommunicator

    for name in ("send", "recv", "reduce", "allreduce", "reduce_scatter", "broadcast", "allgather"):
        real = inspect.signature(getattr(core.Communicator, name)).parameters
        fake = inspect.signature(getattr(FakeCommunicator, name)).parameters
        assert set(fake) <= set(real), name
    for name in ("split", "finalize", "destroy", "abort", "get_async_error", "get_last_error"):
        assert callable(getattr(core.Communicator, name))
    assert {"SUM", "PROD", "MIN", "MAX"} <= {op.name for op in core.NcclRedOp}
