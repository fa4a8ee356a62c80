"""one_f_one_b: as soon as a rank can, it alternates one forward and one backward, and so holds few activations.

    Bubble       (p - 1) / (m + p - 1)            that of gpipe
    Activations  p - rank                         of p ranks, however many microbatches there are

Source: Narayanan et al. 2019, PipeDream; with a flush at the end of each step (2021, Megatron-LM, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import Action, Kind, Schedule, loop_placement, make_schedule
from ..simulate import StageTimes

__all__ = ["STAGES_PER_RANK", "TAKES_ANY_STAGES", "build", "least_microbatches"]

STAGES_PER_RANK = 1
TAKES_ANY_STAGES = False


def least_microbatches(ranks: int) -> int:
    """Returns the smallest number of microbatches."""
    return 1


def build(
    ranks: int, microbatches: int, stages_per_rank: int, times: Mapping[int, StageTimes] | None = None
) -> Schedule:
    """Returns the schedule; ``times`` make no difference."""
    rows = []
    for rank in range(ranks):
        forward = [Action(Kind.F, rank, m) for m in range(microbatches)]
        backward = [Action(Kind.B, rank, m) for m in range(microbatches)]
        warm_up = min(ranks - rank - 1, microbatches)
        row = forward[:warm_up]
        for ahead, behind in zip(forward[warm_up:], backward):
            row += [ahead, behind]
        rows.append(row + backward[microbatches - warm_up :])
    return make_schedule("one_f_one_b", loop_placement(ranks), microbatches, rows)
