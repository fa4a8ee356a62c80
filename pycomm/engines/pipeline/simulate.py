"""What a schedule would take: every action at its earliest time, after those before it in its row and those it needs.

    F(stage, m)   needs F(stage - 1, m)
    B, I(stage, m) need F(stage, m), and B or I(stage + 1, m)
    W(stage, m)   needs I(stage, m)

The bubble is the share of the ranks' time in which they do not compute. An activation is held from F to the end of B,
or of W. A schedule that cannot be run to its end is told with the action that each rank stands at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...errors import PlanError
from .actions import Action, Kind, Schedule

__all__ = ["Simulation", "StageTimes", "needs", "simulate"]


class StageTimes(NamedTuple):
    """Seconds of a stage's parts for one microbatch: forward, gradient of the input, gradient of the weights."""

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0

    def of(self, kind: Kind) -> float:
        """Returns the seconds of an action."""
        return {
            Kind.F: self.forward_s,
            Kind.I: self.input_s,
            Kind.W: self.weight_s,
            Kind.B: self.input_s + self.weight_s,
        }[kind]


class Simulation(NamedTuple):
    """When each action began and ended (seconds), the whole time, and what follows from it.

    ``peak_activations[rank]`` counts the microbatches of stages that a rank holds at most.
    """

    spans: dict[Action, tuple[float, float]]
    total_s: float
    bubble: float
    peak_activations: tuple[int, ...]


def needs(action: Action, schedule: Schedule) -> list[tuple[Action, ...]]:
    """Returns what has to be done before ``action``: of each entry one of the alternatives."""
    kind, stage, microbatch = action
    backward = (Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch))
    if kind is Kind.F:
        return [] if stage == 0 else [(Action(Kind.F, stage - 1, microbatch),)]
    if kind is Kind.W:
        return [(Action(Kind.I, stage, microbatch),)]
    before: list[tuple[Action, ...]] = [(Action(Kind.F, stage, microbatch),)]
    return before if stage == schedule.stages - 1 else [*before, backward]


Times = Mapping[int, StageTimes] | Mapping[Action, float] | StageTimes


def simulate(schedule: Schedule, times: Times = StageTimes(), transfer_s: float = 0.0) -> Simulation:
    """Runs ``schedule`` on paper; ``times`` are of every stage alike, of each stage, or of each action.

    ``transfer_s`` is what a message between two ranks takes. Raises PlanError if it comes to a stand before its end.
    """
    rows = [[action for action in row if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W)] for row in schedule.rows]
    places, clocks, busy = [0] * len(rows), [0.0] * len(rows), 0.0
    spans: dict[Action, tuple[float, float]] = {}
    left = sum(map(len, rows))
    while left:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                ready_s = _ready_s(action, schedule, spans, transfer_s)
                if ready_s is None:
                    break
                duration_s = _duration_s(action, times)
                start_s = max(clocks[rank], ready_s)
                clocks[rank] = start_s + duration_s
                spans[action] = (start_s, clocks[rank])
                busy += duration_s
                places[rank] += 1
                left -= 1
                moved = True
        if not moved:
            stuck = [f"rank {r} at {row[places[r]]}" for r, row in enumerate(rows) if places[r] < len(row)]
            raise PlanError(
                f"schedule {schedule.name!r} comes to a stand: {', '.join(stuck)} wait for what comes later in some "
                f"row; print the schedule and look at these actions"
            )
    total_s = max(clocks, default=0.0)
    bubble = 1.0 - busy / (total_s * len(rows)) if total_s else 0.0
    return Simulation(spans, total_s, bubble, tuple(_peak(row) for row in rows))


def _duration_s(action: Action, times: Times) -> float:
    if isinstance(times, StageTimes):
        return times.of(action.kind)
    found: StageTimes | float = times[action if action in times else action.stage]  # type: ignore[index]
    return found.of(action.kind) if isinstance(found, StageTimes) else found


def _ready_s(
    action: Action, schedule: Schedule, spans: Mapping[Action, tuple[float, float]], transfer_s: float
) -> float | None:
    ready_s = 0.0
    for alternatives in needs(action, schedule):
        done = next((each for each in alternatives if each in spans), None)
        if done is None:
            return None
        travels = schedule.placement[done.stage] != schedule.placement[action.stage]
        ready_s = max(ready_s, spans[done][1] + (transfer_s if travels else 0.0))
    return ready_s


def _peak(row: list[Action]) -> int:
    held = peak = 0
    for action in row:
        held += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak
