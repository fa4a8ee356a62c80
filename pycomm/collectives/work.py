"""Handles of calls that are under way."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import limit_s
from ..errors import CollectiveTimeoutError
from ..transport._wording import forked
from .futures import Tellers, future_of

if TYPE_CHECKING:
    import torch

__all__ = ["Work"]

_log = logging.getLogger("pycomm")


class Work:
    """A call made with ``async_op=True``, or a message from ``isend`` or ``irecv``.

    The buffers of the call are not touched until it is complete; the library keeps them alive, also if the handle is
    dropped. Any thread may wait, more than once. Errors of the call are raised by ``wait``, ``synchronize`` and
    ``result``.
    """

    is_message = False  # which moves only while somebody waits for it. For the library
    _is_asked = True  # until there is a call: Ctrl-C may come before that

    def __init__(self, description: str, tellers: Tellers | None = None) -> None:
        """``tellers`` are those of the group. For the library."""
        self._description = description
        self.tellers = tellers or Tellers()
        self._future: Future[Any] | None = Future()
        self._is_asked = False
        self._pid = os.getpid()

    @property
    def future(self) -> Future[Any]:
        """What completes with the call. For the library."""
        assert self._future is not None
        return self._future

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Blocks until the call is complete and returns True.

        Its results are then there for this thread, and for this stream. Raises the error of the call, or
        CollectiveTimeoutError if ``timeout`` passes (seconds; timedelta(0) is none, as in torch); the call goes on.
        """
        self.result(timeout)
        return True

    def synchronize(self) -> None:
        """Blocks this CPU thread until the call is complete."""
        self.result()

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Waits as ``wait`` does and returns what the call wrote: the caller's own object, or a list of them."""
        self._is_asked = True
        if os.getpid() != self._pid and not self.is_completed():
            raise forked(self._description)  # the thread that would complete it is its parent's
        try:
            return self.future.result(limit_s(timeout))
        except TimeoutError as error:
            if self.future.done():
                raise  # an error of the call itself, which happens to be a TimeoutError
            raise self._not_complete(timeout) from error

    def is_completed(self) -> bool:
        """Says whether the call is complete, or has failed. Never blocks."""
        return self.future.done()

    def has_been_seen_to_end(self) -> bool:
        """Says whether a callback may run at once. For the library."""
        return self.is_completed()

    def is_success(self) -> bool:
        """Says whether the call is complete without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns the error of the call; None while it is under way or if it succeeded. Never blocks."""
        if not self.is_completed():
            return None
        self._is_asked = True
        return self.future.exception()

    def then(self, callback: Callable[[Work], Any]) -> Work:
        """Returns a Work that completes with ``callback(self)`` as its result, once this one is complete or has failed.

        The callback runs in the thread that completes the call (or at once, in this one). It must not call collectives
        of the same group: those of ``get_future`` may. A message is waited for by a thread, for the group's timeout: if
        it is still under way then, the returned Work fails with CollectiveTimeoutError, and no callback runs.
        """
        following = Work(f"callback of {self._description}", self.tellers)

        def run(future: Future[Any]) -> None:
            try:
                if not self.is_completed():
                    future.result()  # raises, where the time for a message was over
                following.set_result(callback(self))
            except BaseException as error:  # goes to whoever waits on the callback's Work
                following.set_exception(error)

        self._is_asked = True
        self.future.add_done_callback(run)
        return following

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Returns torch's future of the list of what the call writes, as torch.distributed's handles do.

        A hook of DDP returns ``pycomm.all_reduce(t, async_op=True).get_future().then(lambda done: done.value()[0])``.
        Callbacks run one after the other in a thread of the group, or at once in this one if the call is complete; they
        may call collectives of the same group, if all ranks give theirs in the same order. A call that fails lets the
        future raise RuntimeError with the error's name and text: torch's futures carry no other error.
        """
        return future_of([self], self._written)

    def _written(self) -> list[Any]:
        result = self.result()
        return result if isinstance(result, list) else [result]

    def block_current_stream(self) -> None:
        """As ``wait``, for the group's timeout: what comes next in this stream finds the results."""
        self.wait()

    def set_result(self, result: Any) -> None:
        """Completes the call. For the library."""
        self.future.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        """Fails the call. For the library."""
        self.future.set_exception(error)

    def _not_complete(self, timeout: object) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._description} was not complete after {timeout} as its handle was waited on; "
            f"it is still under way: wait longer, or see what the other ranks do"
        )

    def __del__(self) -> None:
        # An error must not vanish because nobody waited.
        if not self._is_asked and self.future.done() and (error := self.future.exception()) is not None:
            _log.error("%s failed, and its handle was dropped without a wait: %s", self._description, error)
