"""What the transports share that have no eye of their own for who lives (MPI, torch's groups): they have a Watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _wording as wording
from .base import Request, Transport

if TYPE_CHECKING:
    import torch

    from ..errors import TransportError
    from ._watch import Message, Watch

__all__ = ["WatchedTransport"]


class WatchedTransport(Transport):
    """A transport whose ranks are seen by ``watch``; its messages are an object of their own."""

    watch: Watch
    _messages: Any  # each transport's own kind; all have these two

    @property
    def is_broken(self) -> bool:
        """Whether a rank has died, left or run out of time in this group, as far as this one knows."""
        return self.watch.failure is not None

    def abandon(self) -> None:
        self.watch.announce("interrupted", self.rank)

    def isend(self, flat: torch.Tensor, peer: int, tag: int = 0) -> Request:
        request: Request = self._messages.isend(flat, peer, tag)
        return request

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int = 0) -> Request:
        request: Request = self._messages.irecv(flat, peer, tag)
        return request

    def check(self, doing: str, message: Message | None, is_done: Callable[[], bool]) -> None:
        """Looks around once in a long wait, for ``message`` or in a collective: raises what broke the group.

        ``is_done`` is asked last: a peer may have gone because it was done with this call, too.
        """
        failure = self.watch.look(self.calls, message)
        if failure is not None and not is_done():
            raise self.failed(doing, failure)

    def check_whole(self, doing: str) -> None:
        """Raises what broke the group, if that is known already."""
        if self.watch.failure is not None:
            raise self.failed(doing, self.watch.failure)

    def failed(self, doing: str, failure: wording.Failure) -> TransportError:
        """Returns the error of a call on a group that ``failure`` broke."""
        return wording.failed(self.place(doing), failure)
