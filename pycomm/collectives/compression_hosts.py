"""A compressed all_reduce between hosts: a host adds up in shared memory, and compresses what crosses the network.

[Note: the way of a segment]
 1. The ranks of a host reduce-scatter the segment: each then holds the host's sum of its *share*, where the total of
    that share is to be: no other memory is needed, and where the input lies there too, its cache lines are at hand.
 2. It encodes the share and swaps payloads with its *column*, its likes on the other hosts: where sums can be encoded
    again in two rounds (chunks are scattered, added up, encoded, and gathered), for GATHER in one.
 3. The ranks of a host gather the payloads of all shares, and each decodes them all: so what is gathered inside a host
    is small too, and all ranks decode the same bytes.
Segments take turns (``transport/_turns.py``): a rank encodes and decodes some while others travel. What a sparse codec
selects, it selects from the whole share, so there the segment is everything.

Where payloads go in two rounds, what was sent is not waited for: [Note: sends are not waited for] in
``transport/_mixed_reduce.py`` says why, and it holds here word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..compression import Combine, Context, Message
from ..transport._turns import WINDOW, Rounds, end_sends, run_in_turns
from ..transport.base import Request
from .compression_chunks import Chunks, chunk_numel_of
from .compression_wire import Wire

__all__ = ["BetweenHosts"]

# Payload of a segment's share, at least and at most, and how many segments there are where these allow it. Long ones
# spare the cores: 64 MiB by int8 between two hosts, four ranks on two cores, took less at 2 and 3 MiB than at 1.
_PAYLOAD_BYTES = 1 << 20, 3 << 20
_SEGMENTS = 3
_ALIGN = 16  # payloads start at multiples of this many bytes


class BetweenHosts:
    """One all_reduce: ``total (numel,)`` = what the ranks send of ``message.input``; the two may be the same memory."""

    def __init__(self, message: Message, total: torch.Tensor, inside: Wire, between: Wire, context: Context) -> None:
        codec = message.codec
        self._message, self._codec, self._total = message, codec, total
        self._inside, self._between = inside, between
        self._context = context._replace(rank=between.rank, world_size=between.world_size)
        numel = message.input.numel()
        share = -(-numel // inside.world_size)
        is_again = codec.combine is Combine.REQUANTIZE or (codec.combine is Combine.SUM and codec.is_elementwise)
        self._path: Callable[[int, int, int], Rounds] = self._requantize if is_again else self._gather
        if codec.combine is Combine.SUM and not is_again:
            self._path = self._sum
        is_cut = not codec.is_sparse and self._path != self._sum
        self._sent: list[list[Request]] = [[] for _ in range(WINDOW)]  # by turn; those that are not waited for yet
        self._share_numel = share
        if is_cut and share:
            least, most = (-(-self._payload_bytes(share) // nbytes) for nbytes in reversed(_PAYLOAD_BYTES))
            segments = max(least, min(_SEGMENTS, most))
            self._share_numel = min(share, -(-share // segments // 4096) * 4096)

    def run(self) -> None:
        """See [Note: the way of a segment]."""
        numel, step = self._message.input.numel(), max(1, self._share_numel * self._inside.world_size)
        starts = range(0, numel, step)
        paths = (self._path(start, min(start + step, numel), index % WINDOW) for index, start in enumerate(starts))
        with self._inside.messages(), self._between.messages() as deadline:
            run_in_turns(paths, deadline)
            end_sends(self._sent, len(starts), len(self._others()), deadline)

    # -- step 2, by how payloads combine --------------------------------------------------------------------------

    def _requantize(self, start: int, stop: int, turn: int) -> Rounds:
        share, message, context = self._reduce_scatter(start, stop, turn)
        between = self._between
        chunks = Chunks(message, between, context, chunk_numel_of(share, between.world_size), label=f"turn{turn}")
        gathered, mine = chunks.gathered[0], chunks.reduced[0]
        arriving, summed = self._receive(chunks.received[0], 0), self._receive(gathered, 1)
        chunks.encode(0)
        sent = self._send(chunks.sent[0].chunk(between.world_size), 0)
        yield arriving
        for request in self._sent[turn]:  # of the segment before
            request.settle()
        chunks.reduce(0, is_scratch=True)
        self._sent[turn] = sent + self._send([mine] * between.world_size, 1)
        gathered.view(between.world_size, -1)[between.rank].copy_(mine)
        yield summed
        for _, total, payloads in self._gather_inside(start, stop, share, gathered, turn):
            chunks.decode(0, total, payloads)

    def _gather(self, start: int, stop: int, turn: int) -> Rounds:
        share, message, context = self._reduce_scatter(start, stop, turn)
        hosts, timer = self._between.world_size, self._between.timer
        slot = self._slot(share)
        gathered = self._inside.workspace.take(f"turn{turn}.gathered", hosts * slot, torch.uint8, self._total.device)
        mine, requests = gathered[self._between.rank * slot :][:slot], self._receive(gathered, 0)
        self._encode(mine, message, context)
        requests += self._send([mine] * hosts, 0)
        yield requests
        for offset, total, payloads in self._gather_inside(start, stop, share, gathered, turn):
            with timer.decoding():
                context = self._context._replace(offset=self._context.offset + offset)
                each = [self._view(payloads[host * slot :], total.numel()) for host in range(hosts)]
                self._codec.decode_sum(total, each, context)

    def _sum(self, start: int, stop: int, turn: int) -> Rounds:
        share, message, context = self._reduce_scatter(start, stop, turn)
        payload = self._inside.workspace.take("turn.summed", self._slot(share), torch.uint8, self._total.device)
        self._encode(payload, message, context)
        self._between.all_reduce(self._view(payload, message.input.numel()))
        for offset, total, summed in self._gather_inside(start, stop, share, payload, turn):
            with self._between.timer.decoding():
                context = self._context._replace(offset=self._context.offset + offset)
                self._codec.decode(total, self._view(summed, total.numel()), context)
        yield from ()

    # -- steps 1 and 3 --------------------------------------------------------------------------------------------

    def _reduce_scatter(self, start: int, stop: int, turn: int) -> tuple[int, Message, Context]:
        """Returns the elements of a share (the last may have fewer), what this rank is to send of its own, and the
        context of that."""
        inside, segment = self._inside, self._message.input[start:stop]
        numel = stop - start
        share = -(-numel // inside.world_size)
        if share * inside.world_size != numel:
            padded = inside.workspace.take("padded", share * inside.world_size, torch.float32, segment.device)
            padded[:numel].copy_(segment)
            padded[numel:].zero_()
            segment = padded
        begin, end = (start + min((inside.rank + step) * share, numel) for step in (0, 1))
        own = self._total[begin:end]
        if end - begin < share:
            own = inside.workspace.take(f"turn{turn}.share", share, torch.float32, segment.device)
        inside.reduce_scatter(own, segment)
        residual = None if self._message.residual is None else self._message.residual[begin:end]
        message = Message(self._codec, own[: end - begin], residual)
        return share, message, self._context._replace(offset=self._context.offset + begin)

    def _gather_inside(
        self, start: int, stop: int, share: int, block: torch.Tensor, turn: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Gathers this host's blocks; yields where each share begins, its elements in the total, and its payloads."""
        inside = self._inside
        blocks = inside.workspace.take(
            f"turn{turn}.blocks", block.numel() * inside.world_size, torch.uint8, block.device
        )
        inside.all_gather(blocks, block)
        for rank, payloads in enumerate(blocks.view(inside.world_size, -1)):
            begin, end = (min(start + (rank + step) * share, stop) for step in (0, 1))
            if begin < end:
                yield begin, self._total[begin:end], payloads

    # -- payloads and messages ------------------------------------------------------------------------------------

    def _receive(self, received: torch.Tensor, number: int) -> list[Request]:
        """Starts receiving round ``number`` from host h into slot h of ``received``, all hosts but this one.

        Called before there is anything to send, for the reason that ``transport/_mixed_reduce.py`` gives.
        """
        slots = received.view(self._between.world_size, -1)
        return [self._between.start(slots[host], host, number, is_send=False) for host in self._others()]

    def _send(self, sent: Sequence[torch.Tensor], number: int) -> list[Request]:
        """Starts sending ``sent[h]`` to host h in round ``number``."""
        return [self._between.start(sent[host], host, number, is_send=True) for host in self._others()]

    def _others(self) -> list[int]:
        return [host for host in range(self._between.world_size) if host != self._between.rank]

    def _encode(self, payload: torch.Tensor, message: Message, context: Context) -> None:
        if message.input.numel():
            with self._between.timer.encoding():
                self._codec.encode(self._view(payload, message.input.numel()), message.input, context, message.residual)

    def _slot(self, numel: int) -> int:
        return -(-self._payload_bytes(numel) // _ALIGN) * _ALIGN

    def _view(self, buffer: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns the payload of ``numel`` elements at the beginning of ``buffer``."""
        return buffer[: self._payload_bytes(numel)].view(self._codec.wire_dtype)

    def _payload_bytes(self, numel: int) -> int:
        return self._codec.payload_numel(numel, self._context) * self._codec.wire_dtype.itemsize
