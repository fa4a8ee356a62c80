"""Any MPI through mpi4py, as an MPI user would write it for speed: buffers specified once, upper-case methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from .cases import Bits, Case, Values
from .library import Buffer, Call, Library, UnsupportedCaseError

__all__ = ["MPILibrary"]

_TYPES: dict[str, MPI.Datatype] = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
}
_OPS: dict[str, MPI.Op] = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
_ALIGNMENT = 64  # as torch allocates


class _Started:
    """The collectives of a communicator, each started and then waited for."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., None]:
        start = getattr(self._comm, f"I{name.lower()}")

        def start_and_wait(*arguments: Any) -> None:
            start(*arguments).Wait()

        return start_and_wait


class MPILibrary(Library):
    """The MPI that this environment's mpi4py finds."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.world_size = self.comm.Get_rank(), self.comm.Get_size()
        first_line = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
        self.version = " ".join(first_line.partition(",")[0].split())

    def buffer(self, numel: int, dtype: str, is_shared: bool) -> Buffer:
        """Allocates memory laid out as torch would; an MPI user has no shared segment to put tensors in."""
        if dtype not in _TYPES:
            raise UnsupportedCaseError(f"MPI has no portable datatype for {dtype}")
        itemsize = np.dtype(dtype).itemsize
        raw = np.empty(numel * itemsize + _ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        array = raw[offset : offset + numel * itemsize].view(dtype)
        return Buffer(array, array.view(f"int{8 * itemsize}"))

    def encode(self, values: Values, dtype: str) -> Bits:
        """Converts by numpy."""
        if dtype not in _TYPES:
            raise UnsupportedCaseError(f"MPI has no portable datatype for {dtype}")
        array = values.astype(dtype)
        return array.view(f"int{8 * array.itemsize}")

    def bind(self, case: Case, output: Buffer, input: Buffer, root: int) -> Call:
        """Chooses the MPI function and builds its buffer specifications."""
        if case.op not in _OPS:
            raise UnsupportedCaseError(f"MPI has no operator {case.op}")
        world_size, is_root, in_place = self.world_size, self.rank == root, case.place == "in"
        comm: Any = _Started(self.comm) if case.is_async else self.comm
        op = () if case.op == "SUM" else (_OPS[case.op],)  # SUM is mpi4py's default
        kind = _TYPES[case.dtype]

        def spec(buffer: Buffer, num_parts: int = 1) -> list[Any]:
            return [buffer.tensor, len(buffer.bits) // num_parts, kind]

        source: Any = MPI.IN_PLACE if in_place else spec(input)
        match case.verb:
            case "all_reduce":
                return comm.Allreduce, (source, spec(output), *op)
            case "all_gather":
                return comm.Allgather, (source, spec(output, world_size))
            case "reduce_scatter":
                if in_place:
                    raise UnsupportedCaseError(
                        "in place, MPI leaves the result in the first part, not in the rank's own"
                    )
                return comm.Reduce_scatter_block, (spec(input, world_size), spec(output), *op)
            case "broadcast":
                return comm.Bcast, (spec(output), root)
            case "reduce":
                arguments = (MPI.IN_PLACE, spec(output)) if is_root else (spec(input), None)
                return comm.Reduce, (*arguments, _OPS[case.op], root)
            case "all_to_all":
                return comm.Alltoall, (spec(input, world_size), spec(output, world_size))
            case "gather":
                return comm.Gather, (spec(input), spec(output, world_size) if is_root else None, root)
            case "scatter":
                return comm.Scatter, (spec(input, world_size) if is_root else None, spec(output), root)
            case "sendrecv":
                return self._sendrecv(spec(input), spec(output))
            case "send":
                return self.passing_on(self.comm.Send, self.comm.Recv), (spec(output), spec(input), root)
            case "barrier":
                return comm.Barrier, ()
            case _:
                raise UnsupportedCaseError(f"no MPI call is written for {case.verb}")

    def _sendrecv(self, source: list[Any], target: list[Any]) -> Call:
        (after, before), sendrecv = self.neighbours(), self.comm.Sendrecv
        return (lambda s, t: sendrecv(s, after, 0, t, before, 0)), (source, target)

    def barrier(self) -> None:
        """MPI_Barrier."""
        self.comm.Barrier()
