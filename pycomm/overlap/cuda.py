"""The lane of a CommStream for CUDA tensors: a CUDA stream and events.

Collectives on CUDA tensors are enqueued, not waited for, so they need no thread of ours: ``submit`` orders the side
stream behind the caller's current one, calls, and records an event. ``wait`` orders the current stream behind that
event. The host blocks nowhere. What the collective uses is kept from the allocator by ``record_stream``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..collectives.work import Work

__all__ = ["CudaLane", "CudaWork"]

_POLL_S = 1e-3


class CudaWork(Work):
    """A call enqueued on the side stream; the handle is complete when the GPU has done it."""

    def __init__(self, description: str, result: Any, done: torch.cuda.Event) -> None:
        super().__init__(description)
        self._done = done
        self.set_result(result)

    def result(self, timeout: Any = None) -> Any:
        """Orders the current stream behind the call and returns what it returned. Does not block the host."""
        torch.cuda.current_stream().wait_event(self._done)
        return super().result(timeout)

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Returns torch's future of what the call writes, complete at once as NCCL's are: it keeps streams in order."""
        future: torch.futures.Future[list[Any]] = torch.futures.Future(devices=[self._done.device])
        with torch.cuda.stream(torch.cuda.Stream(self._done.device)):  # type: ignore[no-untyped-call]
            future.set_result(self._written())  # as seen from that stream, which is now behind the call
        return future

    def synchronize(self) -> None:
        """Blocks this thread until the GPU has done the call."""
        self._done.synchronize()

    def is_completed(self) -> bool:
        """Says whether the GPU has done the call."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]


class CudaLane:
    """A side stream of the current device, made on first use; ``priority`` is CUDA's (-1 is high)."""

    def __init__(self, description: str, priority: int = -1) -> None:
        self._description = description
        self._stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]

    def submit(self, call: Callable[[], Any], hold: Sequence[torch.Tensor]) -> CudaWork:
        """Enqueues ``call`` behind what the current stream has so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = call()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        for tensor in hold:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return CudaWork(self._description, result, done)

    def is_over_in(self, timeout_s: float | None) -> bool:
        """Blocks this thread until the GPU has done all calls so far; False if ``timeout_s`` ran out before."""
        if timeout_s is None:
            self._stream.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self._stream.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True
