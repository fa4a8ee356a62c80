"""Communication beside computation: streams of collectives, in an order of urgency that is the same on all ranks."""

from __future__ import annotations

from .report import OverlapReport
from .stream import CommStream

__all__ = ["CommStream", "OverlapReport"]
