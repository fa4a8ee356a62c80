"""The groups made of one group's ranks: how their members come to mean the same one, whoever else lives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..algorithms.executor import meet
from ..config import seconds
from ..errors import PeerLostError
from ..transport._crossings import key_of
from ..transport._kin import Kin

if TYPE_CHECKING:
    from ..algorithms._agreement import Agreement
    from ..transport.base import Transport
    from .group import Group

__all__ = ["Subgroups"]


class Subgroups:
    """Those of one group, which passes itself: a reference back would keep it, and its memory, from going at once."""

    __slots__ = ("_calls", "_made", "_open")

    def __init__(self) -> None:
        """Begins with none."""
        self._calls = 0  # also of those that made groups of other ranks
        self._made: Counter[tuple[tuple[int, ...], bool]] = Counter()  # by members, and whether all ranks make one
        self._open: weakref.WeakSet[Group] = weakref.WeakSet()

    @property
    def all(self) -> list[Group]:
        """The groups that somebody holds."""
        return list(self._open)

    def add(self, made: Group) -> None:
        """Remembers ``made`` as long as somebody holds it."""
        self._open.add(made)

    def join(
        self, group: Group, group_ranks: Sequence[int] | None, name: str | None, timeout: Any, *, with_all: bool
    ) -> Transport | None:
        """Joins members of ``group``, which has no call outstanding, as ``Group.subgroup`` says; None on others."""
        timeout_s = None if timeout is None else seconds(timeout)
        turn = group.turn("new_group")
        with turn, group.scope("new_group"):
            turn.begin()
            agreement = group.engine.agreement  # made with all ranks, also those outside
            _agree_on_members(group, agreement, group_ranks, with_all)
            self._calls += 1  # no sooner: a rank that called something else has counted nothing
            # To make the group is another call: who gives that up has agreed, and so has who comes late to the first.
            group.transport.calls += 1
            key = self._key_of(group_ranks or (), with_all)
            kin = _kin_of(group)
            if group.transport.is_broken:
                kin.go_on()
            transport = group.transport.split(group_ranks, key, with_all=with_all)
            if transport is not None and group_ranks is not None:
                transport.global_ranks = [group.ranks[rank] for rank in group_ranks]
                transport.join_kin(kin, transport.global_ranks)
                transport.group_name = name or f"{group.name}.{self._calls}"
            try:
                if with_all:
                    _agree_on_members(group, agreement, group_ranks, with_all)  # that all have made theirs
                elif transport is not None:
                    meet(transport)  # within this group's timeout: the new one's is that of its calls
            except BaseException:
                if transport is not None:
                    transport.close()
                raise
            if transport is not None and timeout_s is not None:
                transport.timeout_s = timeout_s
            return transport

    def _key_of(self, group_ranks: Sequence[int], with_all: bool) -> int:
        """Returns the key of the next group of these members: see [Note: one key for a group]."""
        kind = tuple(group_ranks), with_all
        self._made[kind] += 1
        return key_of(group_ranks, self._made[kind], with_all)


def _kin_of(group: Group) -> Kin:
    kin = group.transport.kin
    if kin is None:
        kin = Kin()
        group.transport.join_kin(kin, group.ranks)
    return kin


def _agree_on_members(group: Group, agreement: Agreement, group_ranks: Sequence[int] | None, with_all: bool) -> None:
    """Raises CollectiveMismatchError if the ranks name different members. After a failure only those who live, and who
    call this to go on without the others, are left to ask: then they meet in the new group alone.
    """
    if group.transport.is_broken and not with_all:
        failure = group.transport.failure
        if failure is not None and failure.kind in ("lost", "closed") and failure.rank in (group_ranks or ()):
            group.transport.check_lost("new_group")  # the caller has not been told yet
        return
    try:
        with group.on_board("new_group"):
            agreement.agree_on_members(group_ranks, group.timeout_s)
            # One that came late may find all that the others sent before they gave up, and wait for them.
            group.transport.check_given_up("new_group")
    except PeerLostError as error:
        if with_all or group_ranks is None or error.rank in group_ranks:
            raise
