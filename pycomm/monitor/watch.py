"""The thread of each rank that answers for it, notices that a call waits too long, and finds out who is to blame.

It sleeps. It wakes when another process asks where this one stands (``pycomm doctor``, or a rank that waits), and once
a second to look at this rank's own board. When a call has waited for ``hang_s``, and when an error of waiting is
raised, the ranks' boards are compared: those of this host in memory, those of other hosts through the job's store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collectives.board import boards
from ..ops import native
from ..transport import _wording as wording
from .boards import Board, GroupOnBoard, name_on_board
from .gossip import Gossip
from .standing import stacks, standing_of, standings_on
from .verdict import Standing, Verdict, find_culprit

if TYPE_CHECKING:
    from ..collectives.group import Group
    from ..config import Config

__all__ = ["Hang", "before_stop", "each_second", "on_hang", "own_board", "peer_boards", "start", "stop"]

_log = logging.getLogger("pycomm")
_POLL_S = 1.0
_POLL_STORE_S = 0.25  # where some ranks are on other hosts, which ask through the store


class Hang(NamedTuple):
    """What the callbacks of ``on_hang`` are told: a call has waited for ``waited_s`` seconds, and why."""

    group_name: str
    seq: int
    waited_s: float
    verdict: Verdict


_callbacks: list[Callable[[Hang], None]] = []


def on_hang(callback: Callable[[Hang], None]) -> Callable[[], None]:
    """Calls ``callback(hang)`` in the monitor's thread when a call has waited for ``hang_s``; returns its end."""
    return _added(callback, _callbacks)


def each_second(look: Callable[[], None]) -> Callable[[], None]:
    """Calls ``look()`` in the monitor's thread about once a second; returns what stops that."""
    return _added(look, _looks)


def before_stop(act: Callable[[], None]) -> None:
    """Calls ``act()`` once, when the default group closes, while its board is still there."""
    _at_end.append(act)


_looks: list[Callable[[], None]] = []
_at_end: list[Callable[[], None]] = []


def _added(function: Any, functions: list[Any]) -> Callable[[], None]:
    functions.append(function)

    def remove() -> None:
        with contextlib.suppress(ValueError):  # it has been
            functions.remove(function)

    return remove


def _call(function: Callable[..., None], *arguments: Any) -> None:
    """Calls somebody's function. An observer may not end the job, nor keep others from being called."""
    try:
        function(*arguments)
    except Exception:
        _log.warning("pycomm.monitor: %r raised", function, exc_info=True)


