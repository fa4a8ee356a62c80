"""Point-to-point messages over a torch process group.

[Note: framed messages]
gloo ends the process if a message is longer than the buffer that waits for it, and tells nobody if it is shorter. So
a message here is a *frame* of fixed size: its byte count, its index among the messages of this sender with this tag,
and, if it fits, the data. What does not fit follows at once as a second message, on a gloo tag made of the caller's
tag, the index and the byte count. The receiver knows all three and posts both receives at once, so two ranks that each
send before they receive do not wait for each other. If it expects another byte count, the data has another gloo tag and
never gets into the receiver's buffer; the frame tells what came instead.

A receive from any rank learns the index from the frame, so a helper thread has to post the second receive; and so has
every later receive with that tag, as nobody knows which messages those from any rank will take.

Messages between ranks that have agreed on their sizes go without a frame.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, NativeUnavailableError, PycommError, forget_locals
from ..ops import native
from . import _wording as wording
from ._part import Part
from ._tally import Message
from ._torch_waits import LAST_LOOK_S, has_come_after_all, helpers, wait_for_a_slice
from .base import ANNOUNCEMENT_TAG, FIRST_OWN_TAG, Request

if TYPE_CHECKING:
    from .._native import GlooMessage
    from .torch import TorchTransport

__all__ = [
    "EXCHANGE_TAG",
    "MARGIN_S",
    "FramedMessages",
    "PlainMessages",
    "Posted",
    "finish_all",
    "gloo_message_of",
    "timeout_of",
]

MARGIN_S = 1.0  # by which torch's own time limit, which ends connections, is beyond a wait that can be left

_HEADER_BYTES = 16
_FRAME_BYTES = 256
_INLINE_BYTES = _FRAME_BYTES - _HEADER_BYTES
_TAG_BITS = 15
_LONGEST_S = 30 * 24 * 3600.0
_DATA_TAGS = 1 << 30  # those of frames are below; gloo has 2^31
EXCHANGE_TAG = 1 << 29  # and the next two: those of _torch_exchange.py; then NEVER_SENT_TAG of _torch_waits.py


class Posted(Request):
    """A message whose parts torch has; ``finish(this, left_s)`` waits for them, in a helper's thread.

    ``message`` is what it is to others, None for what is not counted; its peer is -1 for a receive from any rank.
    ``work`` is torch's handle where it is all that there is to wait for: who waits does so in torch itself, if that can
    be left, unless a helper does already.
    """

    def __init__(
        self,
        doing: str,
        message: Message | None,
        transport: TorchTransport,
        finish: Callable[[Posted, float], None],
        work: Any = None,
    ) -> None:
        self.source = -1 if message is None else message.peer
        self.gloo: Any = transport.group if transport.is_gloo else None  # whose waits can be ended
        self.doing = doing
        self.tag = -1 if message is None else message.tag
        self._message = message
        self._transport = transport
        self._finish = finish
        self._gloo_message = None if work is None else gloo_message_of(work)
        self._ended = threading.Lock()  # held until the message is complete
        self._ended.acquire()
        self._choosing = threading.Lock()
        self._has_waiter = False  # in torch: a helper, or a thread in ``wait``; True for good once it is complete
        self._is_done = False
        self._error: PycommError | None = None

    def test(self) -> bool:
        self._start_helper()
        # A connection's end does not end one from any rank, nor one from a rank that goes on in another group.
        if not self._is_done and self._message is not None:
            self._transport.glance(self.doing, self._message, self._has_ended)
        return self._is_done and self._raise_or_true()

    def _has_ended(self) -> bool:
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._transport.timeout_s if timeout_s is None else timeout_s
        self._transport.wait_in_slices(self._wait_for, self.doing, limit_s, self._message)
        self._raise_or_true()

    def settle(self) -> None:
        return None  # no thread has to wait; gloo lets go of the memory by itself

    def _wait_for(self, left_s: float) -> bool:
        """Waits for ``left_s`` at most, in torch or for who waits there; says whether the message is complete."""
        gloo_message = self._gloo_message
        if gloo_message is None:
            self._start_helper()
        elif self._take():
            try:
                wait_for_a_slice(gloo_message, timeout_of(self._transport.timeout_s + MARGIN_S), left_s)
            except RuntimeError as error:
                self._end(self._error_of(error))
            finally:  # also if a signal raises
                if gloo_message.is_complete:
                    self._end(None)
                self._has_waiter = self._is_done
            return self._is_done
        if not self._is_done and self._ended.acquire(timeout=left_s or LAST_LOOK_S):
            self._ended.release()  # for the next who waits
        return self._is_done

    def _take(self) -> bool:
        """Says whether the caller becomes the one who waits in torch: nobody does, and the message is not complete."""
        with self._choosing:
            had_waiter, self._has_waiter = self._has_waiter, True
            return not had_waiter

    def _start_helper(self) -> None:
        if not self._has_waiter and self._take():
            helpers.complete(self)

    def complete(self) -> None:
        """Waits inside torch, in a helper's thread."""
        failure: PycommError | None = None
        try:
            self._finish(self, self._transport.timeout_s)
        except PycommError as error:
            forget_locals(error)
            failure = error
        except RuntimeError as error:
            is_ending = helpers.is_ending  # nobody is there to be told
            failure = wording.used_closed(self._transport.place(self.doing)) if is_ending else self._error_of(error)
        self._end(failure)

    def _end(self, error: PycommError | None) -> None:
        self._error = error
        # [Note: the end of the interpreter] in _torch_waits.py
        self._finish, self._gloo_message, self.gloo = _finish_nothing, None, None
        # Both at once: a thread that waits for this message and finds it counted, its sender gone, would miss another.
        with self._transport.watch.tally.counting:
            if self._message is not None and not self._message.is_sent and self.source >= 0:
                self._transport.watch.tally.receive(self.source, self._message.tag)
            self._is_done = True
        self._ended.release()

    def _error_of(self, error: RuntimeError) -> PycommError:
        if self.tag == ANNOUNCEMENT_TAG and self._message is not None and self._message.is_sent:
            return wording.used_closed(self._transport.place(self.doing))  # no failure, unless of what it announces
        return self._transport.error_of(error, self.doing, self._transport.timeout_s, self.source)

    def _raise_or_true(self) -> bool:
        if self._error is not None:
            raise self._error
        return True


