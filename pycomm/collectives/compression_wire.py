"""What a compressed collective stands on: the transport's collectives, counted and timed; buffers; a report."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..algorithms.executor import Collective
from ..algorithms.selection import Choice
from ..errors import CollectiveMismatchError
from ..transport.base import FIRST_OWN_TAG, Request
from ..types import ReduceOp

if TYPE_CHECKING:
    from .group import Group

__all__ = ["CompressionReport", "Timer", "Tools", "Wire", "Workspace"]

_AGREE_BYTES = 256


class CompressionReport(NamedTuple):
    """What compressed collectives moved and took on this rank.

    ``wire_bytes`` are what this rank put on the wire, ``logical_bytes`` what it would have without compression, both
    for algorithms that send no byte twice. Times are seconds; encoding and decoding may run beside the exchange, so
    that their sum can exceed ``wall_s``. ``relative_error`` is |result - exact| / |exact| (2-norms) of the last call,
    None unless it was asked for.
    """

    calls: int = 0
    logical_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    wall_s: float = 0.0
    relative_error: float | None = None

    @property
    def ratio(self) -> float:
        """How many times fewer bytes went over the wire."""
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def plus(self, other: CompressionReport) -> CompressionReport:
        """Returns the sum of both, with the error of ``other``."""
        added = [mine + theirs for mine, theirs in zip(self[:-1], other[:-1], strict=True)]
        return CompressionReport._make([*added, other.relative_error])


class Timer:
    """Nanoseconds spent on each of the three things."""

    def __init__(self) -> None:
        self.encode_ns = self.exchange_ns = self.decode_ns = 0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Counts what happens inside as encoding."""
        start_ns = time.perf_counter_ns()
        yield
        self.encode_ns += time.perf_counter_ns() - start_ns

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Counts what happens inside as decoding."""
        start_ns = time.perf_counter_ns()
        yield
        self.decode_ns += time.perf_counter_ns() - start_ns


class Workspace:
    """Buffers that live as long as the group, because fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], torch.Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the buffer ``(numel,)`` for ``purpose``, with what was there before; valid until asked for again."""
        needed = numel * dtype.itemsize
        raw = self._buffers.get((purpose, device))
        if raw is None or raw.numel() < needed:
            raw = self._buffers[purpose, device] = torch.zeros(needed, dtype=torch.uint8, device=device)
        return raw[:needed].view(dtype)

    def like(self, purpose: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a float32 buffer for the elements of ``tensor``."""
        return self.take(purpose, tensor.numel(), torch.float32, tensor.device)


class Tools(NamedTuple):
    """What the wires of one call share."""

    workspace: Workspace
    timer: Timer
    pool: Callable[[], ThreadPoolExecutor]


