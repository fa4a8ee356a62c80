"""A rank's part of a tensor as boxes, which is how torch.distributed.checkpoint (DCP) knows parts.

A shard of a flat buffer has elements ``start`` to ``stop`` of a tensor counted in rows: no box, but a few of them:

    . . . x x     the end of a first row
    x x x x x     whole rows
    x x . . .     the start of a last row

So a checkpoint has each tensor in its own name and shape, and loads into any number of ranks, into another strategy, or
into a module that is not sharded. ``Piece`` implements DCP's protocol for tensors of its own making
(``torch.distributed._checkpointable``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import CheckpointError

__all__ = ["Box", "Piece", "boxes"]


class Box(NamedTuple):
    """``sizes`` elements from ``offsets`` on, in each dimension; they lie in one run that begins at ``start``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes that make up elements ``start`` to ``stop`` of a tensor of ``shape``, in row-major order."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield Box((), (), 0)
        return
    row = prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        rows = (stop - start) // row if inside == 0 else 0
        if rows:
            yield Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]), start)
            start += rows * row
            continue
        end = min(stop, (first + 1) * row)
        for box in boxes(shape[1:], inside, end - first * row):
            yield Box((first, *box.offsets), (1, *box.sizes), first * row + box.start)
        start = end


class Piece(torch.Tensor):
    """Elements ``start`` onwards of a tensor of ``shape``, as ``local (numel,)`` has them; to save and to load into.

    A handle that has the shape and dtype of the whole tensor and computes nothing. ``local`` is the shard's own memory.
    """

    local: torch.Tensor
    start: int

    @staticmethod
    def __new__(cls, shape: Sequence[int], start: int, local: torch.Tensor) -> Piece:
        """``local`` is 1-D."""
        made: Piece = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.start = local.detach(), start
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func}: a piece of a sharded state dict is there to be saved and loaded; full_state_dict() has tensors"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Piece(shape={tuple(self.shape)}, elements {self.start} to {self.start + self.local.numel()})"

    def _boxes(self) -> list[Box]:
        return list(boxes(self.shape, self.start, self.start + self.local.numel()))

    def _tensor(self, box: Box) -> torch.Tensor:
        at = box.start - self.start
        return self.local[at : at + prod(box.sizes)].view(box.sizes)

    # -- DCP's protocol -----------------------------------------------------------------------------------------------

    def __create_write_items__(self, name: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.local.numel() < self.numel() and not (dist.is_available() and dist.is_initialized()):
            raise CheckpointError(
                f"{name}: this rank has {self.local.numel()} of {self.numel()} elements, and ranks save together over "
                f"torch.distributed, which is not initialized; each would write over the others' files. Call "
                f'torch.distributed.init_process_group("pycomm") first, or save full_state_dict()'
            )

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(self._tensor(box) for box in self._boxes() if torch.Size(box.offsets) == index.offset)
