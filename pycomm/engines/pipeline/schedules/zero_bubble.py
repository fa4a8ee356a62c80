"""zero_bubble: ZB-H1. The backward pass in two parts; weight gradients, which nobody waits for, fill the bubble.

    Bubble       (p - 1) (F + I - W) / (m (F + I + W) + (p - 1) (F + I - W))       for m >= p, by the paper
    Activations  p                                                                  the most that one_f_one_b has

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import Action, Kind, Schedule, loop_placement, make_schedule
from ..greedy import build_greedily
from ..simulate import StageTimes, simulate

__all__ = ["STAGES_PER_RANK", "TAKES_ANY_STAGES", "build", "least_microbatches"]

STAGES_PER_RANK = 1
TAKES_ANY_STAGES = False


def least_microbatches(ranks: int) -> int:
    """Returns the smallest number of microbatches."""
    return 1


def build(
    ranks: int, microbatches: int, stages_per_rank: int, times: Mapping[int, StageTimes] | None = None
) -> Schedule:
    """Returns the schedule: without ``times`` ZB-H1 as it stands in the paper, else what is faster, that or a greedy
    one, by simulation with the times.
    """
    rows = [_row(rank, ranks, microbatches) for rank in range(ranks)]
    by_hand = make_schedule("zero_bubble", loop_placement(ranks), microbatches, rows)
    if times is None:
        return by_hand
    greedy = build_greedily("zero_bubble", loop_placement(ranks), microbatches, limit=ranks, times=times)
    return min(by_hand, greedy, key=lambda schedule: simulate(schedule, times).total_s)


def _row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Returns one_f_one_b's row with W(m) after I(m + rank): later ranks keep more for the end."""
    forward = [Action(Kind.F, rank, m) for m in range(microbatches)]
    warm_up = min(ranks - rank - 1, microbatches)
    row = forward[:warm_up]
    for m in range(microbatches):
        row += forward[warm_up + m : warm_up + m + 1]
        row.append(Action(Kind.I, rank, m))
        if m >= rank:
            row.append(Action(Kind.W, rank, m - rank))
    return row + [Action(Kind.W, rank, m) for m in range(max(microbatches - rank, 0), microbatches)]