class Wire:
    """The collectives of one compressed call of one group, in order, until ``timeout_s`` has passed.

    ``inside`` and ``between``, if there are, join the ranks of this host, and those with this local rank on all hosts:
    then compression applies between hosts only.
    """

    def __init__(self, group: Group, tools: Tools, algorithm: str | None, timeout_s: float) -> None:
        self.rank, self.world_size, self.device = group.rank, group.world_size, group.control_device
        self.workspace, self.timer = tools.workspace, tools.timer
        self.sent_bytes = 0
        self.inside: Wire | None = None
        self.between: Wire | None = None
        self._is_agreed = False  # by ``agree``; what is exchanged then follows from what was compared
        self._group = group
        self._algorithm = algorithm
        self._deadline = time.monotonic() + timeout_s
        self._pool = tools.pool

    def all_reduce(self, flat: torch.Tensor) -> None:
        """``flat (numel,)`` becomes the sum over the ranks."""
        self.sent_bytes += 2 * flat.nbytes * (self.world_size - 1) // self.world_size
        self._carry(Collective(verb="all_reduce", input=flat, output=flat, op=ReduceOp.SUM))

    def reduce_scatter(self, part: torch.Tensor, flat: torch.Tensor) -> None:
        """``part (numel,)`` = this rank's share of the sum of ``flat (world_size * numel,)``; it may be that part of
        ``flat``.
        """
        self.sent_bytes += part.nbytes * (self.world_size - 1)
        collective = Collective(verb="reduce_scatter_single", input=flat, output=part, op=ReduceOp.SUM)
        is_own_part = part.data_ptr() == flat[self.rank * part.numel() :].data_ptr()
        if is_own_part and not self._scatters_in_place(collective):
            scratch = self.workspace.take("scattered", part.numel(), part.dtype, part.device)
            self._carry(collective._replace(output=scratch))
            part.copy_(scratch)
        else:
            self._carry(collective)

    def all_gather(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """``whole (world_size * numel,)`` = the ranks' ``flat (numel,)``."""
        self.sent_bytes += flat.nbytes * (self.world_size - 1)
        self._carry(Collective(verb="all_gather_single", input=flat, output=whole))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Slot j of ``sent (world_size * numel,)`` goes to rank j; slot i of ``received`` came from rank i."""
        self.sent_bytes += sent.nbytes * (self.world_size - 1) // self.world_size
        splits = (sent.numel() // self.world_size,) * self.world_size
        self._carry(
            Collective(verb="all_to_all_single", input=sent, output=received, input_splits=splits, output_splits=splits)
        )

    def start(self, flat: torch.Tensor, peer: int, number: int, *, is_send: bool) -> Request:
        """Starts a message of round ``number``, 0 or 1, to or from ``peer``; those of a round keep their order."""
        self.sent_bytes += flat.nbytes * is_send
        transport = self._group.transport
        return (transport.isend if is_send else transport.irecv)(flat, peer, FIRST_OWN_TAG + number)

    @contextmanager
    def messages(self) -> Iterator[float]:
        """Gives the deadline of ``start``'s messages. After an error this group is closed: they may still be under way.

        What is not spent on encoding and decoding counts as exchange.
        """
        timer, start_ns = self.timer, time.perf_counter_ns()
        exchanged_ns, codec_ns = timer.exchange_ns, timer.encode_ns + timer.decode_ns
        try:
            yield self._deadline
        except BaseException:
            self._group.close()
            raise
        codec_ns = timer.encode_ns + timer.decode_ns - codec_ns
        timer.exchange_ns = exchanged_ns + time.perf_counter_ns() - start_ns - codec_ns

    def tell(self, mine: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' ``mine (numel,)``, which says something of the call, on the CPU: ``(world_size, numel)``.

        By no algorithm that the caller names: that is for payloads.
        """
        told = torch.empty(self.world_size * mine.numel(), dtype=mine.dtype, device=self.device)
        collective = Collective(verb="all_gather_single", input=mine.to(self.device), output=told)
        self._execute(collective, self._group.engine.choose(collective))
        return told.cpu().view(self.world_size, -1)

    def agree(self, description: str) -> None:
        """Raises CollectiveMismatchError on every rank unless all of them pass the same ``description``, and name the
        same algorithm."""
        asked = "" if self._algorithm is None else f", algorithm {self._algorithm}"
        rows = self.tell(_record(f"{description}{asked}"))
        if bool((rows == rows[0]).all()):
            for wire in (self, self.inside, self.between):
                if wire is not None:
                    wire._is_agreed = True
            return
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise CollectiveMismatchError(
            f"the ranks differ in a compressed collective: {listed}; make the calls equal on all ranks"
        )

    @contextmanager
    def helper(self) -> Iterator[Callable[..., Future[None]]]:
        """Gives what submits jobs to the helper thread, which runs them in order; at the end all have run.

        The error of a job is raised here.
        """
        jobs: list[Future[None]] = []

        def submit(job: Callable[..., None], *arguments: object) -> Future[None]:
            jobs.append(self._pool().submit(job, *arguments))
            return jobs[-1]

        try:
            yield submit
        finally:
            for job in jobs:
                job.exception()
        for job in jobs:
            job.result()

    def _scatters_in_place(self, collective: Collective) -> bool:
        transport, choice = self._group.transport, self._group.engine.choose(collective, self._algorithm)
        return transport.scatters_in_place and choice.plan is None

    def _carry(self, collective: Collective) -> None:
        """Runs it as the caller asks, unless the payload has no bytes: on all ranks then, as their arguments agree."""
        if collective.input is not None and collective.input.numel():
            self._execute(collective, self._group.engine.choose(collective, self._algorithm))

    def _execute(self, collective: Collective, choice: Choice) -> None:
        start_ns = time.perf_counter_ns()
        left_s = max(self._deadline - time.monotonic(), 1e-3)
        self._group.engine.run(collective, choice, left_s, self._is_agreed)
        self.timer.exchange_ns += time.perf_counter_ns() - start_ns


def _record(description: str) -> torch.Tensor:
    """Returns ``description`` as bytes of a fixed length: cut if it is long, then with a checksum of the whole."""
    raw = description.encode()
    if len(raw) > _AGREE_BYTES:
        raw = raw[: _AGREE_BYTES - 12] + f"... {zlib.crc32(raw):08x}".encode()
    return torch.frombuffer(bytearray(raw.ljust(_AGREE_BYTES, b"\0")), dtype=torch.uint8)
