"""Builds a schedule by simulating it: whenever a rank is free it takes the most urgent thing that it can do.

    first   the input gradient of the latest stage        others wait for it, and it brings memory nearer to its end
    then    the forward of the latest stage               if the rank may hold one more activation
    then    a weight gradient                             nobody waits for it: it fills what would be a bubble

A rank holds at most ``limit`` activations, from F to the end of W. ``times`` may differ from stage to stage: with
measured ones this is the scheduler for stages that are not alike (the idea of "Zero Bubble Pipeline Parallelism", Qi
et al. 2024, section 3: its automatic search; here without the search).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import ConfigError
from .actions import Action, Kind, Schedule, make_schedule
from .simulate import StageTimes

__all__ = ["build_greedily"]


class _Rank:
    """What one rank has done, and may do."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.row: list[Action] = []
        self.free_s = 0.0
        self.held = 0
        self.pending_weights: list[Action] = []
        self.next_forward = dict.fromkeys(stages, 0)
        self.next_input = dict.fromkeys(stages, 0)


def build_greedily(
    name: str,
    placement: Sequence[int],
    microbatches: int,
    limit: int,
    times: Mapping[int, StageTimes] | None = None,
    transfer_s: float = 0.0,
) -> Schedule:
    """Returns the schedule that the rule on top of this file makes; ``limit`` activations a rank.

    Raises ConfigError if the limit lets no microbatch through all stages.
    """
    ranks = [
        _Rank([stage for stage, holder in enumerate(placement) if holder == rank]) for rank in range(max(placement) + 1)
    ]
    most = max(len(rank.stages) for rank in ranks)
    if limit < most:
        raise ConfigError(f"schedule {name!r}: a rank with {most} stages has to hold {most} activations, got {limit}")
    durations = times or {stage: StageTimes() for stage in range(len(placement))}
    ends: dict[Action, float] = {}
    total = 3 * microbatches * len(placement)
    while len(ends) < total:
        # The earliest thing that can happen anywhere; of equals the most urgent.
        _, _, rank, action = min(
            (
                (max(rank.free_s, ready_s), urgency, rank, action)
                for rank in ranks
                for ready_s, urgency, action in _candidates(rank, placement, microbatches, limit, ends, transfer_s)
            ),
            key=lambda found: found[:2],
        )
        _take(rank, action, max(rank.free_s, _ready_s(action, placement, ends, transfer_s)), durations, ends)
    return make_schedule(name, placement, microbatches, [rank.row for rank in ranks])


def _candidates(
    rank: _Rank,
    placement: Sequence[int],
    microbatches: int,
    limit: int,
    ends: Mapping[Action, float],
    transfer_s: float,
) -> list[tuple[float, tuple[int, int], Action]]:
    """Returns (ready_s, urgency, action) of what the rank could do next."""
    found = []
    for stage in rank.stages:
        microbatch = rank.next_input[stage]
        action = Action(Kind.I, stage, microbatch)
        if microbatch < rank.next_forward[stage] and _is_ready(action, placement, ends):
            found.append((_ready_s(action, placement, ends, transfer_s), (0, -stage), action))
        microbatch = rank.next_forward[stage]
        action = Action(Kind.F, stage, microbatch)
        # A later stage of this rank has to find room for what an earlier one has begun.
        later = sum(1 for other in rank.stages if other > stage)
        if microbatch < microbatches and rank.held + 1 + later <= limit and _is_ready(action, placement, ends):
            found.append((_ready_s(action, placement, ends, transfer_s), (1, -stage), action))
    if rank.pending_weights:
        action = rank.pending_weights[0]
        found.append((ends[Action(Kind.I, action.stage, action.microbatch)], (2, 0), action))
    return found


def _sources(action: Action, placement: Sequence[int]) -> list[Action]:
    kind, stage, microbatch = action
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)] if stage else []
    if kind is Kind.I and stage < len(placement) - 1:
        return [Action(Kind.I, stage + 1, microbatch)]
    return [Action(Kind.F, stage, microbatch)]


def _is_ready(action: Action, placement: Sequence[int], ends: Mapping[Action, float]) -> bool:
    return all(source in ends for source in _sources(action, placement))


def _ready_s(action: Action, placement: Sequence[int], ends: Mapping[Action, float], transfer_s: float) -> float:
    return max(
        (
            ends[source] + (transfer_s if placement[source.stage] != placement[action.stage] else 0.0)
            for source in _sources(action, placement)
        ),
        default=0.0,
    )


def _take(
    rank: _Rank, action: Action, start_s: float, durations: Mapping[int, StageTimes], ends: dict[Action, float]
) -> None:
    rank.free_s = ends[action] = start_s + durations[action.stage].of(action.kind)
    rank.row.append(action)
    if action.kind is Kind.F:
        rank.next_forward[action.stage] += 1
        rank.held += 1
    elif action.kind is Kind.I:
        rank.next_input[action.stage] += 1
        rank.pending_weights.append(Action(Kind.W, action.stage, action.microbatch))
    else:
        rank.pending_weights.remove(action)
        rank.held -= 1
