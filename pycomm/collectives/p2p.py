"""Messages between two ranks.

``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group. Messages between two ranks
with the same tag arrive in the order they were sent. Tags are 0 to 32758: MPI promises few more, and collectives need
some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch

from ..errors import ConfigError, NativeUnavailableError
from ..ops import native
from ..sizes import integer
from ..transport.base import FIRST_OWN_TAG
from .context import resolve, root_rank, state
from .group import Group
from .message_work import MessageWork, NativeWork, NativeWorkInGroup, RequestWork
from .tensors import as_tensor, flatten
from .verbs import with_short_cut
from .work import Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send", "start_message"]

_MAX_TAG = FIRST_OWN_TAG - 1


@with_short_cut("fast_isend", rank="dst", handle=NativeWork)
def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Work:
    """Starts sending ``tensor``; it must not be changed until the returned Work is complete.

    To global rank ``dst`` or rank ``group_dst`` of the group, one of which has to be given. ``tag`` is 0 to 32758.
    """
    g, peer = _whom(group, dst, group_dst)
    if work := g.fast_isend(tensor, peer, None, tag, NativeWork, g):
        return cast(Work, work)
    return _Message.checked("isend", tensor, dst, group, tag, group_dst).start()


@with_short_cut("fast_irecv", rank="src", handle=NativeWork)
def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Work:
    """Starts receiving into ``tensor``, from any rank if no source is given.

    The data is there once the Work was waited on. ``tag`` is 0 to 32758, and that of the message.
    """
    g, peer = _whom(group, src, group_src)
    if work := g.fast_irecv(tensor, peer, None, tag, NativeWork, g):
        return cast(Work, work)
    return _Message.checked("irecv", tensor, src, group, tag, group_src).start()


@with_short_cut("fast_send", rank="dst")
def send(
    tensor: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> None:
    """Sends ``tensor`` and returns once it may be changed again.

    To global rank ``dst`` or rank ``group_dst`` of the group. Messages of one ``tag`` (0 to 32758) between two ranks
    arrive in the order they were sent. ``timeout``: seconds or a timedelta, instead of the group's.
    """
    g = resolve(group)
    isend(tensor, dst, g, tag, group_dst).wait(timeout)


@with_short_cut("fast_recv", rank="src")
def recv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> int:
    """Receives into ``tensor``, from any rank if no source is given, and returns the global rank that it came from.

    ``src`` is a global rank, ``group_src`` one of the group; ``tag`` and ``timeout`` as of ``send``. Raises
    CollectiveMismatchError for a message of another size, PeerLostError, CollectiveTimeoutError.
    """
    g = resolve(group)
    work = irecv(tensor, src, g, tag, group_src)
    work.wait(timeout)
    assert isinstance(work, MessageWork)
    return work.source_rank()


class P2POp:
    """One message of ``batch_isend_irecv``.

    ``op`` is ``isend`` or ``irecv`` (ours or torch's), ``peer`` a global rank, ``group_peer`` one of the group.
    """

    __slots__ = ("group", "group_peer", "op", "peer", "tag", "tensor")  # where the short cut reads them

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv and getattr(op, "__name__", None) not in ("isend", "irecv"):
            raise ConfigError(f"P2POp: expected pycomm.isend or pycomm.irecv, got {op!r}")
        if peer is None and group_peer is None:
            raise ConfigError("P2POp: expected peer (a global rank) or group_peer (a rank of the group), got neither")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer


def _batch_kinds() -> object:
    """Returns what the short cut of a batch has to know of this module; None where there are no short cuts."""
    try:
        return native().batch_kinds(NativeWork, P2POp, isend, irecv)
    except NativeUnavailableError:
        return None


_kinds = _batch_kinds()


@with_short_cut("fast_batch_isend_irecv", handle=_kinds)
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all messages of the list, whose order does not matter, and returns their Works in its order.

    Also takes torch.distributed.P2POp. Raises ConfigError for an empty list, and for a message that cannot be right,
    before one is started.
    """
    if not p2p_op_list:
        raise ConfigError("batch_isend_irecv: expected at least one P2POp, got an empty list")
    if (group := p2p_op_list[0].group) is not None:
        g = resolve(group)
        if handles := g.fast_batch_isend_irecv(p2p_op_list, _kinds, g, g.ranks):
            return cast("list[Work]", handles)
    messages = [_Message.of(each) for each in p2p_op_list]
    works: list[Any] = [m.start() if m.verb == "irecv" else None for m in messages]  # first: a place for what comes
    return [m.start() if work is None else work for m, work in zip(messages, works, strict=True)]


def start_message(g: Group, verb: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
    """Starts "isend" or "irecv" with a rank of the group (None: any) and returns its handle, whose ``source_rank`` is a
    rank of the group too. For the torch.distributed backend, whose messages keep no order with collectives.
    """
    g.check_open()
    with g.scope(verb):
        if peer is not None and not 0 <= peer < g.world_size:
            raise ConfigError(f"expected a rank of the group, 0 to {g.world_size - 1}, got {peer}")
        short_cut = g.fast_irecv if verb == "irecv" else g.fast_isend
        if work := short_cut(tensor, peer, None, tag, NativeWorkInGroup, g):
            return cast(Work, work)
        message = _Message(g, verb, tensor, peer, tag)
    return message.start(in_order=False)


def _whom(group: Any, rank: Any, group_rank: Any) -> tuple[Any, Any]:
    """Returns the group, and the rank in it, for its short cuts: None if none is named, -1, which no group has, where
    ``root_rank`` has to say what is wrong.
    """
    if group is None and group_rank is None:
        return state.world, rank  # whose ranks are the global ones
    g = resolve(group)
    if rank is None:
        return g, group_rank
    return g, g.ranks.index(rank) if group_rank is None and rank in g.ranks else -1


class _Message:
    """A message that has been checked, and not started; ``peer`` is a rank of the group, or None for any."""

    def __init__(self, g: Group, verb: str, tensor: Any, peer: int | None, tag: int) -> None:
        number = integer(tag)
        if number is None or not 0 <= number <= _MAX_TAG:
            raise ConfigError(f"tag: expected 0 to {_MAX_TAG} (MPI promises few more), got {tag!r}")
        self.group, self.verb, self.tensor, self.peer, self.tag = g, verb, tensor, peer, number
        receives = verb == "irecv"
        t = as_tensor(tensor, "tensor", writes=receives)
        self.flat = flatten(t, reads=not receives, writes=receives, devices=g.transport.devices)

    @classmethod
    def checked(cls, verb: str, tensor: Any, rank: Any, group: Any, tag: int, group_rank: Any) -> _Message:
        g = resolve(group)
        with g.scope(verb):
            word, is_any = ("src", rank is None and group_rank is None) if verb == "irecv" else ("dst", False)
            return cls(g, verb, tensor, None if is_any else root_rank(g, rank, group_rank, word), tag)

    @classmethod
    def of(cls, m: P2POp) -> _Message:
        group_peer = m.group_peer if m.peer is None else None  # torch's P2POp fills in both; the global one says it all
        return cls.checked(m.op.__name__, m.tensor, m.peer, m.group, m.tag, group_peer)

    def start(self, in_order: bool = True) -> Work:
        """Hands the message to the transport, after what the group has outstanding.

        Not ``in_order``: at once, where the transport can, and the handle tells ranks of the group.
        """
        g = self.group
        with g.scope(self.verb):
            if in_order or not g.transport.messages_are_free:
                g.settle()
            if self.verb == "irecv":
                request = g.transport.irecv(self.flat.tensor, self.peer, self.tag)
            else:
                assert self.peer is not None
                request = g.transport.isend(self.flat.tensor, self.peer, self.tag)
            return RequestWork(g, self.verb, self.peer, request, self.tensor, self.flat.finish, is_global=in_order)
