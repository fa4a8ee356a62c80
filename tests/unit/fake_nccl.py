"""A double of NCCL behind the seam of transport/_nccl_library.py: ranks are threads, memory is the host's.

It keeps the manners of NCCL that a transport could trip over: messages are on their way when the call returns, and the
rank's stream (a thread) does all work in order; a communicator is in progress for a while after a call; a send ends
when its receive takes it, and what is called inside a group is one operation; errors come out of ``state``; nothing
works after abort.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pycomm.ops.reduce import reduce_reference
from pycomm.transport._nccl_library import IN_PROGRESS, SUCCESS
from pycomm.types import ReduceOp

PATIENCE_S = 600.0
_OPS = {"SUM": ReduceOp.SUM, "PROD": ReduceOp.PRODUCT, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX}


class World:
    """What the ranks of one communicator share."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: list[Any] = [None] * world_size
        self.channels: dict[tuple[int, int], queue.Queue[Any]] = {
            (source, target): queue.Queue() for source in range(world_size) for target in range(world_size)
        }

    def tell(self, rank: int, value: Any) -> list[Any]:
        """Returns what every rank tells."""
        self.slots[rank] = value
        self.barrier.wait(PATIENCE_S)
        told = list(self.slots)
        self.barrier.wait(PATIENCE_S)
        return told


class Message(NamedTuple):
    """A send or a receive, put on the stream alone or in a group."""

    communicator: FakeCommunicator
    flat: torch.Tensor
    peer: int
    is_send: bool


class Fake:
    """One rank's NCCL. ``fail_with`` is what ``state`` says from now on; ``is_stuck`` keeps it in progress."""

    def __init__(self, worlds: dict[Any, World]) -> None:
        self.worlds = worlds
        self.fail_with: int | None = None
        self.is_stuck = False
        self.group_sizes: list[int] = []
        self.error: BaseException | None = None
        self._group: list[Message] | None = None
        self._stream: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run_stream, name="fake stream", daemon=True).start()

    def unique_id(self) -> bytes:
        return b"id"

    def connect(self, world_size: int, rank: int, unique_id: bytes) -> FakeCommunicator:
        assert unique_id == b"id"
        return FakeCommunicator(self, self.worlds.setdefault(unique_id, World(world_size)), rank)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self._group = []
        yield
        messages, self._group = self._group, None
        self.group_sizes.append(len(messages))
        self.put(lambda: _exchange(messages))

    def state(self, communicator: FakeCommunicator) -> int:
        assert not communicator.is_gone, "NCCL would crash: the communicator is gone"
        if self.fail_with is not None:
            return self.fail_with
        communicator.polls += 1
        return IN_PROGRESS if self.is_stuck or communicator.polls % 3 else SUCCESS

    def explain(self, communicator: FakeCommunicator) -> str:
        assert not communicator.is_gone, "NCCL would crash: the communicator is gone"
        return "as the fake was told"

    def operator(self, name: str) -> str:
        return name

    def stream(self) -> str:
        return "the current one"

    def mark(self) -> FakeEvent:
        event = FakeEvent()
        self.put(event.happened.set)
        return event

    def post(self, message: Message) -> None:
        """Puts a message on the stream, or into the open group."""
        if self._group is not None:
            self._group.append(message)
        else:
            self.put(lambda: _exchange([message]))

    def put(self, work: Callable[[], Any]) -> None:
        self._stream.put(work)

    def do(self, work: Callable[[], Any]) -> None:
        """Puts ``work`` on the stream and waits: what torch does next to the same memory is done by the host here."""
        self.put(work)
        done = self.mark()
        assert done.happened.wait(PATIENCE_S), f"the stream came to an end: {self.error!r}"

    def _run_stream(self) -> None:
        while self.error is None:
            try:
                self._stream.get()()
            except BaseException as error:  # a test looks at it; events after it never happen
                self.error = error


class FakeEvent:
    """As torch.cuda.Event."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


class FakeCommunicator:
    """As nccl.core.Communicator, the methods that the transport calls."""

    def __init__(self, library: Fake, world: World, rank: int) -> None:
        self.library = library
        self.world = world
        self.rank = rank
        self.polls = 0
        self.splits = 0
        self.ended_by: list[str] = []

    @property
    def is_gone(self) -> bool:
        return bool({"abort", "destroy"} & set(self.ended_by))

    def send(self, sendbuf: torch.Tensor, peer: int, *, stream: Any) -> None:
        self.library.post(Message(self, sendbuf, peer, True))

    def recv(self, recvbuf: torch.Tensor, peer: int, *, stream: Any) -> None:
        self.library.post(Message(self, recvbuf, peer, False))

    def reduce(self, sendbuf: torch.Tensor, recvbuf: Any, op: str, root: int | None = None, *, stream: Any) -> None:
        def work() -> None:
            told = self.world.tell(self.rank, sendbuf.clone())
            if root in (None, self.rank):
                recvbuf.copy_(reduce_reference(told, _OPS[op]))

        self.library.do(work)

    def allreduce(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, op: str, *, stream: Any) -> None:
        self.reduce(sendbuf, recvbuf, op, stream=stream)

    def reduce_scatter(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, op: str, *, stream: Any) -> None:
        def work() -> None:
            told = self.world.tell(self.rank, sendbuf.clone())
            recvbuf.copy_(reduce_reference(told, _OPS[op]).view(len(told), -1)[self.rank])

        self.library.do(work)

    def broadcast(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, *, stream: Any) -> None:
        self.library.do(lambda: recvbuf.copy_(self.world.tell(self.rank, sendbuf.clone())[root]))

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, *, stream: Any) -> None:
        self.library.do(lambda: recvbuf.copy_(torch.cat(self.world.tell(self.rank, sendbuf.clone()))))

    def split(self, color: int | None, key: int) -> FakeCommunicator | None:
        self.splits += 1
        told = self.world.tell(self.rank, (color, key))
        members = sorted((its_key, rank) for rank, (its_color, its_key) in enumerate(told) if its_color == color)
        if color is None:
            return None
        world = self.library.worlds.setdefault((id(self.world), self.splits, color), World(len(members)))
        return FakeCommunicator(self.library, world, members.index((key, self.rank)))

    def finalize(self) -> None:
        self.ended_by.append("finalize")

    def destroy(self) -> None:
        self.ended_by.append("destroy")

    def abort(self) -> None:
        self.ended_by.append("abort")


def _exchange(messages: list[Message]) -> None:
    """All messages of a group at once: a send ends when it is taken, and keeps nothing else of the group waiting."""
    taken = []
    for communicator, flat, peer, is_send in messages:
        if is_send:
            taken.append(threading.Event())
            communicator.world.channels[communicator.rank, peer].put((flat.clone(), taken[-1]))
    for communicator, flat, peer, is_send in messages:
        if not is_send:
            data, its_taken = communicator.world.channels[peer, communicator.rank].get(timeout=PATIENCE_S)
            flat.copy_(data)
            its_taken.set()
    for event in taken:
        assert event.wait(PATIENCE_S), "a send was never taken"