def _finish_nothing(_: Posted, left_s: float) -> None:
    """What a message does that is complete."""


class _Messages(Part["TorchTransport"]):
    """What both kinds share: messages of a rank to itself, which no backend of torch carries."""

    def __init__(self, transport: TorchTransport) -> None:
        super().__init__(transport)
        self._to_self: list[tuple[int, torch.Tensor]] = []
        self._self_receives: list[_SelfReceive] = []

    def isend(self, flat: torch.Tensor, peer: int, tag: int) -> Request:
        """As ``Transport.isend``."""
        if peer != self._transport.rank:
            return self._start_send(flat, peer, tag)
        self._to_self.append((tag, flat.clone()))
        self._match()
        return _Done()

    def irecv(self, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        """As ``Transport.irecv``; a message of this rank to itself comes before those of others if ``peer`` is None."""
        if peer is None:
            peer = self._transport.rank if any(sent == tag for sent, _ in self._to_self) else None
        if peer != self._transport.rank:
            return self._start_receive(flat, peer, tag)
        receive = _SelfReceive(flat, tag, self._transport)
        self._self_receives.append(receive)
        self._match()
        return receive

    def _start_send(self, flat: torch.Tensor, peer: int, tag: int) -> Request:
        raise NotImplementedError

    def _start_receive(self, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        raise NotImplementedError

    def _match(self) -> None:
        for receive in list(self._self_receives):
            index = next((i for i, (tag, _) in enumerate(self._to_self) if tag == receive.tag), None)
            if index is not None:
                self._self_receives.remove(receive)
                receive.deliver(self._to_self.pop(index)[1])

    def _post(self, doing: str, peer: int, start: Callable[..., Any], *arguments: Any) -> Any:
        # No closures, here and in what finishes a message: an error would keep them, and with them torch's group.
        try:
            return start(*arguments)
        except RuntimeError as error:
            raise self._transport.error_of(error, doing, self._transport.timeout_s, peer) from error


class PlainMessages(_Messages):
    """Messages as torch sends them: the backend has to notice a wrong size. NCCL has no tags, and no "any" sender."""

    def _start_send(self, flat: torch.Tensor, peer: int, tag: int) -> Request:
        doing = f"sending {flat.nbytes} bytes to rank {peer}"
        group = self._transport.open_group(doing)
        work = self._post(doing, peer, group.send, [flat.view(torch.uint8)], peer, tag)
        message = self._transport.watch.tally.send(peer, tag)
        return Posted(doing, message, self._transport, partial(finish_all, [work], flat), work)

    def _start_receive(self, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        doing = f"receiving {flat.nbytes} bytes from {_name(peer)}"
        group = self._transport.open_group(doing)
        data = flat.view(torch.uint8)

        if peer is None:
            work = self._post(doing, -1, group.recv_anysource, [data], tag)
        else:
            work = self._post(doing, peer, group.recv, [data], peer, tag)
        message = Message(-1 if peer is None else peer, tag)
        return Posted(doing, message, self._transport, partial(_receive, work, flat), None if peer is None else work)


class FramedMessages(PlainMessages):
    """Messages that carry their size, but for those of agreed size; see the note on top of this file."""

    def __init__(self, transport: TorchTransport) -> None:
        super().__init__(transport)
        self._asked: Counter[tuple[int, int]] = Counter()  # receives by (peer, tag)
        self._any_tags: set[int] = set()
        self._refused: list[object] = []  # memory that gloo may still write, or believes so

    def _start_send(self, flat: torch.Tensor, peer: int, tag: int) -> Request:
        if FIRST_OWN_TAG <= tag < ANNOUNCEMENT_TAG:
            return super()._start_send(flat, peer, tag)
        _check_tag(tag)
        doing = f"sending {flat.nbytes} bytes to rank {peer} with tag {tag}"
        group = self._transport.open_group(doing)
        data, message = flat.view(torch.uint8), self._transport.watch.tally.send(peer, tag)
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        header = torch.tensor([data.numel(), message.order], dtype=torch.int64, device="cpu")
        frame[:_HEADER_BYTES].view(torch.int64).copy_(header)
        is_inline = data.numel() <= _INLINE_BYTES
        if is_inline:
            frame[_HEADER_BYTES : _HEADER_BYTES + data.numel()].copy_(data)
        with self._transport.corked:  # [Note: one packet] in _gloo_sockets.py
            works = [self._post(doing, peer, group.send, [frame], peer, tag)]
            if not is_inline:
                data_tag = _data_tag(tag, message.order, data.numel())
                works.append(self._post(doing, peer, group.send, [data], peer, data_tag))
        return Posted(doing, message, self._transport, partial(finish_all, works, (frame, data)))

    def _start_receive(self, flat: torch.Tensor, peer: int | None, tag: int) -> Request:
        if FIRST_OWN_TAG <= tag < ANNOUNCEMENT_TAG:
            return super()._start_receive(flat, peer, tag)
        _check_tag(tag)
        doing = f"receiving {flat.nbytes} bytes from {_name(peer)} with tag {tag}"
        group = self._transport.open_group(doing)
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        if peer is None:
            self._any_tags.add(tag)
            work = self._post(doing, -1, group.recv_anysource, [frame], tag)
        else:
            work = self._post(doing, peer, group.recv, [frame], peer, tag)
        data, follows = flat.view(torch.uint8), None
        is_index_known = peer is not None and tag not in self._any_tags
        if peer is not None and is_index_known:
            index = self._asked[peer, tag]
            self._asked[peer, tag] += 1
            if data.numel() > _INLINE_BYTES:
                follows = self._receive_data(data, peer, tag, index, doing)

        finish = partial(self._finish, work, frame, data, follows)
        request = Posted(doing, Message(-1 if peer is None else peer, tag), self._transport, finish)
        if not is_index_known:
            request.test()  # starts the helper thread
        return request

    def _finish(
        self, work: Any, frame: torch.Tensor, data: torch.Tensor, follows: Any, request: Posted, left_s: float
    ) -> None:
        """Completes a receive: its frame, and ``follows``, the handle of what comes behind it, if that is known."""
        deadline = time.monotonic() + left_s
        _receive(work, frame, request, left_s)
        source, tag = request.source, request.tag
        nbytes, index = frame[:_HEADER_BYTES].view(torch.int64).tolist()
        if nbytes != data.numel():
            self._refuse(nbytes, source, tag, index, (follows, data))
            raise wording.wrong_size(self._transport.place("recv"), source, tag, data.numel(), nbytes)
        if nbytes <= _INLINE_BYTES:
            data.copy_(frame[_HEADER_BYTES : _HEADER_BYTES + nbytes])
            return
        rest = self._receive_data(data, source, tag, index, request.doing) if follows is None else follows
        wait_for(rest, data, deadline - time.monotonic())

    def _receive_data(self, data: torch.Tensor, peer: int, tag: int, index: int, doing: str) -> Any:
        group, data_tag = self._transport.open_group(doing), _data_tag(tag, index, data.numel())
        return self._post(doing, peer, group.recv, [data], peer, data_tag)

    def _refuse(self, nbytes: int, source: int, tag: int, index: int, unused: object) -> None:
        """Lets the sender of a message of the wrong size finish: takes its data into a buffer that nobody reads."""
        self._refused.append(unused)
        if nbytes > _INLINE_BYTES:
            sink = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            work = self._receive_data(sink, source, tag, index, f"taking {nbytes} bytes in vain from rank {source}")
            self._refused.append((work, sink))


class _Done(Request):
    """A message that has been copied."""

    def test(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None


class _SelfReceive(Request):
    """A receive of a message from this very rank. It completes when the rank sends, possibly from another thread."""

    def __init__(self, flat: torch.Tensor, tag: int, transport: TorchTransport) -> None:
        self.tag = tag
        self.source = transport.rank
        self._flat = flat
        self._transport = transport
        self._is_done = False
        self._error: PycommError | None = None

    def deliver(self, sent: torch.Tensor) -> None:
        """Completes this receive with ``sent``."""
        if sent.nbytes == self._flat.nbytes:
            self._flat.view(torch.uint8).copy_(sent.view(torch.uint8))
        else:
            place = self._transport.place("recv")
            self._error = wording.wrong_size(place, self.source, self.tag, self._flat.nbytes, sent.nbytes)
        self._is_done = True

    def test(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self.test():
            if time.monotonic() > deadline:
                doing = f"receiving a message from rank {self.source}, this rank itself, with tag {self.tag}"
                raise wording.timed_out(self._transport.place(doing), limit_s, is_broken=False)
            time.sleep(1e-4)


def finish_all(works: Sequence[Any], alive: object, _: Posted, left_s: float) -> None:
    """Waits for torch's handles of one message or swap; see ``wait_for``."""
    deadline = time.monotonic() + left_s
    for work in works:
        wait_for(work, alive, deadline - time.monotonic())


def _receive(work: Any, alive: object, request: Posted, left_s: float) -> None:
    wait_for(work, alive, left_s)
    if request.source < 0:
        request.source = int(work._source_rank())


def wait_for(work: Any, _alive: object, left_s: float) -> None:
    """Waits for torch's handle. ``_alive`` is memory that has to last until then."""
    try:
        work.wait(timeout_of(left_s))
    except RuntimeError:
        if not has_come_after_all(work.wait):
            raise


def gloo_message_of(work: Any) -> GlooMessage | None:
    """Returns what of torch's handle can be waited for a while, None if nothing can: csrc/bindings/gloo_waits.cpp."""
    try:
        made: GlooMessage | None = native().GlooMessage.of(work)
    except NativeUnavailableError:
        return None
    return made


@lru_cache(maxsize=16)
def timeout_of(seconds: float) -> timedelta:
    """Returns ``seconds`` as torch takes it: whole milliseconds, at least one, and not without end."""
    return timedelta(milliseconds=max(1, math.ceil(min(seconds, _LONGEST_S) * 1000)))


def _data_tag(tag: int, index: int, nbytes: int) -> int:
    # Two messages under way may get the same, if rarely: both sides post them in the same order, so they still match.
    low = (index + nbytes * 40_503 + (nbytes >> _TAG_BITS) * 7_919) % (1 << _TAG_BITS)
    return _DATA_TAGS + (tag << _TAG_BITS) + low


def _check_tag(tag: int) -> None:
    if not 0 <= tag < 1 << _TAG_BITS:
        raise ConfigError(f"tag of a message over transport 'torch': expected 0 to {(1 << _TAG_BITS) - 1}, got {tag}")


def _name(peer: int | None) -> str:
    return "any rank" if peer is None else f"rank {peer}"
