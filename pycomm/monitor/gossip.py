"""How ranks of several hosts tell each other where they stand: by questions and answers in the job's store."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..transport._gloo_group import connection_to
from .standing import main_line, stacks
from .traffic import Flow, Traffic, measure_traffic
from .verdict import Standing

__all__ = ["Gossip"]

_ANSWER_S = 0.6  # two polls of the other rank's watch, and the way
_PATIENT_S = 2.0  # where the way may be long: behind what fills a slow link, and there and back several times
_POLL_S = 0.02
_FRESH_S = 1.0


class Gossip:
    """This rank's questions to the ranks of other hosts (``remote``, by their rank in ``init``), and its answers."""

    def __init__(self, store: Any, rank: int, remote: Sequence[int]) -> None:
        self._store: Any = connection_to(store)  # its own: a wait of the data path must not hold up an answer
        self._rank = rank
        self._remote = tuple(remote)
        self._answered = 0
        self._own: set[int] = set()  # questions of this rank
        self._answering = threading.Lock()
        self._traffic = Traffic()
        self._measured_s = -_FRESH_S

    def answer(self, standings: Callable[[int], dict[int, Standing]]) -> None:
        """Answers what was asked since the last time: for this rank, and for those of this host that are dead.

        ``standings(members)`` has them by their rank in ``init``.
        """
        if not self._answering.acquire(blocking=False):  # another thread does
            return
        try:
            self._answer(standings)
        except RuntimeError:  # the store has gone with the process that kept it
            pass
        finally:
            self._answering.release()

    def _answer(self, standings: Callable[[int], dict[int, Standing]]) -> None:
        asked = int(self._store.add("asked", 0))
        # A number is taken a moment before its question is there: that one comes the next time.
        while self._answered < asked and self._store.check([f"question{self._answered + 1}"]):
            self._answered += 1
            if self._answered in self._own:
                continue
            members, is_patient = json.loads(self._store.get(f"question{self._answered}"))
            for rank, standing in standings(members).items():
                if rank == self._rank:
                    traffic = self.traffic() if standing.is_in and is_patient else Traffic()
                    standing = standing._replace(line=main_line(stacks()), traffic=traffic)
                self._store.set(f"answer{self._answered}/{rank}", json.dumps(standing))

    def traffic(self) -> Traffic:
        """Returns what this process's connections move; of a moment ago, if that was asked then."""
        if time.monotonic() > self._measured_s + _FRESH_S:
            self._traffic, self._measured_s = measure_traffic(), time.monotonic()
        return self._traffic

    def ask(
        self, members: int, standings: Callable[[int], dict[int, Standing]], is_patient: bool
    ) -> Iterator[Standing]:
        """Yields where the ranks of other hosts stand in the group ``members``, those that answer in time.

        Meanwhile answers what they ask, which may be the same.
        """
        try:
            number = int(self._store.add("asked", 1))
            self._own.add(number)
            self._store.set(f"question{number}", json.dumps([members, is_patient]))
            missing = list(self._remote)
            deadline = time.monotonic() + (_PATIENT_S if is_patient else _ANSWER_S)
            while missing and time.monotonic() < deadline:
                self.answer(standings)
                for rank in list(missing):
                    key = f"answer{number}/{rank}"
                    if self._store.check([key]):
                        missing.remove(rank)
                        yield _read(self._store.get(key))
                time.sleep(_POLL_S)
        except RuntimeError:
            return

    def publish(self, members: int, verdict: str) -> None:
        """Leaves a verdict about a failure of the group ``members`` for the ranks of other hosts."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"verdict/{members}", verdict)

    def published(self, members: int) -> str:
        """Returns the verdict that was left, "" if none was."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"verdict/{members}"]):
                return str(self._store.get(f"verdict/{members}").decode())
        return ""


def _read(answer: bytes) -> Standing:
    fields = json.loads(answer)
    ends, flows = fields.pop()
    return Standing(*fields)._replace(traffic=Traffic(tuple(ends), tuple(Flow(*each) for each in flows)))
