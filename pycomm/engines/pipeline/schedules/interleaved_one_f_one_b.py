"""interleaved_one_f_one_b: one_f_one_b with several stages a rank, dealt round, so a turn is short.

    Bubble       (p - 1) / (v m + p - 1)          of p ranks with v stages each, m microbatches
    Activations  of stages a v-th as large: (p - rank - 1) 2 + (v - 1) p + 1

The microbatches are a multiple of p. Source: Narayanan et al. 2021, Megatron-LM, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import ConfigError
from ..actions import Action, Kind, Schedule, loop_placement, make_schedule
from ..simulate import StageTimes

__all__ = ["STAGES_PER_RANK", "TAKES_ANY_STAGES", "build", "least_microbatches"]

STAGES_PER_RANK = 2
TAKES_ANY_STAGES = True


def least_microbatches(ranks: int) -> int:
    """Returns the smallest number of microbatches."""
    return ranks


def build(
    ranks: int, microbatches: int, stages_per_rank: int, times: Mapping[int, StageTimes] | None = None
) -> Schedule:
    """Returns the schedule; ``times`` make no difference. Raises ConfigError for a number of microbatches."""
    if microbatches % ranks:
        raise ConfigError(
            f"schedule 'interleaved_one_f_one_b' on {ranks} ranks: expected a multiple of {ranks} microbatches, got "
            f"{microbatches}; use {-(-microbatches // ranks) * ranks}"
        )
    total = microbatches * stages_per_rank
    rows = []
    for rank in range(ranks):

        def entry(place: int, kind: Kind, rank: int = rank) -> Action:
            """Returns what stands at ``place`` of all forwards, or all backwards, of a rank."""
            turn, within = divmod(place, ranks * stages_per_rank)
            chunk, offset = divmod(within, ranks)
            if kind is Kind.B:
                chunk = stages_per_rank - 1 - chunk
            return Action(kind, chunk * ranks + rank, turn * ranks + offset)

        warm_up = min((ranks - rank - 1) * 2 + (stages_per_rank - 1) * ranks, total)
        row = [entry(place, Kind.F) for place in range(warm_up)]
        for place in range(total - warm_up):
            row += [entry(warm_up + place, Kind.F), entry(place, Kind.B)]
        row += [entry(place, Kind.B) for place in range(total - warm_up, total)]
        rows.append(row)
    return make_schedule("interleaved_one_f_one_b", loop_placement(ranks, stages_per_rank), microbatches, rows)
