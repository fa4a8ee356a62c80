"""How much of the communication of a step was hidden behind computation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["OverlapReport", "Stopwatch"]


class OverlapReport(NamedTuple):
    """One step of a stream, in seconds: ``comm_s`` it was moving data, ``exposed_s`` somebody waited for it, which also
    takes in the wait for ranks that come later, and may be longer.
    """

    wall_s: float
    comm_s: float
    exposed_s: float
    nbytes: int

    @property
    def hidden_s(self) -> float:
        """Communication that nobody waited for."""
        return max(0.0, self.comm_s - self.exposed_s)

    @property
    def hidden_share(self) -> float:
        """The share of the communication that was hidden, 1.0 if there was none."""
        return self.hidden_s / self.comm_s if self.comm_s else 1.0

    def __str__(self) -> str:
        return (
            f"step {self.wall_s * 1e3:.1f} ms, communication {self.comm_s * 1e3:.1f} ms, of which hidden "
            f"{self.hidden_s * 1e3:.1f} ms ({self.hidden_share:.0%}), waited for {self.exposed_s * 1e3:.1f} ms"
        )


class Stopwatch:
    """Adds up what those who wait for a stream spend; the stream's progress counts what it moves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_s = time.perf_counter()
        self._exposed_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody is blocked by the stream meanwhile."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._exposed_s += time.perf_counter() - start_s

    def lap(self, comm_s: float, nbytes: int) -> OverlapReport:
        """Returns what was added up since the last lap, and what was moved, and starts anew."""
        with self._lock:
            now_s = time.perf_counter()
            report = OverlapReport(now_s - self._start_s, comm_s, self._exposed_s, nbytes)
            self._start_s, self._exposed_s = now_s, 0.0
            return report
