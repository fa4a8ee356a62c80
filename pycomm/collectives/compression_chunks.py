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
    together, each in a slot of the same size. The last chunks may be shorter, or empty. A rank's own chunk is encoded
    once only, as part of the sum.

    ``label`` tells the buffers of several that are in use at once apart.
    """

    def __init__(
        self, message: Message, wire: Wire, context: Context, chunk_numel: int, segments: int = 1, label: str = ""
    ) -> None:
        self._codec: Codec = message.codec
        self._input = message.input
        self._residual = message.residual
        self._context = context
        self._timer: Timer = wire.timer
        self._workspace: Workspace = wire.workspace
        self._rank, self._world_size = wire.rank, wire.world_size
        self._chunk_numel = chunk_numel
        self._label = label
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
                key = f"{purpose}{self._label}.{segment}"
                row.append(self._workspace.take(key, slots * self._slot(segment), torch.uint8, self._input.device))
            buffers.append(row)
        return buffers

    def _slot(self, segment: int) -> int:
        start, stop = self._bounds[segment]
        return -(-self._payload_bytes(stop - start) // _ALIGN) * _ALIGN

    def _payload_bytes(self, numel: int) -> int:
        return self._codec.payload_numel(numel, self._context) * self._codec.wire_dtype.itemsize

    def _range(self, chunk: int, segment: int, numel: int) -> tuple[int, int]:
        """Returns the (start, stop) element, in a flat of ``numel``, of a segment of a chunk."""
        start, stop = self._bounds[segment]
        first = chunk * self._chunk_numel
        return min(first + start, numel), min(first + stop, numel)

    def _payload(self, buffer: torch.Tensor, segment: int, slot: int, numel: int) -> torch.Tensor:
        """Returns the payload of ``numel`` elements in a slot of a buffer."""
        start = slot * self._slot(segment)
        return buffer[start : start + self._payload_bytes(numel)].view(self._codec.wire_dtype)

    def _at(self, start: int) -> Context:
        """Returns the context of what begins at element ``start`` of the input: a codec may draw by where that is."""
        return self._context._replace(offset=self._context.offset + start)

    def encode(self, segment: int) -> None:
        """Encodes this rank's input for every other rank."""
        with self._timer.encoding():
            for chunk in range(self._world_size):
                start, stop = self._range(chunk, segment, self._input.numel())
                if chunk == self._rank or start == stop:
                    continue
                residual = None if self._residual is None else self._residual[start:stop]
                payload = self._payload(self.sent[segment], segment, chunk, stop - start)
                self._codec.encode(payload, self._input[start:stop], self._at(start), residual)

    def add(self, segment: int, total: torch.Tensor) -> None:
        """``total`` = this rank's own input for its chunk, and what came for it, in rank order. It may be the input."""
        start, stop = self._range(self._rank, segment, self._input.numel())
        with self._timer.decoding():
            if total.data_ptr() != self._input[start:stop].data_ptr():
                total.copy_(self._input[start:stop])
            for rank in range(self._world_size):
                if rank != self._rank and start < stop:
                    payload = self._payload(self.received[segment], segment, rank, total.numel())
                    self._codec.decode(total, payload, self._at(start)._replace(rank=rank), add=True)

    def add_owed(self, segment: int, total: torch.Tensor) -> None:
        """Adds to ``total`` what this rank owed of its own chunk, where the sum is not encoded again."""
        if self._residual is not None:
            start, stop = self._range(self._rank, segment, self._input.numel())
            total.add_(self._residual[start:stop])
            self._residual[start:stop].zero_()

    def reduce(self, segment: int, is_scratch: bool = False) -> None:
        """Encodes the sum of what came for this rank, and what it owed; what that loses it owes again.

        ``is_scratch``: the input may be overwritten.
        """
        start, stop = self._range(self._rank, segment, self._input.numel())
        total = self._input[start:stop]
        if not is_scratch:
            total = self._workspace.take("sum", stop - start, torch.float32, self._input.device)
        self.add(segment, total)
        if start == stop:
            return
        with self._timer.encoding():
            # Nobody adds to this one any more: for the codec the world is this rank.
            context = self._at(start)._replace(round=1, world_size=1)
            residual = None if self._residual is None else self._residual[start:stop]
            self._codec.encode(self._payload(self.reduced[segment], segment, 0, stop - start), total, context, residual)

    def decode(self, segment: int, total: torch.Tensor, gathered: torch.Tensor | None = None) -> None:
        """Writes what all ranks gathered to ``total (numel,)``; ``gathered``: by others, of a flat of its length."""
        buffer = self.gathered[segment] if gathered is None else gathered
        with self._timer.decoding():
            for chunk in range(self._world_size):
                start, stop = self._range(chunk, segment, total.numel())
                if start < stop:
                    payload = self._payload(buffer, segment, chunk, stop - start)
                    self._codec.decode(total[start:stop], payload, self._at(start)._replace(rank=chunk))
