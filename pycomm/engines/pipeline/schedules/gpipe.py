"""gpipe: all forwards, then all backwards. The reference.

    Bubble       (p - 1) / (m + p - 1)            of p ranks and m microbatches, F : B of any ratio
    Activations  m

Source: Huang et al. 2019, GPipe.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import Action, Kind, Schedule, loop_placement, make_schedule
from ..simulate import StageTimes

__all__ = ["STAGES_PER_RANK", "TAKES_ANY_STAGES", "build", "least_microbatches"]

STAGES_PER_RANK = 1
TAKES_ANY_STAGES = True


def least_microbatches(ranks: int) -> int:
    """Returns the smallest number of microbatches."""
    return 1


def build(
    ranks: int, microbatches: int, stages_per_rank: int, times: Mapping[int, StageTimes] | None = None
) -> Schedule:
    """Returns the schedule; ``times`` make no difference."""
    placement = loop_placement(ranks, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        forward = [Action(Kind.F, stage, m) for stage in stages for m in range(microbatches)]
        backward = [Action(Kind.B, stage, m) for stage in reversed(stages) for m in range(microbatches)]
        rows.append(forward + backward)
    return make_schedule("gpipe", placement, microbatches, rows)
