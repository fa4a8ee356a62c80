"""Running modules to see what they take, without leaving a trace in them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

__all__ = ["now_s", "without_trace"]


def now_s(tensor: torch.Tensor) -> float:
    """Returns the time in seconds, once the device of ``tensor`` has done what it was given so far."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


@contextmanager
def without_trace(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, ``modules`` may run on a sample; afterwards their buffers and torch's random numbers are as before.

    So a BatchNorm has seen nothing of the sample, and dropout draws what it would have drawn. Raises nothing.
    """
    owners = [each for module in modules for each in module.modules()]
    kept = [(owner, name, buffer, buffer.clone())
            for owner in owners for name, buffer in owner._buffers.items() if buffer is not None]  # fmt: skip
    tensors = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
    with torch.random.fork_rng(sorted({each.get_device() for each in tensors if each.is_cuda})):
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, value in kept:
                    owner._buffers[name] = buffer.copy_(value)
