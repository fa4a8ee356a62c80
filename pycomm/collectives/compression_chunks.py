"""A flat cut into a chunk for each rank, for collectives that scatter encoded chunks, add them up and gather them."""

from __future__ import annotations

import torch

from ..compression import Codec, Context, Message
from .compression_wire import Timer, Wire, Workspace

__all__ = ["Chunks", "chunk_numel_of"]

_ALIGN = 16  # payloads start at multiples of this many bytes


def chunk_numel_of(numel: int, world_size: int) -> int:
    """Returns the elements of a rank's chunk: whole cache lines where there is more than a few of them."""
    chunk_numel = -(-numel // world_size)
    return chunk_numel if chunk_numel < 1024 else -(-chunk_numel // 64) * 64


class Chunks:
    """A flat cut into a chunk for each rank, each cut into segments; the payloads of segment s of all chunks travel
    together, each in a slot of the same size. The last chunks may be shorter, or empty.
    """

    def __init__(self, message: Message, wire: Wire, context: Context, chunk_numel: int, segments: int) -> None:
        self._codec: Codec = message.codec
        self._input = message.input
        self._residual = message.residual
        self._context = context
        self._timer: Timer = wire.timer
        self._workspace: Workspace = wire.workspace
        self._rank, self._world_size = wire.rank, wire.world_size
        self._chunk_numel = chunk_numel
        step = -(-chunk_numel // segments)
        step = step if segments == 1 else -(-step // 4096) * 4096
        bounds = [min(segment * step, chunk_numel) for segment in range(segments + 1)]
        self._bounds = list(zip(bounds, bounds[1:], strict=False))
        self.sent, self.received, self.reduced, self.gathered = self._buffers()

    def _buffers(self) -> list[list[torch.Tensor]]:
        """Returns, for each purpose, one buffer a segment: slots for all ranks, or for one."""
        buffers = []
        for purpose in ("sent", "received", "reduced", "gathered"):
            row = []
            for segment in range(len(self._bounds)):
                slots = 1 if purpose == "reduced" else self._world_size
                key = f"{purpose}{segment}"
                row.append(self._workspace.take(key, slots * self._slot(segment), torch.uint8, self._input.device))
            buffers.append(row)
        return buffers

    def _slot(self, segment: int) -> int:
        start, stop = self._bounds[segment]
        return -(-self._payload_bytes(stop - start) // _ALIGN) * _ALIGN

    def _payload_bytes(self, numel: int) -> int:
        return self._codec.payload_numel(numel, self._context) * self._codec.wire_dtype.itemsize

    def _range(self, chunk: int, segment: int) -> tuple[int, int]:
        """Returns the (start, stop) element in the flat of a segment of a chunk."""
        start, stop = self._bounds[segment]
        first, end = chunk * self._chunk_numel, self._input.numel()
        return min(first + start, end), min(first + stop, end)

    def _payload(self, buffers: list[torch.Tensor], segment: int, slot: int, numel: int) -> torch.Tensor:
        """Returns the payload of ``numel`` elements in a slot of one of the buffers."""
        start = slot * self._slot(segment)
        return buffers[segment][start : start + self._payload_bytes(numel)].view(self._codec.wire_dtype)

    def encode(self, segment: int) -> None:
        """Encodes this rank's input for every rank."""
        with self._timer.encoding():
            for chunk in range(self._world_size):
                start, stop = self._range(chunk, segment)
                residual = None if self._residual is None else self._residual[start:stop]
                context = self._context._replace(offset=self._context.offset + start)
                payload = self._payload(self.sent, segment, chunk, stop - start)
                self._codec.encode(payload, self._input[start:stop], context, residual)

    def add(self, segment: int, total: torch.Tensor) -> None:
        """``total`` = the sum of what came for this rank, in rank order."""
        with self._timer.decoding():
            for rank in range(self._world_size):
                payload = self._payload(self.received, segment, rank, total.numel())
                self._codec.decode(total, payload, self._context._replace(rank=rank), add=rank > 0)

    def reduce(self, segment: int) -> None:
        """Encodes the sum of what came for this rank. What that loses is owed by this rank."""
        start, stop = self._range(self._rank, segment)
        total = self._workspace.take("sum", stop - start, torch.float32, self._input.device)
        self.add(segment, total)
        with self._timer.encoding():
            context = self._context._replace(offset=self._context.offset + start, round=1)
            payload = self._payload(self.reduced, segment, 0, stop - start)
            if self._residual is None:
                self._codec.encode(payload, total, context)
                return
            owed = self._workspace.take("owed", stop - start, torch.float32, self._input.device).zero_()
            self._codec.encode(payload, total, context, owed)
            self._residual[start:stop].add_(owed)

    def decode(self, segment: int, total: torch.Tensor) -> None:
        """Writes what all ranks gathered to ``total (numel,)``."""
        with self._timer.decoding():
            for chunk in range(self._world_size):
                start, stop = self._range(chunk, segment)
                payload = self._payload(self.gathered, segment, chunk, stop - start)
                self._codec.decode(total[start:stop], payload, self._context._replace(rank=chunk))
