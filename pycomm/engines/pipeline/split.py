"""Where a model is cut into stages: by a list of modules, by parameters, or by measured time.

All give an ``nn.Sequential`` a stage, of consecutive layers of an ``nn.Sequential`` model (or a list of modules).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from ...errors import ConfigError
from ...sizes import whole_number
from .._marks import numel_of
from .._measuring import now_s, without_trace

__all__ = ["balance", "layer_times_s", "modules_of", "split_model"]

_SAMPLES = 3


def split_model(
    layers: nn.Sequential | Sequence[nn.Module],
    stages: int,
    by: Literal["parameters", "time"] | Sequence[int] = "parameters",
    sample: torch.Tensor | None = None,
) -> list[nn.Sequential]:
    """Returns ``stages`` modules that together are ``layers``.

    ``by`` says what the cuts balance: the number of parameters, the time of forward and backward on ``sample`` (one
    microbatch; every rank must cut alike, so let one measure and pass the cuts), or a list: the number of layers of
    each stage. Raises ConfigError.
    """
    layers = modules_of(layers)
    if isinstance(by, Iterable) and not isinstance(by, str):
        numbers = [whole_number(number, "split_model: the number of layers of a stage", 1) for number in by]
        if len(numbers) != stages or sum(numbers) != len(layers):
            raise ConfigError(
                f"split_model: expected {stages} numbers of layers >= 1 that sum to {len(layers)}, got {numbers}"
            )
    elif by == "time":
        if sample is None:
            raise ConfigError("split_model: by='time' needs sample=, one microbatch of the model's input")
        numbers = balance(layer_times_s(layers, sample), stages)
    elif by == "parameters":
        numbers = balance([float(sum(numel_of(p) for p in layer.parameters())) for layer in layers], stages)
    else:
        raise ConfigError(f"split_model: by: expected 'parameters', 'time' or numbers of layers, got {by!r}")
    cuts = [sum(numbers[:stage]) for stage in range(stages + 1)]
    return [nn.Sequential(*layers[first:last]) for first, last in zip(cuts, cuts[1:])]


def modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the layers of a model that is cut between them. Raises ConfigError for one that is not made of layers."""
    found: list[Any] = list(layers) if isinstance(layers, Iterable) else [None]
    if not all(isinstance(each, nn.Module) for each in found):
        raise ConfigError(
            f"layers: expected an nn.Sequential, or a list of modules of which each takes what the one before it "
            f"returns, got {type(layers).__name__}"
        )
    return found


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Returns how many consecutive entries each stage gets, at least one, so that the dearest stage is cheapest.

    Exact, by dynamic programming over (entries, stages). Raises ConfigError if there are fewer entries than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"a model of {len(costs)} layers cannot be cut into {stages} stages; use fewer ranks or stages"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {0: (0.0, [0])}  # entries taken -> the dearest stage so far, and the cuts
    for stage in range(1, stages + 1):
        following = {}
        for last in range(stage, len(costs) - (stages - stage) + 1):
            options = [
                (max(dearest, sums[last] - sums[first]), [*cuts, last])
                for first, (dearest, cuts) in best.items()
                if first < last
            ]
            following[last] = min(options)
        best = following
    cuts = best[len(costs)][1]
    return [last - first for first, last in zip(cuts, cuts[1:])]


def layer_times_s(layers: Sequence[nn.Module], sample: torch.Tensor) -> list[float]:
    """Returns the seconds of forward and backward of each layer, medians, on what reaches it of ``sample``.

    The layers' buffers and torch's random numbers are as before.
    """
    with without_trace(layers):
        return list(_times_s(layers, sample))


def _times_s(layers: Sequence[nn.Module], inputs: torch.Tensor) -> Iterator[float]:
    for layer in layers:
        taken = []
        for _ in range(_SAMPLES):
            start_s = now_s(inputs)
            given = inputs.detach().requires_grad_(inputs.is_floating_point())
            output = layer(given)
            wanted = [*(p for p in layer.parameters() if p.requires_grad), *([given] if given.requires_grad else [])]
            if wanted:
                torch.autograd.grad(output.sum(), wanted, allow_unused=True)
            taken.append(now_s(inputs) - start_s)
        yield median(taken)
        inputs = output.detach()
