"""Handles that torch takes for its own: ``Work`` over the handles of pycomm.

[Note: errors that reach whoever waits]
``wait`` raises the call's own error. A future is another matter: ``Future.set_exception`` of Python stores the error as
a value, which torch's C++ takes for a result. The future handed out here is the ``then`` of another one: an error that
its callback raises is an error for C++ too, a RuntimeError with the error's name and text.

[Note: callbacks that wait]
A callback of a future may make a call of the same group and wait for it: PowerSGD's hook does. It may therefore not run
on the thread that runs the group's calls. ``Tellers`` has a thread of its own for callbacks, and another one for the
futures that are asked for inside callbacks, and so on: nobody waits for a thread that waits for him.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from ..collectives.message_work import MessageWork

if TYPE_CHECKING:
    from ..collectives.work import Work

__all__ = ["DONE", "CallWork", "Tellers", "joined_work"]

_FOR_EVER = timedelta(0)  # what torch passes for "no timeout"


class Tellers:
    """The threads that run the callbacks of a group's futures, in order; see [Note: callbacks that wait]."""

    def __init__(self) -> None:
        self._by_depth: dict[int, ThreadPoolExecutor] = {}

    def teller(self) -> ThreadPoolExecutor:
        """Returns what is to tell a future that this thread asks for."""
        depth = getattr(_thread, "depth", 0)
        if depth not in self._by_depth:
            name = f"pycomm-callbacks-{depth}"
            self._by_depth[depth] = ThreadPoolExecutor(1, name, initializer=_set_depth, initargs=(depth + 1,))
        return self._by_depth[depth]

    def close(self) -> None:
        """Ends the threads, once they are idle."""
        for executor in self._by_depth.values():
            executor.shutdown(wait=False)


_thread = threading.local()


def _set_depth(depth: int) -> None:
    _thread.depth = depth


class CallWork(TorchWork):
    """A collective under way, or a message: complete when all of ``works``, pycomm's own handles, are.

    ``tensors`` are what it writes. C++ code sees ``wait`` and ``get_future`` of it and nothing else: that is all torch
    forwards to Python.
    """

    def __init__(self, works: Sequence[Work], tensors: Sequence[torch.Tensor], tellers: Tellers | None = None) -> None:
        super().__init__()
        self._tellers = tellers or Tellers()
        self._works = works
        self._tensors = tensors
        self._future: Any = None

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Blocks until complete and returns True. Raises the call's error, or CollectiveTimeoutError."""
        limit = timeout if timeout > _FOR_EVER else None
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
        (work,) = self._works
        assert isinstance(work, MessageWork)
        return work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensors; see the note on top of this file."""
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            self._future = ended.then(lambda _: self.result())
            self._when_ended(lambda: ended.set_result(None))
        future: torch.futures.Future[list[torch.Tensor]] = self._future
        return future

    def _when_ended(self, tell: Callable[[], None]) -> None:
        if self.is_completed():
            tell()
        elif any(isinstance(work, MessageWork) for work in self._works):  # such a one moves when somebody waits
            threading.Thread(target=self._wait_and_tell, args=(tell,), name="pycomm-message", daemon=True).start()
        else:  # a group's calls end in order: the last one's end is that of all
            teller = self._tellers.teller()
            self._works[-1].future.add_done_callback(lambda _: teller.submit(tell))

    def _wait_and_tell(self, tell: Callable[[], None]) -> None:
        for work in self._works:
            with contextlib.suppress(Exception):  # it is kept, for whoever asks the future
                work.result()
        tell()


class _DoneWork(CallWork):
    """Of every call that was over when it returned: torch waits for it all the same. It knows no tensors."""

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:
        """Returns True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Raises RuntimeError."""
        raise RuntimeError("a synchronous call of backend 'pycomm' has no future; make it with asyncOp=True")


DONE = _DoneWork((), ())


def joined_work(works: Sequence[CallWork]) -> CallWork:
    """Returns one handle for several."""
    if len(works) == 1:
        return works[0]
    tensors = [tensor for work in works for tensor in work._tensors]
    return CallWork([each for work in works for each in work._works], tensors, works[0]._tellers)
