"""Takes the figures of one case from several jobs in turns, and turns clock readings into times.

[Note: what a time is]
- Private buffers, back to back: calls in chunks of about 1/20 of a round (single calls where one takes 50 us or more).
  A chunk's time runs from the slowest rank's completion of one chunk to that of the next. A round's time is the median
  of its chunks, per call, so that another process that takes a core for a moment spoils a chunk and not the round.
- Shared buffers, freshly written input: of each call, the time from the last rank's entry to the last rank's exit. A
  round's time is the median of its calls.
- The reported time is the median over rounds; p99 is over the single calls of all rounds (last in to last out).
- A ratio pairs the times of one round, which were taken within a fraction of a second of each other, and is the median
  over rounds. The speed of a machine changes from second to second; ratios taken so do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from .job import Job, JobFailedError
from .worker.cases import Case

__all__ = ["Figure", "Load", "measure", "plan_load", "ratio", "take_round"]

MIN_CALLS = 5
MAX_CALLS = 20_000
MAX_SAMPLES = 2_000
CHUNKS = 20
SLOW_US = 50.0  # from here on two clock readings a call do not matter, and one loop gives mean and percentiles
PROBE_MS = 1.0


@dataclass(kw_only=True)
class Figure:
    """What one library showed in one case."""

    rounds_us: list[float] = field(default_factory=list)
    samples_us: list[float] = field(default_factory=list)
    wrong: int = 0
    line_ns: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        """Median over rounds."""
        return median(self.rounds_us)

    @property
    def p99_us(self) -> float:
        """99th percentile over single calls of all rounds."""
        return float(np.percentile(self.samples_us, 99))


class Load(NamedTuple):
    """How many calls a job makes in a round."""

    num_chunks: int
    chunk_calls: int
    samples: int


def plan_load(case: Case, estimate_us: float, round_ms: float) -> Load:
    """Returns the calls that take about ``round_ms`` if one takes ``estimate_us``."""
    wanted = max(MIN_CALLS, round(round_ms * 1000 / max(estimate_us, 0.01)))
    if case.is_fresh:
        return Load(0, 0, min(wanted, MAX_SAMPLES))
    if estimate_us >= SLOW_US:
        return Load(wanted, 1, 0)
    calls = min(wanted, MAX_CALLS)
    chunk_calls = max(1, calls // CHUNKS)
    return Load(calls // chunk_calls, chunk_calls, max(MIN_CALLS, min(calls // 10, MAX_SAMPLES)))


def take_round(load: Load, answers: Sequence[dict[str, Any]]) -> tuple[float, list[float]]:
    """Returns the round's time and the single calls' times, in us, from the ranks' clock readings."""
    singles_us: Any = []
    if load.samples:
        starts = np.array([answer["starts"] for answer in answers], dtype=np.int64)  # (world_size, samples)
        ends = np.array([answer["ends"] for answer in answers], dtype=np.int64)
        singles_us = (ends.max(axis=0) - starts.max(axis=0)) / 1000
    if not load.num_chunks:
        return float(np.median(singles_us)), singles_us.tolist()
    marks = np.array([answer["marks"] for answer in answers], dtype=np.int64)  # (world_size, num_chunks + 1)
    chunks_us = np.diff(marks.max(axis=0)) / 1000 / load.chunk_calls
    return float(np.median(chunks_us)), (singles_us if load.samples else chunks_us).tolist()


def _run_once(job: Job, load: Load, round_index: int, figure: Figure) -> float:
    answers = job.run(round_index=round_index, **load._asdict())
    time_us, singles_us = take_round(load, answers)
    figure.rounds_us.append(time_us)
    figure.samples_us += singles_us
    figure.wrong += sum(answer["wrong"] for answer in answers)
    figure.line_ns.append(max(answer["line_ns"] for answer in answers))
    return time_us


def _prepare(jobs: Sequence[Job], case: Case, on_failure: Callable[[Job, JobFailedError], None]) -> dict[str, float]:
    """Prepares and probes every job; returns the estimated us a call of those that take part."""
    estimates: dict[str, float] = {}
    for job in jobs:
        try:
            if job.prepare(case) is not None:
                continue
            first_us = _run_once(job, Load(0, 0, MIN_CALLS), 0, Figure())  # touches pages, makes connections
            estimates[job.name] = _run_once(job, plan_load(case, first_us, PROBE_MS), 1, Figure())
        except JobFailedError as error:
            on_failure(job, error)
    return estimates


def measure(
    jobs: Sequence[Job],
    case: Case,
    *,
    rounds: int,
    round_ms: float,
    on_failure: Callable[[Job, JobFailedError], None],
) -> dict[str, Figure]:
    """Runs ``case`` on every job in turns, ``rounds`` times; returns the figures by job name.

    Libraries that do not offer the case are absent. A job that fails goes to ``on_failure`` and is left out.
    """
    estimates = _prepare(jobs, case, on_failure)
    figures = {name: Figure() for name in estimates}
    for round_index in range(rounds):
        turns = [job for job in jobs if job.name in figures]
        first = round_index % max(1, len(turns))  # another one goes first in each round
        for job in [*turns[first:], *turns[:first]]:
            load = plan_load(case, estimates[job.name], round_ms)
            try:
                estimates[job.name] = _run_once(job, load, round_index, figures[job.name])
            except JobFailedError as error:
                del figures[job.name]
                on_failure(job, error)
    for job in jobs:
        if job.name in figures:
            job.release()
    return figures


def ratio(figure: Figure, baseline: Figure) -> float:
    """Returns the median over rounds of ``figure``'s time / ``baseline``'s time in the same round."""
    return median(a / b for a, b in zip(figure.rounds_us, baseline.rounds_us, strict=True))
