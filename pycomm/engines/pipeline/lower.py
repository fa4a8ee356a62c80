"""From what is computed to what is run: checks a schedule, then puts the messages into its rows.

A message is sent right after the action that makes it, and received right before the one that needs it. Receives are
posted when the row comes to them; sends do not wait. So a rank never waits to send, and a lowered row cannot come to
a stand where the schedule does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...errors import PlanError
from .actions import COMPUTE, Action, Kind, Schedule
from .simulate import simulate

__all__ = ["lower", "validate"]


def validate(schedule: Schedule) -> None:
    """Raises PlanError, naming the row and the action, unless every stage sees every microbatch once each way.

    Also unless every action stands in the row of the rank that holds its stage, and the rows can be run to their end.
    """
    seen: Counter[tuple[Kind, int, int]] = Counter()
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            where = f"schedule {schedule.name!r}, rank {rank}, action {place} ({action})"
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                raise PlanError(
                    f"{where}: expected a stage below {schedule.stages} and a microbatch below {schedule.microbatches}"
                )
            if schedule.placement[action.stage] != rank:
                raise PlanError(f"{where}: stage {action.stage} is on rank {schedule.placement[action.stage]}")
            seen[action] += 1
            if seen[action] > 1:
                raise PlanError(f"{where}: it stands twice in the row")
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = "".join(kind.value for kind in COMPUTE if seen[Action(kind, stage, microbatch)])
            if kinds not in ("FB", "FIW"):
                raise PlanError(
                    f"schedule {schedule.name!r}: stage {stage} has {kinds or 'nothing'} of microbatch {microbatch}, "
                    f"expected F and B, or F, I and W"
                )
    simulate(schedule)


def lower(schedule: Schedule) -> Schedule:
    """Returns the schedule with its messages. Raises PlanError if it is not a valid one."""
    validate(schedule)
    return replace(schedule, rows=tuple(tuple(_with_messages(row, schedule)) for row in schedule.rows))


def _with_messages(row: tuple[Action, ...], schedule: Schedule) -> list[Action]:
    lowered: list[Action] = []
    last = schedule.stages - 1

    def is_far(stage: int, other: int) -> bool:
        return schedule.placement[stage] != schedule.placement[other]

    for action in row:
        kind, stage, microbatch = action
        is_backward = kind in (Kind.B, Kind.I)
        if kind is Kind.F and stage > 0 and is_far(stage, stage - 1):
            lowered.append(Action(Kind.RECV_F, stage, microbatch))
        if is_backward and stage < last and is_far(stage, stage + 1):
            lowered.append(Action(Kind.RECV_B, stage, microbatch))
        lowered.append(action)
        if kind is Kind.F and stage < last and is_far(stage, stage + 1):
            lowered.append(Action(Kind.SEND_F, stage, microbatch))
        if is_backward and stage > 0 and is_far(stage, stage - 1):
            lowered.append(Action(Kind.SEND_B, stage, microbatch))
    return lowered
