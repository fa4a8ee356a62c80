"""zbv: two stages a rank in a V, there and back, and weight gradients that fill the bubble.

    Activations  2 p, of stages half as large: what one_f_one_b holds at most

The first rank holds the first and the last stage, so a microbatch's backward pass begins where its forward pass began.
Built by simulation with the stages' ``times`` (``greedy.py``), under that limit. Source: Qi et al. 2024, Zero Bubble
Pipeline Parallelism, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import Schedule, v_placement
from ..greedy import build_greedily
from ..simulate import StageTimes

__all__ = ["STAGES_PER_RANK", "TAKES_ANY_STAGES", "build", "least_microbatches"]

STAGES_PER_RANK = 2
TAKES_ANY_STAGES = False


def least_microbatches(ranks: int) -> int:
    """Returns the smallest number of microbatches."""
    return 1


def build(
    ranks: int, microbatches: int, stages_per_rank: int, times: Mapping[int, StageTimes] | None = None
) -> Schedule:
    """Returns the schedule that the stages' ``times`` ask for; by default all parts take the same."""
    return build_greedily("zbv", v_placement(ranks), microbatches, limit=2 * ranks, times=times)
