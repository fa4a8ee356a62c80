"""Swaps of frames over gloo, one trip each: those that calls begin with, and small ones where the wire is full.

[Note: one trip]
gloo sends a message's data when it knows that the receiver has room for it: two trips, if the receive is not posted
before the send. Behind a megabyte on its way to the same host a trip takes as long as that. So the receives of a swap
are posted in the one before, and word of them goes along with its frames: [Note: one packet] in _gloo_sockets.py.

[Note: who waits]
A collective of gloo's goes through a thread of the group's, which has to wake up to begin it, and again to end it. A
message is sent by whoever calls, and its receiver is woken by the thread that reads the socket: two threads less to
wake, some 50 us each. torch gives Python no way to leave such a wait before its end; the native core has one
(csrc/bindings/gloo_waits.cpp). Without it a helper's thread waits, which costs more than all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PycommError
from ._part import Part
from ._torch_messages import EXCHANGE_TAG, MARGIN_S, Posted, finish_all, gloo_message_of, timeout_of
from ._torch_waits import wait_for_a_slice
from ._watched import Lateness

if TYPE_CHECKING:
    from .._native import GlooMessage
    from .base import Meanwhile
    from .torch import TorchTransport

__all__ = ["PostedExchange"]


class PostedExchange(Part["TorchTransport"]):
    """Swaps frames of up to ``nbytes`` among ``ranks``, each of which makes one alike, and then makes the same calls.

    Those that a rank has at once differ in ``kind``. Receives are posted a round ahead if all ranks say so
    (``is_ahead``); in a group that lives on when pycomm is done with it, none may be left over.
    """

    def __init__(
        self, transport: TorchTransport, ranks: Sequence[int], nbytes: int, kind: int = 0, is_ahead: bool = True
    ) -> None:
        super().__init__(transport)
        self._tag = EXCHANGE_TAG + kind
        self._place = ranks.index(transport.rank)
        self._peers = [(place, rank) for place, rank in enumerate(ranks) if rank != transport.rank]
        self._is_ahead = is_ahead
        # Of this round and the last gloo may still read what was sent, and needs the handles; and while this one's
        # frames are read it may write the next one's.
        self._rounds = [_Round(len(ranks), nbytes) for _ in range(2)]
        self._turn = 0
        self._lateness = Lateness()
        self.can_leave = False  # the waits for receives; known with the first ones
        self._receives: list[Any] = []
        if is_ahead:
            self._post_ahead()

    def __call__(
        self, frame: torch.Tensor, verb: str, timeout_s: float | None, meanwhile: Meanwhile | None = None
    ) -> torch.Tensor:
        """As ``Transport.exchange``; ``meanwhile`` is called while the frames travel."""
        here = self._swap(frame, frame.numel(), verb, timeout_s, meanwhile)
        memmove(here.addresses[self._place], frame.data_ptr(), frame.numel())
        return here.frames

    def swap_part(self, frame: torch.Tensor, nbytes: int, verb: str, timeout_s: float | None) -> list[torch.Tensor]:
        """Returns all ranks' frames; of this one ``nbytes`` are sent."""
        here = self._swap(frame, nbytes, verb, timeout_s, None)
        here.rows[self._place] = frame
        return here.rows

    def close(self) -> None:
        """Lets go of what torch gave for the last rounds; there are no more."""
        self._receives = []
        for each in self._rounds:
            each.sends, each.receives = [], []

    def _swap(
        self, frame: torch.Tensor, nbytes: int, verb: str, timeout_s: float | None, meanwhile: Meanwhile | None
    ) -> _Round:
        transport = self._transport
        group, limit_s = transport.open_group(), transport.timeout_s if timeout_s is None else timeout_s
        is_late = self._lateness.begin(limit_s)
        here, self._turn = self._rounds[self._turn], 1 - self._turn
        sent = here.copy(frame.data_ptr(), nbytes)
        try:
            here.receives = self._receives or self._post(here)
            with transport.corked:  # [Note: one packet] in _gloo_sockets.py
                here.sends = []
                for _, peer in self._peers:  # no comprehension: it is a closure, which an error keeps with the group
                    here.sends.append(group.send(sent, peer, self._tag))
                if self._is_ahead:
                    self._post_ahead()
        except PycommError:  # closed meanwhile
            raise
        except RuntimeError as error:
            raise transport.error_of(error, verb, limit_s) from error
        if meanwhile is not None:
            meanwhile()
        self._await(here.receives, verb, limit_s)
        if is_late:
            transport.check_given_up(verb)
        return here

    def _post(self, into: _Round) -> list[Any]:
        """Returns the receives as torch's handles, or what can be waited for a while."""
        group, works = self._transport.open_group(), []
        for place, peer in self._peers:
            works.append(group.recv([into.rows[place]], peer, self._tag))
        messages = [gloo_message_of(work) for work in works]
        self.can_leave = None not in messages
        return messages if self.can_leave else works

    def _post_ahead(self) -> None:
        self._receives = []
        try:
            self._receives = self._post(self._rounds[self._turn])
        except RuntimeError:
            pass  # a peer may be done and gone; the next swap, if there is one, says so

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _await(self, receives: list[Any], verb: str, limit_s: float) -> None:
        if not self.can_leave:
            self._await_behind(receives, verb, limit_s)
            return
        arrivals = _Arrivals(receives, timeout_of(limit_s + MARGIN_S))
        try:
            self._transport.wait_in_slices(arrivals.have_come, verb, limit_s)
        except PycommError:  # said what it is
            raise
        except RuntimeError as error:
            raise self._transport.error_of(error, verb, limit_s, self._peers[arrivals.place][1]) from error

    def _await_behind(self, receives: list[Any], verb: str, limit_s: float) -> None:
        """Has a helper's thread wait."""
        Posted(verb, None, self._transport, partial(finish_all, receives, self._rounds)).wait(limit_s)


class _Arrivals:
    """A swap's messages, which are waited for one after the other; ``place`` is that of the first not complete."""

    def __init__(self, messages: list[GlooMessage], longest: timedelta) -> None:
        self._messages = messages
        self._longest = longest
        self.place = 0

    def have_come(self, slice_s: float) -> bool:
        """Waits for a slice each; says whether all are complete."""
        messages = self._messages
        while self.place < len(messages) and wait_for_a_slice(messages[self.place], self._longest, slice_s):
            self.place += 1
        return self.place == len(messages)


class _Round:
    """The memory of one round: this rank's frame on its way, and the others' as they arrive."""

    def __init__(self, ranks: int, nbytes: int) -> None:
        self.frames = torch.empty((ranks, nbytes), dtype=torch.uint8, device="cpu")
        self.rows = list(self.frames.unbind())
        self.addresses = [row.data_ptr() for row in self.rows]
        # torch's handles. If one goes that gloo waits for, its connection may read no more.
        self.sends: list[Any] = []
        self.receives: list[Any] = []
        self._own = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._address = self._own.data_ptr()
        self._sent = [self._own]

    def copy(self, address: int, nbytes: int) -> list[torch.Tensor]:
        """Returns what torch sends: the ``nbytes`` at ``address``, in memory that stays as it is."""
        if self._sent[0].numel() != nbytes:
            self._sent = [self._own[:nbytes]]
        memmove(self._address, address, nbytes)  # torch lets go of Python's lock in each of its calls
        return self._sent
