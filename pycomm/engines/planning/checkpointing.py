"""Activation checkpointing by plan: which blocks to compute again, so that the rest fits and least time is lost.

A block that is kept holds all that its backward pass needs; one that is computed again holds its input, and at its turn
in the backward pass the rest for a while. With held(i) of the blocks up to i, all have to fit:

    at the end of the forward pass              held(last)
    at the backward pass of i, computed again   held(i) + what i holds if it is kept       (later blocks are free again)

The least sum of forward times under these bounds is a knapsack; it is solved by going through the blocks with the best
time of every number of bytes held so far (bytes in units of 1/4096 of the budget, rounded up, so that what is planned
fits). Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Jain et al. 2020, Checkmate, for measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ...sizes import bytes_of
from .._measuring import now_s, without_trace

__all__ = ["BlockCost", "CheckpointPlan", "apply_checkpoints", "measure_blocks", "plan_checkpoints"]

_UNITS = 4096
_SAMPLES = 3


class BlockCost(NamedTuple):
    """A block's forward seconds, the bytes that its backward pass needs, and those of its input (a part of them)."""

    forward_s: float
    kept_bytes: int
    input_bytes: int


class CheckpointPlan(NamedTuple):
    """The numbers of the blocks to compute again, the seconds that takes, and the most bytes of activations held."""

    recomputed: tuple[int, ...]
    extra_s: float
    peak_bytes: int


def plan_checkpoints(costs: Sequence[BlockCost], memory: int | str) -> CheckpointPlan:
    """Returns the blocks to compute again so that activations fit into ``memory`` and least time is lost.

    Raises ConfigError, with the least that would do, if not even all of them do.
    """
    budget = bytes_of(memory, "plan_checkpoints: memory")
    for place, cost in enumerate(costs):
        if cost.forward_s < 0 or not 0 <= cost.input_bytes <= cost.kept_bytes:
            raise ConfigError(
                f"plan_checkpoints: block {place}: expected forward_s >= 0 and 0 <= input_bytes <= kept_bytes, got "
                f"{cost}"
            )
    unit = max(1, budget // _UNITS)
    limit = budget // unit
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # units held -> seconds, blocks computed again
    for place, cost in enumerate(costs):
        kept, inputs = -(-cost.kept_bytes // unit), -(-cost.input_bytes // unit)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for held, (seconds, chosen) in best.items():
            if held + kept <= limit:
                _offer(following, held + kept, (seconds, chosen))
                _offer(following, held + inputs, (seconds + cost.forward_s, (*chosen, place)))
        best = following
    if not best:
        least = _peak_bytes(costs, range(len(costs)))
        raise ConfigError(
            f"plan_checkpoints: activations need {least} bytes with every block computed again, expected at most "
            f"{budget}; use a smaller micro-batch, smaller blocks, or more memory"
        )
    extra_s, recomputed = min(best.values(), key=lambda found: found[0])
    return CheckpointPlan(recomputed, extra_s, _peak_bytes(costs, recomputed))


def _offer(best: dict[int, tuple[float, tuple[int, ...]]], held: int, found: tuple[float, tuple[int, ...]]) -> None:
    if held not in best or found[0] < best[held][0]:
        best[held] = found


def _peak_bytes(costs: Sequence[BlockCost], recomputed: Sequence[int]) -> int:
    """Returns the most bytes held at once: see the top of this file."""
    held = peak = 0
    for place, cost in enumerate(costs):
        is_again = place in recomputed
        peak = max(peak, held + cost.kept_bytes)
        held += cost.input_bytes if is_again else cost.kept_bytes
    return peak


def measure_blocks(blocks: Sequence[nn.Module], sample: Any) -> list[BlockCost]:
    """Runs ``blocks`` one after the other on ``sample`` and returns what each costs; times are medians of three.

    Bytes are those of the tensors that autograd saves, each storage once, without parameters and buffers. What two
    blocks share (the output of one is saved as the input of the next) counts for the later one. The blocks' buffers and
    torch's random numbers are as before.
    """
    with without_trace(blocks):
        return list(_costs(blocks, sample))


def _costs(blocks: Sequence[nn.Module], given: Any) -> Iterator[BlockCost]:
    for block in blocks:
        inputs = given.detach().requires_grad_(given.is_floating_point())
        own = {each.untyped_storage().data_ptr() for each in _held_by(block)}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        taken = []
        for _ in range(_SAMPLES):
            saved.clear()
            start_s = now_s(inputs)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = block(inputs)
            taken.append(now_s(inputs) - start_s)
        saved.pop(output.untyped_storage().data_ptr(), None)
        saved[inputs.untyped_storage().data_ptr()] = input_bytes = inputs.untyped_storage().nbytes()
        yield BlockCost(median(taken), sum(saved.values()), input_bytes)
        given = output


def _held_by(block: nn.Module) -> Iterator[torch.Tensor]:
    yield from block.parameters()
    yield from block.buffers()


def apply_checkpoints(blocks: Sequence[nn.Module], plan: CheckpointPlan) -> None:
    """Makes the blocks that ``plan`` names compute their activations again, in place; their names stay as they are."""
    if any(place >= len(blocks) for place in plan.recomputed):
        raise ConfigError(f"apply_checkpoints: the plan names block {max(plan.recomputed)}, got {len(blocks)} blocks")
    for place in plan.recomputed:
        blocks[place].forward = partial(_again, blocks[place].forward)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
