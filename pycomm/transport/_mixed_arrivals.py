"""Messages of users over hosts: how a receive from any rank waits on two transports.

[Note: messages from any rank]
A receive from any rank would have to wait on two transports, and to be withdrawn from one when the other has the
message; gloo cannot withdraw. So whoever sends a message of a user announces it: a few bytes with a tag of their own,
ahead of the message. The receiver listens to announcements, one standing receive a transport, from its first receive
on. It then knows what is on its way, and a receive from any rank becomes one from the rank whose announcement nobody
has taken. Receives take messages in the order in which they were asked for: one from a certain rank waits behind those
from any rank with its tag. Messages of collectives are not announced: their peers are known.

Ranks that close the group leave word of how many messages they have announced. Once all others have, and all of that
has been heard, a receive that nobody's message is for will get none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import torch

from ..errors import CollectiveTimeoutError, PycommError, forget_locals
from .base import Request, Transport, has_ended

if TYPE_CHECKING:
    from .mixed import MixedTransport

__all__ = ["Announced", "Arrivals"]

_ASK_S = 0.25  # of waiting, between two looks at who has left


class Arrivals:
    """Which messages of users are announced and which are asked for; see [Note: messages from any rank].

    Of a transport that has this object, and that what it does here is given: a closed one goes with its last reference.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._heard: Counter[int] = Counter()  # announcements by peer
        self._left: Counter[tuple[int, int]] = Counter()  # by (peer, tag): announced - taken; may be negative
        self._asked: list[_Receive] = []  # those whose sender is not known, and those behind them
        self._announcing: list[Request] = []  # announcements of messages that have been taken
        self._error: PycommError | None = None
        self._next_ask_s = 0.0
        self._is_listening = False
        self._is_closed = False

    def receive(self, transport: MixedTransport, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        """As ``Transport.irecv``."""
        self._start_listening(transport)
        receive = _Receive(transport, self, flat, peer, tag)
        with self._changed:
            self._asked.append(receive)
            self._assign()
        return receive

    def has_started(self, receive: _Receive, timeout_s: float) -> bool:
        """Whether the sender of ``receive`` is known and its message is being received; waits for it."""
        deadline = time.monotonic() + timeout_s
        while receive.request is None:
            left_s = deadline - time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: receive.request or receive.error or self._error, min(left_s, _ASK_S))
                error, heard = receive.error or self._error, self._heard.copy()
            if receive.request is None and error is not None:
                raise error
            has_time, now_s = left_s > _ASK_S, time.monotonic()
            # Who has little time, or none, may come again and again.
            if receive.request is None and (has_time or now_s >= self._next_ask_s):
                self._next_ask_s = now_s + _ASK_S
                receive.transport.check_senders(receive.flat.nbytes, receive.tag, heard)
            if receive.request is not None or not has_time:
                break
        return receive.request is not None

    def keep(self, announcement: Request) -> None:
        """Keeps what has not been heard yet: a receiver that listens is to count it, late as it is."""
        with self._changed:
            self._announcing = [each for each in (*self._announcing, announcement) if not has_ended(each)]

    def close(self) -> None:
        """Lets the listeners end; they do once their transports are closed."""
        self._is_closed = True

    def _assign(self) -> None:
        """Starts the receives whose sender is known, in the order in which they were asked for."""
        undecided: set[int] = set()  # tags that a receive from any rank waits for
        for receive in list(self._asked):
            peer, tag = self._sender(receive.tag) if receive.peer is None else receive.peer, receive.tag
            if peer is None:
                undecided.add(tag)
            elif tag not in undecided:
                self._asked.remove(receive)
                self._left[peer, tag] -= 1
                try:
                    receive.source = peer  # before `request`, which another thread takes for started
                    receive.request = receive.transport.start(receive.flat, peer, tag, is_send=False)
                except PycommError as error:  # this may be a listener's thread
                    receive.error = error

    def _sender(self, tag: int) -> int | None:
        return next((peer for (peer, its_tag), left in self._left.items() if its_tag == tag and left > 0), None)

    def _start_listening(self, transport: MixedTransport) -> None:
        if self._is_listening:
            return
        self._is_listening = True
        for part in (transport.inner, transport.outer):
            arguments = transport, part
            threading.Thread(target=self._listen, args=arguments, name="pycomm-arrivals", daemon=True).start()

    def _listen(self, transport: MixedTransport, part: Transport) -> None:
        tag = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            while not self._is_closed:
                peer = transport.listen(part, tag)
                with self._changed:
                    self._heard[peer] += 1
                    self._left[peer, int(tag)] += 1
                    self._assign()
                    self._changed.notify_all()
        except PycommError as error:  # for whoever waits for a message
            forget_locals(error)
            with self._changed:
                self._error = transport.reason(error).with_traceback(None)  # which has this call, and the transport
                self._changed.notify_all()


class _Receive(Request):
    """A receive of a user's message. ``request`` is there once it is known which message it gets."""

    def __init__(
        self, transport: MixedTransport, arrivals: Arrivals, flat: torch.Tensor, peer: int | None, tag: int
    ) -> None:
        self.transport = transport
        self.flat = flat
        self.peer = peer
        self.tag = tag
        self.request: Request | None = None
        self.source = -1  # the rank that sent the message, once that is known
        self.error: PycommError | None = None
        self._arrivals = arrivals

    def test(self) -> bool:
        return self._arrivals.has_started(self, 0.0) and self.request is not None and self.request.test()

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self.transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if not self._arrivals.has_started(self, limit_s) or self.request is None:
            sender = "any rank" if self.peer is None else f"rank {self.peer}"
            raise CollectiveTimeoutError(
                f"rank {self.transport.rank} waited {limit_s:.3g} s for a message from {sender} with tag {self.tag}, "
                f"none came; see whether a rank sends one, or raise the timeout"
            )
        self.request.wait(max(deadline - time.monotonic(), 1e-3))


class Announced(Request):
    """A message of a user, behind its announcement. It is complete when the message is: a receiver that knows its
    sender takes it without listening, and may be done, and gone, before it hears of it.
    """

    def __init__(self, announcement: Request, message: Request, arrivals: Arrivals) -> None:
        self._announcement = announcement
        self._message = message
        self._arrivals = arrivals

    def test(self) -> bool:
        if not self._message.test():
            return False
        self._arrivals.keep(self._announcement)
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        self._message.wait(timeout_s)
        self._arrivals.keep(self._announcement)
