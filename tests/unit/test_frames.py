"""Small collectives as one swap of frames: every verb, on ranks that are threads, over frames of any length."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from pycomm.algorithms._agreement import FRAMES, Agreement, fits_frames
from pycomm.algorithms.executor import Collective
from pycomm.errors import CollectiveMismatchError, PeerLostError
from pycomm.transport._mpi_frames import Expected
from pycomm.transport._wording import CODES
from pycomm.transport.base import Request, Transport
from pycomm.types import DTYPES, ReduceOp

if TYPE_CHECKING:
    from pycomm.transport.base import MeanwhileOnHost

RANKS = 3


class Threads(Transport):
    """Ranks that are threads, and compare nothing: they share frames, of which no more comes than is sent."""

    name = "threads"
    native = frozenset({"all_reduce"})

    def __init__(self, world: SimpleNamespace, rank: int, frame_bytes: int) -> None:
        self.rank, self.world_size, self.timeout_s = rank, RANKS, 600.0
        self.frame_bytes = frame_bytes
        self._world = world

    def exchange_frames(
        self,
        frame: torch.Tensor,
        nbytes: int,
        verb: str,
        timeout_s: float | None,
        meanwhile: MeanwhileOnHost | None = None,
    ) -> Sequence[torch.Tensor]:
        rows = torch.full((RANKS, frame.numel()), 0xEE, dtype=torch.uint8)
        self._world.sent[self.rank] = frame[:nbytes].clone()
        self._world.barrier.wait(10)
        for row, sent in zip(rows, self._world.sent, strict=True):
            row[: len(sent)] = sent
        self._world.barrier.wait(10)
        if meanwhile is not None:
            meanwhile(rows[: self._world.on_host].unbind())
        return rows.unbind()

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        raise NotImplementedError

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        raise NotImplementedError

    def split(self, ranks: Sequence[int] | None, key: int) -> Transport | None:
        raise NotImplementedError

    def close(self) -> None:
        return None


def on_all_ranks(frame_bytes: int, act: Any) -> list[Any]:
    """Runs ``act(rank, transport, agreement)`` on every rank."""
    world = SimpleNamespace(sent=[None] * RANKS, barrier=threading.Barrier(RANKS), on_host=2)

    def run(rank: int) -> Any:
        transport = Threads(world, rank, frame_bytes)
        return act(rank, transport, Agreement(transport))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def mine(rank: int, numel: int = 7) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) + 100 * rank


TOTAL = sum(mine(rank, 21) for rank in range(RANKS))


@pytest.mark.parametrize("frame_bytes", [1024, 4096])
def test_every_verb_by_frames(frame_bytes: int) -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        def run(verb: str, **arguments: Any) -> None:
            call = Collective(verb=verb, **arguments)
            assert fits_frames(transport, call), verb
            agreement.run(call, FRAMES, None)

        t = mine(rank, 21)
        run("all_reduce", input=t, output=t, op=ReduceOp.SUM)
        assert torch.equal(t, TOTAL)
        t = mine(rank)
        run("reduce", input=t, output=t if rank == 2 else None, op=ReduceOp.SUM, root=2)
        assert torch.equal(t, TOTAL[:7] if rank == 2 else mine(rank))
        part = torch.empty(7, dtype=torch.int32)
        run("reduce_scatter_single", input=mine(rank, 21), output=part, op=ReduceOp.SUM)
        assert torch.equal(part, TOTAL[7 * rank : 7 * rank + 7])
        t = mine(rank)
        run("broadcast", input=t, output=t, root=1)
        assert torch.equal(t, mine(1))
        whole = torch.empty(21, dtype=torch.int32)
        run("all_gather_single", input=mine(rank), output=whole)
        assert torch.equal(whole, torch.cat([mine(each) for each in range(RANKS)]))
        whole = torch.empty(21, dtype=torch.int32) if rank == 0 else None
        run("gather", input=mine(rank), output=whole, root=0)
        assert whole is None or torch.equal(whole, torch.cat([mine(each) for each in range(RANKS)]))
        run("scatter", input=mine(1, 21) if rank == 1 else None, output=part, root=1)
        assert torch.equal(part, mine(1, 21)[7 * rank : 7 * rank + 7])
        run("barrier")

    on_all_ranks(frame_bytes, act)


def test_what_a_root_alone_needs_is_sent_to_all_only_while_that_takes_no_time() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        for numel in (2048, 2049):  # 16 KiB to two other ranks
            t = torch.ones(numel)
            assert fits_frames(transport, Collective(verb="gather", input=t)) == (numel == 2048)
            assert fits_frames(transport, Collective(verb="all_gather_single", input=t))

    on_all_ranks(1 << 16, act)


def by_the_shortest_way(agreement: Agreement, t: torch.Tensor) -> None:
    short(agreement, "all_reduce", t.nbytes, t, ReduceOp.SUM)


def short(agreement: Agreement, verb: str, nbytes: int, *arguments: Any) -> None:
    has_lists = any(isinstance(each, list) for each in arguments) or verb in ("gather", "scatter")
    assert agreement.short_call.read(CODES[verb], has_lists, nbytes - 1, *arguments) == -1
    assert agreement.short_call.read(CODES[verb], has_lists, nbytes, *arguments) == nbytes
    agreement.run_short(verb, is_framed=True, seq=0, timeout_s=None)


def test_the_shortest_way_meets_the_other_one() -> None:
    """Ranks may make one call by either, whose headers are written in C++ and in Python."""

    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        t = mine(rank, 21)
        if rank == 1:
            agreement.run(Collective(verb="all_reduce", input=t, output=t, op=ReduceOp.SUM), FRAMES, None)
        else:
            by_the_shortest_way(agreement, t)
        assert torch.equal(t, TOTAL)
        t = mine(rank)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce\(SUM.*\n.*rank 1: reduce\(SUM"):
            if rank == 1:
                agreement.run(Collective(verb="reduce", input=t, output=None, op=ReduceOp.SUM), FRAMES, None)
            else:
                by_the_shortest_way(agreement, t)
        assert torch.equal(t, mine(rank))

    on_all_ranks(1024, act)


def test_every_verb_of_the_shortest_way_meets_the_other_one() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        def run(verb: str, nbytes: int, arguments: tuple[Any, ...], **others: Any) -> None:
            if rank == others.pop("ordinary"):
                agreement.run(Collective(verb=verb, **others), FRAMES, None)
            else:
                short(agreement, verb, nbytes, *arguments)

        for ordinary in range(RANKS):
            for root in range(RANKS):
                t = mine(rank)
                output = t if rank == root else None
                run("reduce", 28, (t, root), input=t, output=output, op=ReduceOp.SUM, root=root, ordinary=ordinary)
                assert torch.equal(t, TOTAL[:7] if rank == root else mine(rank))
                t = mine(rank)
                run("broadcast", 28, (t, root), input=t, output=t, root=root, ordinary=ordinary)
                assert torch.equal(t, mine(root))
            t, part = mine(rank, 21), torch.empty(7, dtype=torch.int32)
            largest = torch.stack([mine(each, 21) for each in range(RANKS)]).amax(0)
            arguments = (part, t, ReduceOp.MAX)
            run("reduce_scatter_single", 84, arguments, input=t, output=part, op=ReduceOp.MAX, ordinary=ordinary)
            assert torch.equal(part, largest[7 * rank : 7 * rank + 7]) and torch.equal(t, mine(rank, 21))
            whole, part = torch.zeros(21, dtype=torch.int32), mine(rank)
            own = whole[7 * rank : 7 * rank + 7]  # in place
            for input_ in (part, own.copy_(part)):
                run("all_gather_single", 28, (whole, input_), input=input_, output=whole, ordinary=ordinary)
                assert torch.equal(whole, torch.cat([mine(each) for each in range(RANKS)]))
                each = [torch.zeros(7, dtype=torch.int32) for _ in range(RANKS)]
                run("all_gather_single", 28, (each, input_), input=input_, output=whole, ordinary=ordinary)
                gathered = whole if rank == ordinary else torch.cat(each)
                assert torch.equal(gathered, torch.cat([mine(each) for each in range(RANKS)]))
            parts = list(t.view(RANKS, 7))
            arguments = (parts[rank], parts, ReduceOp.MAX)  # in place
            out = torch.empty(7, dtype=torch.int32) if rank == ordinary else parts[rank]
            run("reduce_scatter_single", 84, arguments, input=t, output=out, op=ReduceOp.MAX, ordinary=ordinary)
            assert torch.equal(out, largest[7 * rank : 7 * rank + 7])
            run("barrier", 0, (), ordinary=ordinary)
            for root in range(RANKS):
                part, whole, is_root = mine(rank), torch.zeros(21, dtype=torch.int32), rank == root
                each = list(whole.view(RANKS, 7))
                arguments = (part, each if is_root else None, root)
                run(
                    "gather", 28, arguments, input=part, output=whole if is_root else None, root=root, ordinary=ordinary
                )
                gathered = torch.cat([mine(each) for each in range(RANKS)])
                assert torch.equal(whole, gathered if is_root else torch.zeros(21, dtype=torch.int32))
                t, part = mine(rank, 21), torch.empty(7, dtype=torch.int32)
                arguments = (part, list(t.view(RANKS, 7)) if is_root else None, root)
                run("scatter", 84, arguments, input=t if is_root else None, output=part, root=root, ordinary=ordinary)
                assert torch.equal(part, mine(root, 21)[7 * rank : 7 * rank + 7])

    on_all_ranks(1024, act)


def test_an_all_to_all_is_carried_by_frames_if_all_ranks_send_little() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        def run(splits: list[list[int]], may_carry: bool = True) -> bool:
            """``splits[r]`` is what rank r sends to each."""
            sends, expects = tuple(splits[rank]), tuple(row[rank] for row in splits)
            sent = torch.cat(
                [torch.full((length,), 10 * rank + to, dtype=torch.int16) for to, length in enumerate(sends)]
            )
            output = torch.zeros(sum(expects), dtype=torch.int16)
            call = Collective(
                verb="all_to_all_single", input=sent, output=output, input_splits=sends, output_splits=expects
            )
            is_complete = agreement.run(call, "native", None, may_carry=may_carry)
            wanted = [torch.full((length,), 10 * r + rank, dtype=torch.int16) for r, length in enumerate(expects)]
            assert torch.equal(output, torch.cat(wanted) if is_complete else torch.zeros_like(output))
            return is_complete

        assert run([[1, 2, 3], [4, 0, 6], [0, 0, 0]])
        assert run([[0] * RANKS] * RANKS)
        numbers_bytes = 8 * (1 + 2 * RANKS)
        most = (1024 - 64 - numbers_bytes) // 2
        assert run([[0, most, 0], [1, 1, 1], [0, 0, most]])
        assert not run([[0, most, 0], [1, 1, 1], [0, 0, most + 1]]), "the others find out that one does not"
        assert not run([[1, 1, 1]] * RANKS, may_carry=rank != 1), "one named the algorithm"
        with pytest.raises(CollectiveMismatchError, match="rank 0 sends"):
            run([[1, 2 + (rank == 2), 3], [4, 0, 6], [0, 0, 0]] if rank else [[1, 1, 3], [4, 0, 6], [0, 0, 0]])

    on_all_ranks(1024, act)


def test_the_shortest_way_leaves_to_the_other_one_what_is_not_plain() -> None:
    agreement = Agreement(Threads(SimpleNamespace(), 1, 1024))
    t, part = torch.ones(6), torch.ones(2)
    for verb, arguments in (
        ("barrier", (t,)),
        ("all_reduce", ()),
        ("all_reduce", (t, ReduceOp.BXOR)),
        ("all_reduce", (t, ReduceOp.SUM, None)),
        ("all_reduce", (t[::2],)),
        ("reduce", (t,)),
        ("reduce", (t, RANKS)),
        ("reduce", (t, -1, ReduceOp.SUM)),
        ("broadcast", (t,)),
        ("broadcast", (t, "0")),
        ("broadcast", (torch.ones(0), 0)),
        ("all_gather_single", (t, torch.ones(3))),
        ("all_gather_single", (t, part.double())),
        ("all_gather_single", (t, t[:2])),  # the place of another rank
        ("reduce_scatter_single", (t, part)),
        ("reduce_scatter_single", (t[3:5], t)),
        ("reduce_scatter_single", (part, t, ReduceOp.PREMUL_SUM)),
        ("gather", (part, [part] * RANKS, 0)),  # a list, and not of the root
        ("gather", (part, None, 1)),
        ("gather", (part, [part.clone()] * RANKS, 1)),
        ("gather", (part, [part.clone() for _ in range(RANKS - 1)], 1)),
        ("gather", (part, None, RANKS)),
        ("scatter", (part, None, 1)),
        ("scatter", (part, [part.clone(), part.clone(), torch.ones(3)], 1)),
        ("scatter", (part, [part, part.clone(), part.clone()], 1)),  # written before it is read
        ("all_gather_single", ([part.clone() for _ in range(RANKS)], part, None)),
        ("all_gather_single", ([part.clone().double() for _ in range(RANKS)], part)),
        ("reduce_scatter_single", (part, [part] * RANKS)),
        ("all_to_all_single", (t, t.clone())),
    ):
        has_lists = any(isinstance(each, list) for each in arguments) or verb in ("gather", "scatter")
        assert agreement.short_call.read(CODES[verb], has_lists, 4096, *arguments) == -1, (verb, arguments)


def test_the_shortest_way_reduces_every_type_as_the_other_does() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        for dtype in DTYPES:
            if dtype.family == "bool":
                continue
            torch_dtype = getattr(torch, dtype.name)
            ordinary, shortest = ((torch.arange(9) + rank).to(torch.float32).to(torch_dtype) for _ in range(2))
            call = Collective(verb="all_reduce", input=ordinary, output=ordinary, op=ReduceOp.SUM)
            agreement.run(call, FRAMES, None)
            if dtype.family == "complex":  # the operands of a view are not what its memory holds
                assert agreement.short_call.read(CODES["all_reduce"], False, 4096, shortest.conj(), ReduceOp.SUM) == -1
                assert (
                    agreement.short_call.read(CODES["all_reduce"], False, 4096, torch._neg_view(shortest), ReduceOp.SUM)
                    == -1
                )
            by_the_shortest_way(agreement, shortest)
            assert torch.equal(ordinary.view(torch.uint8), shortest.view(torch.uint8)), dtype.name

    on_all_ranks(1024, act)


def test_who_makes_a_group_may_know_of_a_lost_rank_and_is_no_mismatch_then() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        def check_lost(doing: str) -> NoReturn:
            raise PeerLostError(f"{doing}: rank 7 is lost", rank=7)

        barrier = Collective(verb="barrier", input=None, output=None)
        transport.check_lost = check_lost  # type: ignore[method-assign]
        for others in ([0, 2], [0, 1, 2]):  # one rank has been told, those that it does not list have not
            with pytest.raises(PeerLostError, match="rank 7"):
                if rank == 0:
                    agreement.agree_on_members([0, 2], None)
                elif others == [0, 2]:
                    agreement.run(barrier, FRAMES, None)
                else:
                    agreement.agree_on_members(others, None)
        with pytest.raises(CollectiveMismatchError):
            if rank == 0:
                by_the_shortest_way(agreement, torch.ones(3))
            else:
                agreement.run(barrier, FRAMES, None)

    on_all_ranks(1024, act)


def test_frames_of_different_lengths_are_a_mismatch_and_the_ranks_go_on() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        for numel in (1 + rank, 900 if rank == 1 else 3):
            t = torch.ones(numel)
            with pytest.raises(CollectiveMismatchError, match="rank 0: all_reduce.*\n.*rank 1: all_reduce"):
                by_the_shortest_way(agreement, t)
            assert (t == 1).all()
        t = torch.ones(900)
        by_the_shortest_way(agreement, t)
        assert (t == RANKS).all()

    on_all_ranks(4096, act)


def test_what_is_done_meanwhile_is_done_once_the_ranks_of_the_host_agree() -> None:
    def act(rank: int, transport: Transport, agreement: Agreement) -> None:
        done: list[str] = []

        def compare(numel: int, others: str) -> None:
            assert (
                agreement.short_call.read(CODES["all_reduce"], False, 4096, torch.ones(numel), ReduceOp.SUM)
                == 4 * numel
            )
            agreement.run_short("all_reduce", False, 0, None, partial(done.append, others))

        compare(900, "all agree")
        for numel, others in ((800 if rank == 2 else 900, "the other host differs"), (800 + rank, "this one does")):
            with pytest.raises(CollectiveMismatchError):
                compare(numel, others)
        assert done == (["all agree", "the other host differs"] if rank < 2 else ["all agree"])

    on_all_ranks(1024, act)


def test_lengths_are_expected_as_they_came_before() -> None:
    """MPI's frames: calls in turns are foreseen from the second round on, whatever their order within one."""
    for turns in ([3], [0, 5], [0, 2, 7, 4]):
        expected = Expected()
        missed = 0
        for length in 5 * turns:
            missed += expected.next() != length
            expected.was(length)
        assert missed <= 1 + len(turns)
