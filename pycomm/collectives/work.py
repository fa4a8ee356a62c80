"""Handles of calls that are under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import seconds
from ..errors import CollectiveTimeoutError, TransportError

if TYPE_CHECKING:
    from ..transport.base import Request

__all__ = ["RequestWork", "Work", "forget_ended"]

_log = logging.getLogger("pycomm")


class Work:
    """A call made with ``async_op=True``, or a message from ``isend`` or ``irecv``.

    The buffers of the call are not touched until it is complete; the library keeps them alive, also if the handle is
    dropped. Any thread may wait, more than once. Errors of the call are raised by ``wait``, ``synchronize`` and
    ``result``.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self.future: Future[Any] = Future()
        self._is_asked = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Blocks until the call is complete and returns True.

        Its results are then there for this thread, and for this stream. Raises the error of the call, or
        CollectiveTimeoutError if ``timeout`` (seconds) passes; the call then goes on.
        """
        self.result(timeout)
        return True

    def synchronize(self) -> None:
        """Blocks this CPU thread until the call is complete."""
        self.result()

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Waits as ``wait`` does and returns what the call wrote: the caller's own object, or a list of them."""
        self._is_asked = True
        try:
            return self.future.result(None if timeout is None else seconds(timeout))
        except TimeoutError as error:
            if self.future.done():
                raise  # an error of the call itself, which happens to be a TimeoutError
            raise CollectiveTimeoutError(
                f"{self._description} was not complete after {timeout} as its handle was waited on; "
                f"it is still under way: wait longer, or see what the other ranks do"
            ) from error

    def is_completed(self) -> bool:
        """Says whether the call is complete, or has failed. Never blocks."""
        return self.future.done()

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
        of the same group.
        """
        following = Work(f"callback of {self._description}")

        def run(_future: Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except BaseException as error:  # goes to whoever waits on the callback's Work
                following.set_exception(error)

        self._is_asked = True
        self.future.add_done_callback(run)
        return following

    def set_result(self, result: Any) -> None:
        """Completes the call. For the library."""
        self.future.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        """Fails the call. For the library."""
        self.future.set_exception(error)

    def __del__(self) -> None:
        # An error must not vanish because nobody waited.
        if not self._is_asked and self.future.done() and (error := self.future.exception()) is not None:
            _log.error("%s failed, and its handle was dropped without a wait: %s", self._description, error)


class RequestWork(Work):
    """A message under way: moves on when somebody waits or asks.

    ``finish`` copies what came to where the caller wants it.
    """

    def __init__(
        self,
        description: str,
        request: Request,
        finish: Callable[[], None] | None,
        result: Any,
        to_global: Callable[[int], int],
        scope: AbstractContextManager[None],
        orphans: list[Request],
    ) -> None:
        """``orphans`` takes the request over if this handle is dropped before the message is complete."""
        super().__init__(description)
        self._orphans = orphans
        self._request = request
        self._finish = finish
        self._value = result
        self._to_global = to_global
        self._scope = scope
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self.future.done():
            super().__del__()
            return
        # Its memory is in use until the message is complete, and a transport may call back what nobody holds.
        self._orphans.append(self._request)

    def result(self, timeout: float | timedelta | None = None) -> Any:
        with self._lock:
            if not self.future.done():
                timeout_s = None if timeout is None else seconds(timeout)
                self._complete(lambda: self._request.wait(timeout_s))
        return super().result()

    def is_completed(self) -> bool:
        if not self.future.done() and self._lock.acquire(blocking=False):
            try:
                if not self.future.done() and self._tests_true():
                    self._complete(lambda: None)
            finally:
                self._lock.release()
        return self.future.done()

    def source_rank(self) -> int:
        """Returns the global rank that the message came from. Raises TransportError before it is complete."""
        if not self.future.done():
            raise TransportError(f"{self._description} is not complete; wait first")
        return self._to_global(getattr(self._request, "source", -1))

    _source_rank = source_rank  # as torch.distributed spells it

    def _tests_true(self) -> bool:
        try:
            with self._scope:
                return self._request.test()
        except Exception as error:  # kept for whoever waits
            self.set_exception(error)
            return False

    def _complete(self, wait: Callable[[], None]) -> None:
        try:
            with self._scope:
                wait()
                if self._finish is not None:
                    self._finish()
        except CollectiveTimeoutError:
            raise  # the message is still under way
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(self._value)


def forget_ended(orphans: list[Request]) -> None:
    """Lets go of the messages whose handles were dropped and that are complete by now."""

    def has_ended(request: Request) -> bool:
        try:
            return request.test()
        except Exception:  # nobody is left to be told
            return True

    orphans[:] = [request for request in orphans if not has_ended(request)]
