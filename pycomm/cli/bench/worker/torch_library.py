"""pycomm, and gloo through torch.distributed: the two have the same verbs, so one table serves both."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .cases import Bits, Case, Values
from .library import Buffer, Call, Library, UnsupportedCaseError

__all__ = ["GlooLibrary", "PycommLibrary"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Started:
    """The verbs of a module, each started and then waited for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, verb: str) -> Callable[..., None]:
        function = getattr(self._module, verb)

        def start_and_wait(*arguments: Any) -> None:
            function(*arguments, async_op=True).wait()

        return start_and_wait


class _TorchLibrary(Library):
    """A module with torch.distributed's verbs."""

    module: ModuleType

    def buffer(self, numel: int, dtype: str, is_shared: bool) -> Buffer:
        """Allocates a torch tensor."""
        return self._as_buffer(torch.empty(numel, dtype=getattr(torch, dtype), device="cpu"))

    def encode(self, values: Values, dtype: str) -> Bits:
        """Converts by torch."""
        return self._as_buffer(torch.from_numpy(values).to(getattr(torch, dtype))).bits

    def _as_buffer(self, tensor: torch.Tensor) -> Buffer:
        return Buffer(tensor, tensor.view(_BITS[tensor.element_size()]).numpy())

    def bind(self, case: Case, output: Buffer, input: Buffer, root: int) -> Call:
        """Chooses the function; the default operator is left out as a user would."""
        m: Any = _Started(self.module) if case.is_async else self.module
        x, out, world_size = input.tensor, output.tensor, self.world_size
        op = () if case.op == "SUM" else (getattr(self.module.ReduceOp, case.op),)
        match case.verb:
            case "all_reduce":
                return (
                    (m.all_reduce, (out, *op))
                    if case.place == "in"
                    else self._all_reduce_copy(m.all_reduce, out, x, op)
                )
            case "all_gather":
                return m.all_gather_single, (out, x)
            case "reduce_scatter":
                return m.reduce_scatter_single, (out, x, *op)
            case "broadcast":
                return m.broadcast, (out, root)
            case "reduce":
                return m.reduce, (out, root, *op)
            case "all_to_all":
                return m.all_to_all_single, (out, x)
            case "gather":
                return m.gather, (x, list(out.chunk(world_size)) if self.rank == root else None, root)
            case "scatter":
                return m.scatter, (out, list(x.chunk(world_size)) if self.rank == root else None, root)
            case "sendrecv":
                return self._sendrecv(out, x)
            case "send":
                return self.passing_on(m.send, m.recv), (out, x, root)
            case "barrier":
                return m.barrier, ()
            case _:
                raise UnsupportedCaseError(f"no call is written for {case.verb}")

    def _all_reduce_copy(
        self, all_reduce: Callable[..., Any], out: torch.Tensor, x: torch.Tensor, op: tuple[Any, ...]
    ) -> Call:
        """torch.distributed's all_reduce works in place, so out of place is a copy and a call."""

        def copy_and_reduce(out: torch.Tensor, x: torch.Tensor) -> None:
            out.copy_(x)
            all_reduce(out, *op)

        return copy_and_reduce, (out, x)

    def _sendrecv(self, out: torch.Tensor, x: torch.Tensor) -> Call:
        m: Any = self.module
        after, before = self.neighbours()
        batch = [m.P2POp(m.isend, x, after), m.P2POp(m.irecv, out, before)]

        def exchange(batch: list[Any]) -> None:
            for work in m.batch_isend_irecv(batch):
                work.wait()

        return exchange, (batch,)

    def barrier(self) -> None:
        """The library's own barrier."""
        self.module.barrier()


class PycommLibrary(_TorchLibrary):
    """pycomm over ``transport``, started by whatever launcher this process finds itself under."""

    def __init__(self, transport: str) -> None:
        import pycomm

        self.module = pycomm
        group = pycomm.init(transport=transport)
        self.transport: str = group.transport.name
        self._line_ns = partial(getattr, group.transport, "line_ns", 0.0)
        self.rank, self.world_size = pycomm.rank(), pycomm.world_size()
        self.version = f"pycomm {pycomm.__version__} ({self.transport})"

    def buffer(self, numel: int, dtype: str, is_shared: bool) -> Buffer:
        """Allocates a torch tensor, in the transport's shared segment if asked."""
        if not is_shared:
            return super().buffer(numel, dtype, is_shared)
        if self.transport != "shm":
            raise UnsupportedCaseError(f"the {self.transport} transport has no shared segment")
        return self._as_buffer(self.module.empty(numel, dtype=getattr(torch, dtype), shared=True))

    def line_ns(self) -> float:
        """What the shm transport measured last."""
        return float(self._line_ns())

    def close(self) -> None:
        """pycomm.finalize()."""
        self.module.finalize()


class GlooLibrary(_TorchLibrary):
    """torch.distributed with the gloo backend, rank and world size from the environment, meeting in a file."""

    def __init__(self, rendezvous_file: str) -> None:
        import torch.distributed as dist

        self.module = dist
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{rendezvous_file}", rank=self.rank, world_size=self.world_size)
        self.version = f"gloo of torch {torch.__version__}"

    def close(self) -> None:
        """dist.destroy_process_group()."""
        self.module.destroy_process_group()
