"""What the ranks of a group leave word of for one another in the job's store, where no byte of a call can say it.

A word is written once and read by whoever looks. The store may go at any moment, with the process that keeps it: then
nothing is said any more, and nothing read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch.distributed

from ._crossings import Making
from ._tally import Done
from ._wording import Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Job", "Notices", "part_of"]

_ASK_JOB_S = 0.5  # between two looks at what concerns all groups
_SAYS_IT_S = 5.0  # who is to say what broke the group, and was stopped; or died just then
_POLL_S = 2e-3


def part_of(store: Store, name: str) -> Any:
    """Returns the part of ``store`` whose keys begin with ``name``."""
    return torch.distributed.PrefixStore(name, store)  # type: ignore[attr-defined]  # missing in torch's stubs


class _Kept:
    """What is kept in ``store``, until that goes; where there is none, nothing."""

    def __init__(self, store: Store | None) -> None:
        self.store: Any = store  # None once it has gone, which another thread may find at any moment

    def say(self, key: str, value: Any) -> None:
        store = self.store
        try:
            if store is not None:
                store.set(key, json.dumps(value))
        except RuntimeError:
            self.store = None

    def has(self, key: str) -> bool:
        store = self.store
        try:
            return store is not None and store.check([key])
        except RuntimeError:
            self.store = None
        return False

    def get(self, key: str) -> Any:
        """Returns what was said, None if nothing was."""
        store = self.store
        try:
            return json.loads(store.get(key)) if store is not None and store.check([key]) else None
        except RuntimeError:
            self.store = None
        return None

    def is_first(self, counter: str) -> bool:
        """Whether nobody has asked this of ``counter`` before."""
        store = self.store
        try:
            return store is not None and store.add(counter, 1) == 1
        except RuntimeError:
            self.store = None
        return False


class Job:
    """What all groups of a job share: the word that somebody makes a group of one that is broken.

    For those who wait in other groups (``_kin.py``): one trip to the store, however many groups there are.
    """

    def __init__(self, store: Store | None) -> None:
        """Keeps it in ``store``."""
        self._kept = _Kept(store)
        self._has_gone_on = False
        self._next_ask_s = 0.0

    def go_on(self) -> None:
        """Leaves that word."""
        self._kept.say("going on", 1)

    def has_anyone_gone_on(self, *, at_once: bool = False) -> bool:
        """Says, now and then (or ``at_once``) by a trip to the store, whether anybody has left it."""
        now_s = time.monotonic()
        if not self._has_gone_on and (now_s >= self._next_ask_s or at_once):
            self._next_ask_s = now_s + _ASK_JOB_S
            self._has_gone_on = self._kept.has("going on")
        return self._has_gone_on


class Notices:
    """Those of one group of ``world_size`` ranks, as rank ``rank`` leaves and reads them."""

    def __init__(self, store: Store | None, rank: int, world_size: int, job: Job | None = None) -> None:
        """``store`` is this group's own part of the job's; ``job`` that of the group that this one is made of."""
        self._kept = _Kept(store)
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self.is_closed = False  # by this rank
        self.job = job or Job(store)

    def of_new_group(self, name: str, rank: int, world_size: int) -> Notices:
        """Returns those of a group that is made of this one, where this rank is ``rank``."""
        store = self._kept.store
        return Notices(None if store is None else part_of(store, name), rank, world_size, self.job)

    def close(self) -> None:
        """This rank has left the group, and asks for nothing more but what groups are made of it yet."""
        self.is_closed = True

    @property
    def is_open(self) -> bool:
        """Whether there is anything to ask."""
        return self._kept.store is not None and not self.is_closed

    # -- what broke the group, and who has left it ------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether any rank has said that the group is broken, or left it."""
        return self._kept.has("news")

    def failure(self) -> Failure | None:
        """Returns what broke the group, if somebody has said so."""
        told = self._kept.get("failure")
        return None if told is None else Failure(*told)

    def declare(self, found: Failure) -> Failure:
        """Says that ``found`` broke the group. Returns what did: the first to say so is right.

        Who did not wait for the first, who may be about to say it, would close the group, and a third rank would find
        it gone, of nothing that anybody knows.
        """
        if self._kept.is_first("failures"):
            self._kept.say("failure", found)
            self._kept.say("news", 1)
            return found
        deadline = time.monotonic() + _SAYS_IT_S
        while (told := self.failure()) is None and self._kept.store is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return told or found

    def say_closed(self, done: Done) -> None:
        """Says that this rank leaves, having ``done`` so much."""
        self._kept.say(f"closed{self._rank}", done)
        self._kept.say("news", 1)

    def closed_by(self, rank: int) -> Done | None:
        """Returns what ``rank`` had done when it left, None if it has not left."""
        return self._done(f"closed{rank}")

    def closed(self) -> dict[int, Done | None]:
        """Returns the same of all others."""
        return {rank: self.closed_by(rank) for rank in self._others}

    def say_done(self, done: Done) -> None:
        """Says what this rank has ``done`` so far, which may go on."""
        self._kept.say(f"done{self._rank}", done)

    def done_by(self, rank: int) -> Done | None:
        """Returns what ``rank`` has done, by the last that it has said of it."""
        return self._done(f"done{rank}")

    # -- what groups are made of this one, which may be broken or closed --------------------------------------------

    def say_making(self, ranks: Sequence[int], key: int) -> None:
        """Says that this rank makes a group of ``ranks``; none: it does not any more."""
        self._kept.say(f"making{self._rank}", [list(ranks), key])

    def made_by(self, rank: int) -> Making:
        """Returns the group that ``rank`` makes."""
        told = self._kept.get(f"making{rank}")
        if told is None:
            return Making()
        members, key = told
        return Making(frozenset(members), key)

    def say_ended(self, rank: int) -> None:
        """Says that the process of ``rank`` has ended, which other hosts do not see."""
        self._kept.say(f"ended{rank}", 1)
        self._kept.say("ended", 1)

    def ended(self) -> AbstractSet[int]:
        """Returns the ranks of which somebody has said so."""
        has = self._kept.has
        return {rank for rank in self._others if has(f"ended{rank}")} if has("ended") else frozenset()

    def _done(self, key: str) -> Done | None:
        told = self._kept.get(key)
        return None if told is None else Done(*told)
