"""How ranks of several hosts tell each other where they stand: by questions and answers in the job's store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .standing import main_line, stacks
from .verdict import Standing

__all__ = ["Gossip"]

_ANSWER_S = 0.6  # two polls of the other rank's watch, and the way
_POLL_S = 0.02


class Gossip:
    """This rank's questions to the ranks of other hosts (``remote``, by their rank in ``init``), and its answers."""

    def __init__(self, store: Any, rank: int, remote: Sequence[int]) -> None:
        # A connection of its own, where the store has such: a wait of the data path must not hold up an answer.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()
        self._store = store
        self._rank = rank
        self._remote = tuple(remote)
        self._answered = 0

    def answer(self, standings: Callable[[int], dict[int, Standing]]) -> None:
        """Answers what was asked since the last time: for this rank, and for those of this host that are dead.

        ``standings(members)`` has them by their rank in ``init``.
        """
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that kept it
            asked = int(self._store.add("asked", 0))
            # A number is taken a moment before its question is there: that one comes the next time.
            while self._answered < asked and self._store.check([f"question{self._answered + 1}"]):
                self._answered += 1
                asked_of = standings(int(self._store.get(f"question{self._answered}")))
                for rank, standing in asked_of.items():
                    line = main_line(stacks()) if rank == self._rank else ""
                    self._store.set(f"answer{self._answered}/{rank}", json.dumps(standing._replace(line=line)))

    def ask(self, members: int) -> Iterator[Standing]:
        """Yields where the ranks of other hosts stand in the group ``members``, those that answer in time."""
        try:
            number = int(self._store.add("asked", 1))
            self._store.set(f"question{number}", str(members))
            missing = list(self._remote)
            deadline = time.monotonic() + _ANSWER_S
            while missing and time.monotonic() < deadline:
                for rank in list(missing):
                    key = f"answer{number}/{rank}"
                    if self._store.check([key]):
                        missing.remove(rank)
                        yield Standing(*json.loads(self._store.get(key)))
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
