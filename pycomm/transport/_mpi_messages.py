"""Point-to-point messages over MPI; see [Note: waiting for MPI] in mpi.py for why receives are probed for.

MPI reads and writes the memory of a message until its request is complete, whoever holds the handle. So what has begun
is kept here: a plan that fails in the middle drops the handles of all its messages, and a caller may drop his.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, PycommError, TransportError
from . import _mpi_memory as memory
from . import _wording as wording
from ._part import Part
from ._tally import Message
from .base import Request

if TYPE_CHECKING:
    from ._patience import Look
    from .mpi import MpiTransport

__all__ = ["MpiMessages"]

_TAGS_OF_OUR_OWN = 2  # the largest two: for exchange() and meet()
_asked: set[weakref.ref[MpiMessages]] = set()  # of all groups of this process: those with receives that are due


class _MpiRequest(Request):
    """A send or a receive: what waits for it and what only asks look, by ``look``."""

    def __init__(self, transport: MpiTransport, message: Message, doing: str) -> None:
        self.transport = transport
        self._message = message
        self.doing = doing
        self._is_done = False

    def test(self) -> bool:
        if not self.look():
            self.transport.glance(self.doing, self._message, self.look)
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        self.transport.wait_until(self.look, timeout_s, self.doing, self._message)

    @abstractmethod
    def look(self) -> bool:
        """``test`` without a look at who lives."""


class _Send(_MpiRequest):
    """A message that MPI has been given."""

    def __init__(self, transport: MpiTransport, request: Any, flat: torch.Tensor, message: Message) -> None:
        super().__init__(transport, message, f"sending {flat.nbytes} bytes to rank {message.peer}")
        self._request = request
        self._flat = flat  # MPI reads it until the request is complete

    def look(self) -> bool:
        if not self._is_done:
            self.transport.progress()
            self._is_done = self.transport.poll(self._request, self.doing)
            if self._is_done:
                self.transport.forget(self)
        return self._is_done


class _Receive(_MpiRequest):
    """A message that is looked for, then received. ``progress`` of MpiMessages moves it."""

    def __init__(self, transport: MpiTransport, flat: torch.Tensor, peer: int | None, tag: int) -> None:
        sender = "any rank" if peer is None else f"rank {peer}"
        self.source = -1 if peer is None else peer
        super().__init__(
            transport, Message(self.source, tag), f"receiving {flat.nbytes} bytes from {sender} with tag {tag}"
        )
        self.flat = flat
        self.peer = peer
        self.tag = tag
        self.request: Any = None
        self.error: PycommError | None = None

    def look(self) -> bool:
        if not self._is_done:
            self.transport.progress()
            if self.request is not None:
                self._is_done = self.transport.poll(self.request, self.doing)
                if self._is_done:
                    self.transport.watch.tally.receive(self.source, self.tag)
                    self.transport.forget(self)
        if self._is_done and self.error is not None:
            raise self.error
        return self._is_done


class MpiMessages(Part["MpiTransport"]):
    """Sends, and the receives that have not met their message yet, in the order in which they were asked for."""

    def __init__(self, transport: MpiTransport) -> None:
        super().__init__(transport)
        self._due: list[_Receive] = []
        self._due_lock = threading.Lock()
        self._own = weakref.ref(self)
        self._top_tag = transport.largest_tag - _TAGS_OF_OUR_OWN

    def isend(self, flat: torch.Tensor, peer: int, tag: int) -> Request:
        """As ``Transport.isend``."""
        self._check_tag(tag)
        return self._start_send(flat, peer, tag)

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        """As ``Transport.irecv``."""
        self._check_tag(tag)
        return self._start_receive(flat, peer, tag)

    def progress(self) -> None:
        """Receives every message that has come and that one of the receives is for.

        Those of other groups too: who waits there for this rank to take a message may be who this one waits for.
        """
        if self._due:
            self._receive_due()
        for own in tuple(_asked):
            others = own()
            try:
                if others is not None and others is not self:
                    others._receive_due()
            except TransportError:  # is told to who waits there
                others = None
            if others is None:
                _asked.discard(own)

    def _receive_due(self) -> None:
        if not self._due_lock.acquire(blocking=False):  # another thread is at it
            return
        # A message may come between two probes: only the first of the receives that it fits may look for it.
        taken: set[tuple[int | None, int]] = set()
        try:
            for receive in list(self._due):
                peer, tag = receive.peer, receive.tag
                is_behind = (peer, tag) in taken or (None, tag) in taken or (peer is None and (-1, tag) in taken)
                if not is_behind and self._match(receive):
                    self._due.remove(receive)
                else:
                    taken |= {(peer, tag), (-1, tag)}
            if not self._due:
                _asked.discard(self._own)
        finally:
            self._due_lock.release()

    def exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout_s: float | None
    ) -> None:
        """Sends ``inputs[r]`` to rank r and receives ``outputs[r]`` from it, for all r: an all_to_all by messages."""
        tag = self._transport.largest_tag
        requests: list[Request] = [self._start_receive(flat, peer, tag) for peer, flat in enumerate(outputs)]
        requests += [self._start_send(flat, peer, tag) for peer, flat in enumerate(inputs)]
        for request in requests:
            request.wait(timeout_s)

    def meet(self, ranks: Sequence[int], key: int, look: Look) -> None:
        """Returns once all of ``ranks``, which include this one, have called it with ``key``, another one each time:
        the first is told, and answers. ``look`` raises what ends it earlier.
        """
        first, others = ranks[0], list(ranks[1:])
        if self._transport.rank == first:
            self._hear(others, key, look)
            self._tell(others, key, look)
        else:
            self._tell([first], key, look)
            self._hear([first], key, look)

    def _tell(self, peers: Sequence[int], key: int, look: Look) -> None:
        word = torch.tensor([key], dtype=torch.int64, device="cpu").view(torch.uint8)
        for send in [self._start_send(word, peer, self._transport.largest_tag - 1) for peer in peers]:
            self._transport.wait_until(send.look, None, "new_group", look=look)

    def _hear(self, peers: Sequence[int], key: int, look: Look) -> None:
        """Waits for the word of each; passes over those of meetings that were given up."""
        for peer in peers:
            word = torch.zeros(1, dtype=torch.int64, device="cpu")
            while word.item() != key:
                receive = self._start_receive(word.view(torch.uint8), peer, self._transport.largest_tag - 1)
                try:
                    self._transport.wait_until(receive.look, None, "new_group", look=look)
                except BaseException:
                    self._withdraw(receive)
                    raise

    def _withdraw(self, receive: _Receive) -> None:
        """Sees to it that a receive which nobody waits for takes no message that comes later."""
        with self._due_lock:
            if receive in self._due:
                self._due.remove(receive)

    def _start_send(self, flat: torch.Tensor, peer: int, tag: int) -> _Send:
        transport = self._transport
        doing = f"sending {flat.nbytes} bytes to rank {peer} with tag {tag}"
        try:
            with transport.lock:
                request = transport.open_communicator().Isend(memory.as_bytes(flat), peer, tag)
        except transport.mpi.Exception as error:
            raise transport.error_of(error, doing) from error
        send = _Send(transport, request, flat, transport.watch.tally.send(peer, tag))
        transport.keep(send)
        return send

    def _start_receive(self, flat: torch.Tensor, peer: int | None, tag: int) -> _Receive:
        self._transport.open_communicator()
        receive = _Receive(self._transport, flat, peer, tag)
        with self._due_lock:
            self._due.append(receive)
            _asked.add(self._own)
        return receive

    def _match(self, receive: _Receive) -> bool:
        """Looks for the message of ``receive`` and starts receiving it."""
        transport = receive.transport  # also where another group's progress brings it on
        mpi, status = transport.mpi, transport.mpi.Status()
        source = mpi.ANY_SOURCE if receive.peer is None else receive.peer
        try:
            with transport.lock:
                message = transport.open_communicator().Improbe(source, receive.tag, status)
                if message is None:
                    return False
                self._check_size(receive, int(status.Get_source()), int(status.Get_elements(mpi.BYTE)))
                receive.request = message.Irecv(memory.as_bytes(receive.flat))
                transport.keep(receive)
        except mpi.Exception as error:
            raise transport.error_of(error, receive.doing) from error
        return True

    def _check_size(self, receive: _Receive, source: int, nbytes: int) -> None:
        """Sees to it that a message of another size fails the receive, and goes to a buffer that nobody reads."""
        receive.source = source
        if nbytes != receive.flat.nbytes:
            place = receive.transport.place("recv")
            receive.error = wording.wrong_size(place, source, receive.tag, receive.flat.nbytes, nbytes)
            receive.flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._top_tag:
            raise ConfigError(f"tag of a message over transport 'mpi': expected 0 to {self._top_tag}, got {tag}")
