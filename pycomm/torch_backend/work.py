"""Handles that torch takes for its own: ``Work`` over the handles of pycomm."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from ..collectives.futures import future_of
from ..collectives.message_work import MessageWork
from ..errors import ConfigError
from .ranges import range_of_wait

if TYPE_CHECKING:
    from ..collectives.work import Work

__all__ = ["DONE", "CallWork", "joined_work"]

_FOR_EVER = timedelta(0)  # what torch passes for "no timeout"


class CallWork(TorchWork):
    """A collective under way, or a message: complete when all of ``works``, pycomm's own handles, are.

    ``tensors`` are what it writes, ``verb`` what the profiler calls it. C++ code sees ``wait`` and ``get_future`` of it
    and nothing else: that is all torch forwards to Python.
    """

    def __init__(self, verb: str, works: Sequence[Work], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._verb = verb
        self._works = works
        self._tensors = tensors
        self._future: Any = None

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Blocks until complete and returns True. Raises the call's error, or CollectiveTimeoutError."""
        limit = timeout if timeout > _FOR_EVER else None
        with range_of_wait(self._verb):
            for work in self._works:
                work.result(limit)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """As ``wait``: the tensors that pycomm reduces are in host memory, or on their way there and back."""
        self.wait()

    def is_completed(self) -> bool:
        """Says whether the call is complete, or has failed. Never blocks."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Says whether the call is complete without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Returns the call's error; None while it is under way or if it succeeded."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Waits, and returns the tensors that were written."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Returns the rank of the group that a received message came from."""
        work = self._works[0] if len(self._works) == 1 else None
        if not isinstance(work, MessageWork):
            raise ConfigError(f"source_rank: expected the handle of a receive, got that of {self._verb}")
        return work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensors. Its errors are RuntimeErrors: torch's futures carry no others."""
        if self._future is None:
            self._future = future_of(self._works, self.result)
        future: torch.futures.Future[list[torch.Tensor]] = self._future
        return future


class _DoneWork(CallWork):
    """Of every call that was over when it returned: torch waits for it all the same. It knows no tensors."""

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Returns True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Raises RuntimeError."""
        raise RuntimeError("a synchronous call of backend 'pycomm' has no future; make it with asyncOp=True")


DONE = _DoneWork("a call", (), ())


def joined_work(works: Sequence[CallWork]) -> CallWork:
    """Returns one handle for several."""
    if len(works) == 1:
        return works[0]
    tensors = [tensor for work in works for tensor in work._tensors]
    return CallWork("coalesced calls", [each for work in works for each in work._works], tensors)
