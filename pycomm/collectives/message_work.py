"""Handles of messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from ..config import limit_s
from ..errors import CollectiveTimeoutError, TransportError, forget_locals
from .lazy_work import LazyWork, ShmHandle, wait_and_tell

if TYPE_CHECKING:
    from ..transport.base import Request
    from .group import Group

__all__ = ["MessageWork", "NativeWork", "NativeWorkInGroup", "RequestWork"]

_A_LOOK_S = 1e-3  # left to who has waited for another thread all the time that it had


class MessageWork(LazyWork):
    """A message under way."""

    _peer: int | None  # the rank of the group at the other end; None if it may be any
    _is_global = True  # ``source_rank`` tells global ranks
    is_message = True

    @property
    def _description(self) -> str:  # type: ignore[override]
        g = self._group
        whom = "any rank" if self._peer is None else f"rank {self._peer}"
        toward = "from" if self._verb == "irecv" else "to"
        return f"{self._verb} {toward} {whom} of group {g.name!r} on {g.member}"

    def _have_waited_for(self) -> None:
        threading.Thread(target=wait_and_tell, args=(self,), name="pycomm-message", daemon=True).start()

    def source_rank(self) -> int:
        """Returns the global rank that the message came from. Raises TransportError before it is complete."""
        if not self._is_done:
            raise TransportError(f"{self._description} is not complete; wait first")
        source = getattr(self._ending, "source", -1)
        return self._group.ranks[source] if self._is_global else source

    _source_rank = source_rank  # as torch.distributed spells it


class RequestWork(MessageWork):
    """A message of any transport."""

    _future: Future[Any] | None = None
    _is_asked = False
    _is_done = True  # until there is a message: Ctrl-C may come before that
    _error: BaseException | None = None

    def __init__(
        self,
        group: Group,
        verb: str,
        peer: int | None,
        request: Request,
        result: Any,
        finish: Callable[[], None] | None = None,
        *,
        is_global: bool = True,
    ) -> None:
        """``finish`` copies what came to where the caller wants it."""
        self._group, self._ending, self._is_done = group, request, False
        self._verb = verb
        self._peer = peer
        self._value = result
        self._finish = finish
        self._is_global = is_global
        self._lock = threading.Lock()  # held by the thread that moves the message on

    def __del__(self) -> None:
        self._left()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        if not self._is_done:
            self._group.transport.check_not_forked(self._verb)  # the message is its parent's to move
            patience_s = limit_s(timeout) or self._group.timeout_s
            deadline = time.monotonic() + patience_s
            if not self._lock.acquire(timeout=min(patience_s, threading.TIMEOUT_MAX)):
                raise self._not_complete(f"{patience_s:.3g} s")
            try:
                if not self._is_done:
                    self._move(self._ending.wait, max(deadline - time.monotonic(), _A_LOOK_S))
            finally:
                self._lock.release()
        if self._error is not None:
            self._is_asked = True
            raise self._error
        return True

    def is_completed(self) -> bool:
        if self._is_done:
            return True
        self._group.transport.check_not_forked(self._verb)
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_done:
                    self._move(self._ending.test)
            finally:
                self._lock.release()
        return self._is_done

    def _move(self, move: Callable[..., bool | None], *timeout_s: float | None) -> None:
        """Runs the request's ``test`` or ``wait``, and completes the message unless that says False."""
        try:
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


class NativeWork(ShmHandle, MessageWork):
    """A message of a short cut: to wait for it, to ask and to drop it is native (``handle.cpp``)."""

    @property
    def _peer(self) -> int | None:  # type: ignore[override]
        return None if self.source < 0 else self.source

    @property
    def _ending(self) -> Request:  # type: ignore[override]
        return cast("Request", self)  # it has what one has


class NativeWorkInGroup(NativeWork):
    """One whose ``source_rank`` is a rank of the group."""

    _is_global = False
