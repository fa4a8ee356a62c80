"""The seam to NCCL: what the transport uses of nccl4py (NVIDIA's own bindings) and of CUDA's streams.

Tests put a fake in its place, whose ranks are threads and whose memory is the host's; nothing else knows of nccl4py.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch

from ..errors import NativeUnavailableError

__all__ = ["IN_PROGRESS", "REMOTE_ERROR", "SUCCESS", "Event", "Library", "import_nccl"]

# ncclResult_t
SUCCESS = 0
REMOTE_ERROR = 6
IN_PROGRESS = 7


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class Library(Protocol):
    """NCCL, for one process.

    Communicators are nccl4py's, non-blocking: a call returns at once, and ``state`` says how it goes. Work is put on
    the current torch stream.
    """

    def unique_id(self) -> bytes:
        """Returns what the ranks of one communicator have to know of the first."""

    def connect(self, world_size: int, rank: int, unique_id: bytes) -> Any:
        """Starts joining; returns the communicator."""

    def group(self) -> AbstractContextManager[Any]:
        """What is called inside is one operation: sends and receives there do not wait for each other."""

    def state(self, communicator: Any) -> int:
        """Returns SUCCESS, IN_PROGRESS, or the code of an error."""

    def explain(self, communicator: Any) -> str:
        """Returns NCCL's last words."""

    def operator(self, name: str) -> Any:
        """Returns NCCL's operator: SUM, PROD, MIN, MAX."""

    def stream(self) -> Any:
        """Returns the current stream, as communicators take it."""

    def mark(self) -> Event:
        """Records an event on the current stream."""


class _Nccl4py:
    def __init__(self, core: Any) -> None:
        self._core = core

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def connect(self, world_size: int, rank: int, unique_id: bytes) -> Any:
        config = self._core.NCCLConfig(blocking=False)
        return self._core.Communicator.init(world_size, rank, self._core.UniqueId.from_bytes(unique_id), config)

    def group(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._core.group()
        return context

    def state(self, communicator: Any) -> int:
        return int(communicator.get_async_error())

    def explain(self, communicator: Any) -> str:
        return str(communicator.get_last_error())

    def operator(self, name: str) -> Any:
        return self._core.NcclRedOp[name]

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@cache
def import_nccl() -> Library:
    """Returns NCCL. Raises NativeUnavailableError, with the command that adds what is missing."""
    if not torch.cuda.is_available():
        raise NativeUnavailableError(
            "transport 'nccl' needs a CUDA device that torch can use, and found none; use transport 'auto'"
        )
    extra = "cuda12" if str(torch.version.cuda).startswith("12") else "cuda13"
    if importlib.util.find_spec("nccl") is None:
        raise NativeUnavailableError(
            f"transport 'nccl' needs nccl4py, which is not installed: pip install 'pycomm[{extra}]'"
        )
    try:
        import nccl.core

        nccl.core.get_unique_id()  # loads libnccl
    except (ImportError, RuntimeError) as error:
        raise NativeUnavailableError(
            f"transport 'nccl': nccl4py cannot load NCCL: {error}; pip install 'pycomm[{extra}]', beside the torch for "
            f"CUDA {torch.version.cuda}"
        ) from error
    return _Nccl4py(nccl.core)