class _Watch:
    """The watch of one job. ``views`` are the boards of this host's ranks, this rank's own first."""

    def __init__(self, store: Any, config: Config, host_ids: Sequence[str], rank: int) -> None:
        held = boards()
        assert held is not None, "it is started after the boards were made"
        self.native = held.own
        self.own = Board(os.dup(held.own.fd))
        self.peers = [Board(os.dup(fd)) for fd in held.peers.values()]
        self.pid = os.getpid()
        self._hang_s = config.hang_s
        remote = [member for member, host in enumerate(host_ids) if host != host_ids[rank]]
        self.gossip = Gossip(store, rank, remote) if remote else None
        self._is_stopped = False
        self._next_looks = 0.0
        self._reported: set[tuple[int, int]] = set()
        self._thread = threading.Thread(target=self._run, name="pycomm-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        if self.pid != os.getpid():  # a forked child has no such thread, and closes nothing of its parent's
            return
        native().ask_board(self.native.fd, 0.0)  # wakes it
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        if not self._thread.is_alive():
            for view in (self.own, *self.peers):
                view.close()

    def _has_to_stop(self) -> bool:
        return self._is_stopped

    def _run(self) -> None:
        poll_s = min(_POLL_S if self.gossip is None else _POLL_STORE_S, self._hang_s / 4)
        while not self._is_stopped:
            is_asked = self.native.await_question(poll_s)
            if self._has_to_stop():  # which another thread may have said meanwhile
                return
            if is_asked:
                self.native.answer(stacks())
            try:
                if self.gossip is not None:
                    self.gossip.answer(self._standings)
                self._look()
                if time.monotonic() >= self._next_looks:
                    self._next_looks = time.monotonic() + _POLL_S
                    for look in list(_looks):
                        _call(look)
            except Exception:  # an observer may not end the job, and has to go on answering
                _log.debug("the monitor could not look at the boards", exc_info=True)

    def _standings(self, members: int) -> dict[int, Standing]:
        """Returns where this rank stands in a group, and those of this host's that can no longer say so themselves."""
        found = {}
        for view in (self.own, *self.peers):
            if view is self.own or not view.is_alive:
                for group in view.groups():
                    if group.members == members and (group.is_open or view is not self.own):
                        found[view.rank] = standing_of(view, group, with_line=False)
        return found

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        for group in self.own.groups():
            record = self.own.latest(group) if group.is_open else None
            if record is None or record.end_ns or (group.index, record.seq) in self._reported:
                continue
            waited_s = (now_ns - record.start_ns) / 1e9
            if waited_s < self._hang_s:
                continue
            self._reported.add((group.index, record.seq))
            verdict = self.judge(group, is_final=False, is_patient=True)
            _log.warning(
                "%s #%d on group %r has waited for %.1f s on rank %d: %s",
                record.verb,
                record.seq,
                group.name,
                waited_s,
                group.rank,
                verdict.text,
            )
            for callback in list(_callbacks):
                _call(callback, Hang(group.name, record.seq, waited_s, verdict))

    def judge(self, group: GroupOnBoard, *, is_final: bool, is_patient: bool, failing: int = 0) -> Verdict:
        """Returns who keeps ``group`` waiting. Of a failure (``is_final``) the first rank's verdict is everybody's.

        ``failing`` is the number of the call that fails, 0 if none does.
        ``is_patient``: other hosts have longer to answer; not where the error of a death waits for it.
        """
        told = self._told(group) if is_final else None
        if told is not None:
            return told
        standings = standings_on([self.own, *self.peers], group.members, group.world_size)
        verdict = find_culprit(group.name, standings, failing)
        if self.gossip is not None and verdict.kind not in ("dead", "stopped", "absent"):
            for remote in self.gossip.ask(group.members, self._standings, is_patient):
                if 0 <= remote.rank < len(standings):
                    standings[remote.rank] = remote
            own = standings[group.rank]
            if own.is_in and is_patient:
                standings[group.rank] = own._replace(traffic=self.gossip.traffic())
            verdict = (self._told(group) if is_final else None) or find_culprit(group.name, standings, failing)
        text = json.dumps({"members": group.members, "seq": group.seq, "is_final": is_final} | verdict._asdict())
        self.native.set_verdict(text)
        if is_final and self.gossip is not None and verdict.kind not in ("idle", "unknown"):
            self.gossip.publish(group.members, text)
        return verdict

    def _told(self, group: GroupOnBoard) -> Verdict | None:
        """Returns the verdict of the rank that was first to reach one about a failure of ``group``, if any has."""
        texts = [view.verdict() for view in self.peers]
        if self.gossip is not None:
            texts.append(self.gossip.published(group.members))
        for text in texts:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                told = json.loads(text)
                if told["is_final"] and told["members"] == group.members and told["seq"] >= group.seq:
                    return Verdict(told["kind"], tuple(told["ranks"]), told["text"])
        return None

    def explain(self, place: wording.Place | str, kind: str) -> str:
        """Returns the verdict for an error that is being raised; "" if the boards have nothing to add."""
        if not isinstance(place, wording.Place) or kind in ("closed", "interrupted") or self.pid != os.getpid():
            return ""
        failing = place.seq if place.verb in wording.CODES else 0  # else it is a message, which has no call
        is_final = kind != "mere timeout" or failing > 0  # a late message is this rank's alone, and the group goes on
        is_patient = kind in ("timeout", "mere timeout")
        try:
            for group in self.own.groups():
                if group.is_open and (group.name, group.rank) == (name_on_board(place.group), place.rank):
                    verdict = self.judge(group, is_final=is_final, is_patient=is_patient, failing=failing)
                    return "" if verdict.kind in ("idle", "unknown") else f"\nVerdict: {verdict.text}"
        except Exception:  # what is being raised matters more
            _log.debug("no verdict could be reached", exc_info=True)
        return ""


class _State:
    watch: _Watch | None = None


def start(group: Group, store: Any, config: Config, host_ids: Sequence[str]) -> None:
    """Starts the watch of the job whose default group is ``group``; called by ``init``."""
    _State.watch = _Watch(store, config, host_ids, group.rank)
    wording.explainers[:] = [_State.watch.explain]


def stop() -> None:
    """Ends the watch; called when the default group closes."""
    while _at_end:
        _call(_at_end.pop())
    watch, _State.watch = _State.watch, None
    wording.explainers.clear()
    if watch is not None:
        watch.stop()


def own_board() -> Board | None:
    """Returns this process's own board, None while nothing is recorded."""
    return None if _State.watch is None else _State.watch.own


def peer_boards() -> list[Board]:
    """Returns the boards of the other ranks of this host."""
    return [] if _State.watch is None else list(_State.watch.peers)
