"""How a batch is made up: the largest micro-batch that fits, by measurement, and how many of them make a step.

    effective batch = micro-batch x accumulation steps x ranks

A larger micro-batch uses the cores better and asks for fewer messages where parameters are gathered for each; more
accumulation costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import pycomm

from ...errors import ConfigError
from ...sizes import bytes_of, whole_number
from .peak import peak_bytes

__all__ = ["BatchPlan", "largest_micro_batch", "plan_batch"]


class BatchPlan(NamedTuple):
    """Samples that a rank computes at once, how often before a step, and those of a step over all ranks."""

    micro_batch: int
    accumulation_steps: int
    effective_batch: int


def plan_batch(target_batch: int, ranks: int, largest: int) -> BatchPlan:
    """Returns the fewest accumulation steps that make ``target_batch`` of micro-batches of at most ``largest``.

    The effective batch is exactly the target if twice as many steps as needed can do that, else the next larger one.
    Raises ConfigError.
    """
    for name, value in (("target_batch", target_batch), ("ranks", ranks), ("largest", largest)):
        whole_number(value, f"plan_batch: {name}", 1)
    of_rank = -(-target_batch // ranks)
    fewest = -(-of_rank // largest)
    for steps in range(fewest, 2 * fewest + 1):
        if target_batch % (ranks * steps) == 0:
            return BatchPlan(target_batch // (ranks * steps), steps, target_batch)
    micro_batch = -(-of_rank // fewest)
    return BatchPlan(micro_batch, fewest, micro_batch * fewest * ranks)


def largest_micro_batch(
    step: Callable[[int], Any],
    memory: int | str,
    *,
    most: int = 4096,
    group: Any = None,
    device: torch.device | str = "cpu",
) -> int:
    """Returns the largest micro-batch whose ``step(micro_batch)`` makes tensors of at most ``memory`` bytes together.

    ``step`` runs forward and backward of so many samples; what it holds before and after does not count. It is run with
    1, 2, 4, ... samples and then between the last that fits and the first that does not. With a ``group`` it is called
    by every rank, which all get the smallest rank's number; steps that communicate need it. A step that runs out of a
    GPU's memory does not fit. Raises ConfigError on every rank if one sample is too much for one of them.
    """
    budget, most = bytes_of(memory, "largest_micro_batch: memory"), whole_number(most, "largest_micro_batch: most", 1)
    fits, fails = 0, most + 1
    while fails - fits > 1:
        tried = min(2 * fits or 1, most) if fails > most else (fits + fails) // 2
        excess = _agreed(_taken(step, tried, device) - budget, group)
        if excess <= 0:
            fits = tried
        else:
            fails = tried
            if tried == 1:
                raise ConfigError(
                    f"largest_micro_batch: a step of one sample takes more than the memory (here {budget} bytes; on "
                    f"some rank {excess} too few); shard the model, or compute activations again "
                    f"(planning/checkpointing.py)"
                )
    return fits


def _taken(step: Callable[[int], Any], samples: int, device: torch.device | str) -> int:
    """Returns the bytes of a step; more than any memory if it ran out."""
    try:
        return peak_bytes(lambda: step(samples), device)
    except torch.OutOfMemoryError:
        return 1 << 62


def _agreed(excess: int, group: Any) -> int:
    """Returns the most bytes that a rank took beyond its memory, so that all go on alike."""
    if group is None:
        return excess
    most = torch.tensor([excess], dtype=torch.int64, device=pycomm.get_group(group).control_device)
    pycomm.all_reduce(most, pycomm.ReduceOp.MAX, group)
    return int(most.item())
