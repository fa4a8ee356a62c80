"""How much of the communication of a step was hidden behind computation."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

__all__ = ["OverlapReport", "Stopwatch"]


class OverlapReport(NamedTuple):
    """One step of a stream, in seconds: ``comm_s`` it was moving data, ``exposed_s`` somebody waited for it."""

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
            f"step {self.wall_s * 1e3:.1f} ms, communication {self.comm_s * 1e3:.1f} ms, of which exposed "
            f"{self.exposed_s * 1e3:.1f} ms and hidden {self.hidden_s * 1e3:.1f} ms ({self.hidden_share:.0%})"
        )


class Stopwatch:
    """Adds up what a stream and those who wait for it spend."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start_s = time.perf_counter()
        self._comm_s = self._exposed_s = 0.0
        self._nbytes = 0

    def moved(self, elapsed_s: float, nbytes: int) -> None:
        """The stream was busy for so long."""
        with self._lock:
            self._comm_s += elapsed_s
            self._nbytes += nbytes

    def waited(self, elapsed_s: float) -> None:
        """Somebody was blocked for so long by the stream."""
        with self._lock:
            self._exposed_s += elapsed_s

    def lap(self) -> OverlapReport:
        """Returns what was added up since the last lap, and starts anew."""
        with self._lock:
            now_s = time.perf_counter()
            report = OverlapReport(now_s - self._start_s, self._comm_s, self._exposed_s, self._nbytes)
            self._start_s, self._comm_s, self._exposed_s, self._nbytes = now_s, 0.0, 0.0, 0
            return report
