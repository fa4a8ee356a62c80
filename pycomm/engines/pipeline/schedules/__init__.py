"""Pipeline schedules, a file each: ``build(ranks, microbatches, stages_per_rank, times) -> Schedule``.

The file's name is the schedule's. ``make`` finds one by its name; other packages add theirs by the entry points
``pycomm.pipeline_schedules``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import ConfigError
from ....registry import Registry
from ....sizes import whole_number
from ..actions import Schedule
from ..lower import validate
from ..simulate import StageTimes

__all__ = ["SCHEDULES", "make"]

SCHEDULES = Registry("pycomm.engines.pipeline.schedules", "pycomm.pipeline_schedules", "pipeline schedule")


def make(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    times: Mapping[int, StageTimes] | None = None,
) -> Schedule:
    """Returns the schedule ``name``, checked. ``times`` are measured ones of each stage, for schedules that use them.

    ``stages_per_rank`` None is the schedule's own number. Raises ConfigError if the schedule does not exist for these
    numbers.
    """
    module = SCHEDULES.load(name)
    least, own = module.least_microbatches(ranks), module.STAGES_PER_RANK
    microbatches = whole_number(microbatches, "microbatches", 1)
    if microbatches < least:
        raise ConfigError(
            f"schedule {name!r} on {ranks} ranks needs at least {least} microbatches, got {microbatches}; split the "
            f"batch into more, or use 'gpipe'"
        )
    if stages_per_rank not in (None, own) and not module.TAKES_ANY_STAGES:
        raise ConfigError(f"schedule {name!r} has {own} stage(s) a rank, got {stages_per_rank}")
    stages = own if stages_per_rank is None else whole_number(stages_per_rank, "stages_per_rank", 1)
    schedule: Schedule = module.build(ranks, microbatches, stages, times)
    validate(schedule)
    return schedule
