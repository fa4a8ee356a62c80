"""Several exchanges of messages under way at once, so that the cable is never idle while a rank computes.

An exchange is a generator: it yields the messages of a round, and goes on once they are complete. ``WINDOW`` of them
are under way. The rank waits for the oldest round, lets that exchange compute and start its next round, and starts
another exchange when one is complete; meanwhile the messages of the others travel. Nothing spins: two cores that serve
four ranks have to carry their TCP as well. The order is the same on all ranks that start the same exchanges.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from .base import Request

__all__ = ["WINDOW", "Rounds", "end_sends", "left_s", "run_in_turns"]

WINDOW = 4

Rounds = Iterator[Sequence[Request]]


def run_in_turns(exchanges: Iterable[Rounds], deadline: float) -> None:
    """Runs all ``exchanges`` to their ends, at most ``WINDOW`` at a time; the next is taken when it is its turn.

    ``deadline`` is on the clock of ``time.monotonic``; what the requests raise passes.
    """
    under_way: deque[tuple[Rounds, Sequence[Request]]] = deque()
    for rounds in exchanges:
        _advance(under_way, rounds)
        if len(under_way) == WINDOW:
            _finish_one(under_way, deadline)
    while under_way:
        _finish_one(under_way, deadline)


def end_sends(turns: Sequence[Sequence[Request]], exchanges: int, peers: int, deadline: float) -> None:
    """Waits for the last message to each of ``peers`` ranks, in the order in which they left, and ends the others.

    The messages of exchange i of ``exchanges`` are those of turn i % len(turns), or were ended before. A rank may end
    after the call, and with it what it has sent; what went to a rank before its last message has left before it.
    """
    oldest = exchanges % len(turns)
    sent = [request for index in range(len(turns)) for request in turns[(oldest + index) % len(turns)]]
    last = max(len(sent) - peers, 0)
    for request in sent[last:]:
        request.wait(left_s(deadline))
    for request in sent[:last]:
        request.settle()


def left_s(deadline: float) -> float:
    """Returns the seconds until ``deadline``, at least a millisecond: what a wait may still take."""
    return max(deadline - time.monotonic(), 1e-3)


def _finish_one(under_way: deque[tuple[Rounds, Sequence[Request]]], deadline: float) -> None:
    """Goes through the rounds, the oldest first, until an exchange is complete."""
    before = len(under_way)
    while len(under_way) == before:
        rounds, requests = under_way.popleft()
        for request in requests:
            request.wait(left_s(deadline))
        _advance(under_way, rounds)


def _advance(under_way: deque[tuple[Rounds, Sequence[Request]]], rounds: Rounds) -> None:
    requests = next(rounds, None)
    if requests is not None:
        under_way.append((rounds, requests))
