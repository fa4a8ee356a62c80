"""Collectives as named ranges in torch.profiler's timeline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ..collectives.context import resolve
from ..collectives.hooks import CollectiveRecord

__all__ = ["profiler_ranges"]


@contextlib.contextmanager
def profiler_ranges(group: Any = None) -> Iterator[None]:
    """Shows each collective of ``group`` as a range ``pycomm::VERB`` in a torch.profiler that runs meanwhile.

    While this context is open, calls do not take the transport's short cut.
    """
    found = resolve(group)
    under_way = threading.local()  # calls run in their callers' threads, and in the group's own

    def begin(verb: str, seq: int) -> None:
        _end(under_way)  # one that failed had no end
        under_way.range = torch.autograd.profiler.record_function(f"pycomm::{verb}", f"group {found.name} #{seq}")
        under_way.range.__enter__()

    def end(_record: CollectiveRecord) -> None:
        _end(under_way)

    found.add_start_hook(begin)
    found.add_hook(end)
    try:
        yield
    finally:
        _end(under_way)
        found.remove_hook(end)
        found.remove_start_hook(begin)


def _end(under_way: threading.local) -> None:
    current = getattr(under_way, "range", None)
    under_way.range = None
    if current is not None:
        current.__exit__(None, None, None)
