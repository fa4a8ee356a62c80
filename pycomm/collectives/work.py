"""Handles of calls that are under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import seconds
from ..errors import CollectiveTimeoutError, TransportError, forget_locals

if TYPE_CHECKING:
    from ..transport.base import Request
    from .group import Group

__all__ = ["RequestWork", "Work", "forget_ended"]

_log = logging.getLogger("pycomm")
_futures = threading.Lock()  # guards which messages have one, and which of those have been told


class Work:
    """A call made with ``async_op=True``, or a message from ``isend`` or ``irecv``.

    The buffers of the call are not touched until it is complete; the library keeps them alive, also if the handle is
    dropped. Any thread may wait, more than once. Errors of the call are raised by ``wait``, ``synchronize`` and
    ``result``.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._future: Future[Any] | None = Future()
        self._is_asked = False

    @property
    def future(self) -> Future[Any]:
        """What completes with the call. For the library."""
        assert self._future is not None
        return self._future

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

    It has a future only if somebody wants one: making that takes longer than a short message.
    """

    _future: Future[Any] | None = None
    _is_told = False  # the future, of how the message ended
    _is_asked = False
    _is_done = False
    _error: BaseException | None = None
    _finish: Callable[[], None] | None = None
    _is_short_cut = True
    _is_global = True

    def __init__(
        self,
        group: Group,
        verb: str,
        peer: int | None,
        request: Request,
        result: Any,
        finish: Callable[[], None] | None = None,
        *,
        is_short_cut: bool = True,
        is_global: bool = True,
    ) -> None:
        """``finish`` copies what came to where the caller wants it; ``is_global``: ``source_rank`` tells global ranks.

        A request that a short cut started says itself where it failed. ``group.orphans`` takes the request over if this
        handle is dropped before the message is complete.
        """
        if group.orphans:
            forget_ended(group.orphans)
        self._group = group
        self._verb = verb
        self._peer = peer
        self._request = request
        self._value = result
        self._lock = threading.Lock()  # held by the thread that moves the message on
        if not is_short_cut:
            self._is_short_cut = False
            self._finish = finish
        if not is_global:
            self._is_global = False

    @property
    def _description(self) -> str:  # type: ignore[override]
        g = self._group
        whom = "any rank" if self._peer is None else f"rank {self._peer}"
        toward = "from" if self._verb == "irecv" else "to"
        return f"{self._verb} {toward} {whom} of group {g.name!r} on rank {g.rank} of {g.world_size}"

    @property
    def future(self) -> Future[Any]:
        with _futures:
            if self._future is None:
                self._future = Future()
        if self._is_done:
            self._tell_future()
        return self._future

    def __del__(self) -> None:
        if not self._is_done:
            # Its memory is in use until the message is complete, and a transport may call back what nobody holds.
            self._group.orphans.append(self._request)
        elif self._error is not None and not self._is_asked:
            _log.error("%s failed, and its handle was dropped without a wait: %s", self._description, self._error)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        if not self._is_done:
            timeout_s = None if timeout is None else seconds(timeout)
            with self._lock:
                if not self._is_done:
                    self._move(self._request.wait, timeout_s)
        if self._error is not None:
            self._is_asked = True
            raise self._error
        return True

    def result(self, timeout: float | timedelta | None = None) -> Any:
        self.wait(timeout)
        return self._value

    def is_completed(self) -> bool:
        if not self._is_done and self._lock.acquire(blocking=False):
            try:
                if not self._is_done:
                    self._move(self._request.test)
            finally:
                self._lock.release()
        return self._is_done

    def exception(self) -> BaseException | None:
        if not self.is_completed():
            return None
        self._is_asked = True
        return self._error

    def source_rank(self) -> int:
        """Returns the global rank that the message came from. Raises TransportError before it is complete."""
        if not self._is_done:
            raise TransportError(f"{self._description} is not complete; wait first")
        source = getattr(self._request, "source", -1)
        return self._group.ranks[source] if self._is_global else source

    _source_rank = source_rank  # as torch.distributed spells it

    def _move(self, move: Callable[..., bool | None], *timeout_s: float | None) -> None:
        """Runs the request's ``test`` or ``wait``, and completes the message unless that says False."""
        try:
            if self._is_short_cut:
                is_done = move(*timeout_s)
            else:
                with self._group.scope(self._verb):
                    is_done = move(*timeout_s)
                    if is_done is not False and self._finish is not None:
                        self._finish()
        except CollectiveTimeoutError:
            raise  # the message is still under way
        except Exception as error:
            forget_locals(error)
            self._error = error
            is_done = True
        if is_done is not False:
            self._is_done = True
            if self._future is not None:
                self._tell_future()

    def _tell_future(self) -> None:
        with _futures:
            is_told, self._is_told = self._is_told, True
        if is_told:
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)


def forget_ended(orphans: list[Request]) -> None:
    """Lets go of the messages whose handles were dropped and that are complete by now."""

    def has_ended(request: Request) -> bool:
        try:
            return request.test()
        except Exception:  # nobody is left to be told
            return True

    orphans[:] = [request for request in orphans if not has_ended(request)]
