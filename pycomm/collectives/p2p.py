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

from ..errors import ConfigError
from ..transport.base import FIRST_OWN_TAG
from .context import resolve, root_rank, state
from .group import Group
from .message_work import MessageWork, NativeWork, NativeWorkInGroup, RequestWork
from .tensors import as_tensor, flatten
from .verbs import with_short_cut
from .work import Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send", "start_message"]

_MAX_TAG = FIRST_OWN_TAG - 1


@with_short_cut("fast_isend", takes_group=False, handle=NativeWork)
def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Work:
    """Starts sending ``tensor``; it must not be changed until the returned Work is complete."""
    g, peer = _whom(group, dst, group_dst)
    if work := g.fast_isend(tensor, peer, None, tag, NativeWork, g):
        return cast(Work, work)
    g = resolve(group)
    with g.scope("isend"):
        return _start(g, "isend", tensor, root_rank(g, dst, group_dst, "dst"), tag)


@with_short_cut("fast_irecv", takes_group=False, handle=NativeWork)
def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Work:
    """Starts receiving into ``tensor``, from any rank if no source is given.

    The data is there once the Work was waited on.
    """
    g, peer = _whom(group, src, group_src)
    if work := g.fast_irecv(tensor, peer, None, tag, NativeWork, g):
        return cast(Work, work)
    g = resolve(group)
    with g.scope("irecv"):
        is_any = src is None and group_src is None
        return _start(g, "irecv", tensor, None if is_any else root_rank(g, src, group_src, "src"), tag)


@with_short_cut("fast_send", takes_group=False)
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


@with_short_cut("fast_recv", takes_group=False)
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

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if getattr(op, "__name__", None) not in ("isend", "irecv"):
            raise ConfigError(f"P2POp: expected pycomm.isend or pycomm.irecv, got {op!r}")
        if peer is None and group_peer is None:
            raise ConfigError("P2POp: expected peer (a global rank) or group_peer (a rank of the group), got neither")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all messages of the list, whose order does not matter, and returns their Works in its order.

    Also takes torch.distributed.P2POp. Raises ConfigError for an empty list.
    """
    if not p2p_op_list:
        raise ConfigError("batch_isend_irecv: expected at least one P2POp, got an empty list")
    works: list[Any] = []
    sends: list[int] = []
    for message in p2p_op_list:
        if message.op.__name__ == "irecv":  # first, so that messages find their place waiting
            works.append(_start_one(irecv, message))
        else:
            sends.append(len(works))
            works.append(message)
    for index in sends:
        works[index] = _start_one(isend, works[index])
    return works


def _start_one(start: Callable[..., Work], m: P2POp) -> Work:
    peer = m.peer
    if peer is None:
        return start(m.tensor, None, m.group, m.tag, m.group_peer)
    return start(m.tensor, peer, m.group, m.tag)  # torch's P2POp fills in both ranks; the global one says it all


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
        return _start(g, verb, tensor, peer, tag, in_order=False)


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


def _start(g: Group, verb: str, tensor: Any, peer: int | None, tag: int, in_order: bool = True) -> Work:
    """Hands the message to the transport, after what the group has outstanding.

    Not ``in_order``: at once, where the transport can, and the handle tells ranks of the group.
    """
    is_receive = verb == "irecv"
    _check_tag(tag)
    t = as_tensor(tensor, "tensor", writes=is_receive)
    flat = flatten(t, reads=not is_receive, writes=is_receive, devices=g.transport.devices)
    if in_order or not g.transport.messages_are_free:
        g.settle()
    if is_receive:
        request = g.transport.irecv(flat.tensor, peer, tag)
    else:
        assert peer is not None
        request = g.transport.isend(flat.tensor, peer, tag)
    return RequestWork(g, verb, peer, request, tensor, flat.finish, is_global=in_order)


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not 0 <= tag <= _MAX_TAG:
        raise ConfigError(f"tag: expected 0 to {_MAX_TAG} (MPI promises few more), got {tag!r}")
