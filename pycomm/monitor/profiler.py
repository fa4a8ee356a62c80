"""Collectives as named ranges in torch.profiler's timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..collectives.context import resolve

__all__ = ["profiler_ranges"]


@contextlib.contextmanager
def profiler_ranges(group: Any = None) -> Iterator[None]:
    """Shows each collective of ``group`` as a range ``pycomm::VERB`` in a torch.profiler that runs meanwhile.

    While this context is open, calls do not take the transport's short cut.
    """
    found = resolve(group)

    def begin(verb: str, seq: int) -> Callable[[], None]:
        current: Any = torch.autograd.profiler.record_function(f"pycomm::{verb}", f"group {found.name} #{seq}")
        current.__enter__()
        # However the call ends: a range that stayed open would end in a later session, in memory that is freed.
        return lambda: current.__exit__(None, None, None)

    found.add_start_hook(begin)
    try:
        yield
    finally:
        found.remove_start_hook(begin)
