"""Handles of what moves on when somebody waits or asks: messages, and calls that a short cut has started.

Such a handle has a future only if somebody wants one: to make that takes longer than a short message or call, and a
thread that waits, so that the future completes.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..errors import NativeUnavailableError, forget_locals
from ..ops import native
from ..transport.base import has_ended
from .work import Work

if TYPE_CHECKING:
    from .._native import ShmHandle
    from ..transport.base import Request
    from .futures import Tellers
    from .group import Group
else:
    try:
        ShmHandle = native().ShmHandle
    except NativeUnavailableError:  # then no transport has short cuts either

        class ShmHandle:
            """Nobody makes one."""


__all__ = ["LazyWork", "ShmHandle", "StartedWork", "wait_and_tell"]

_log = logging.getLogger("pycomm")
_futures = threading.Lock()  # guards which handles have one, and which of those have been told


class LazyWork(Work):
    """``group.orphans`` takes over what a handle is of that is dropped before that is complete."""

    _group: Group
    _verb: str
    _value: Any  # what the call writes: the caller's own
    _ending: Request  # ends with it, and keeps its memory alive until then
    _is_done: bool
    _error: BaseException | None
    _is_told = False  # the future, of how it has ended

    def _have_waited_for(self) -> None:
        """Has another thread run ``wait_and_tell``."""
        raise NotImplementedError

    @property
    def tellers(self) -> Tellers:  # type: ignore[override]
        return self._group.tellers

    @property
    def future(self) -> Future[Any]:
        with _futures:
            is_new = self._future is None
            future = self._future = self._future or Future()
        if self._is_done:
            self._tell_future()
        elif is_new:
            self._have_waited_for()
        return future

    def result(self, timeout: float | timedelta | None = None) -> Any:
        self.wait(timeout)
        return self._value

    def exception(self) -> BaseException | None:
        if not self.is_completed():
            return None
        self._is_asked = True
        return self._error

    def _tell_future(self, error: BaseException | None = None) -> None:
        """Of how it has ended, or of the ``error`` with which the thread gave up; once, the first time."""
        assert self._future is not None
        with _futures:
            is_told, self._is_told = self._is_told, True
        error = self._error if error is None else error
        if is_told:
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._value)

    def _left(self) -> None:
        """As the handle is dropped: nobody has waited until it ended, or heard how."""
        if not self._is_done:
            # Its memory is in use until it is complete, and a transport may call back what nobody holds.
            orphans = self._group.orphans
            orphans[:] = [request for request in orphans if not has_ended(request)]
            orphans.append(self._ending)
        elif self._error is not None and not self._is_asked:
            _log.error("%s failed, and its handle was dropped without a wait: %s", self._description, self._error)


class StartedWork(ShmHandle, LazyWork):
    """A call that a short cut has started: to wait for it, to ask and to drop it is native (``handle.cpp``)."""

    @property
    def _description(self) -> str:  # type: ignore[override]
        g = self._group
        return f"{self._verb} of group {g.name!r} on {g.member}"

    @property
    def _ending(self) -> Request:  # type: ignore[override]
        return cast("Request", self)  # it has what one has

    def has_been_seen_to_end(self) -> bool:
        # Without looking: the last rank to come would run callbacks at once, and their calls before its own next ones.
        return self._is_done

    def _have_waited_for(self) -> None:
        # By the thread that runs the group's calls: so futures complete in the order of those.
        assert self._future is not None
        if not self._group.hand_over(partial(wait_and_tell, self), self._future):
            wait_and_tell(self)  # its group has been closed, which has ended it


def wait_and_tell(work: LazyWork) -> None:
    """Returns once ``work`` is complete or has failed, or its group's timeout is over; its future is told."""
    try:
        work.wait()
    except BaseException as error:  # goes to whoever asks the future
        forget_locals(error)
        work._tell_future(error)
    del work  # which the error would keep
