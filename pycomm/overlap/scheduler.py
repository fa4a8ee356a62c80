"""What a stream moves next: urgent before large, in an order that is the same on every rank by construction.

[Note: one order]
Ranks submit the same items in the same order, but not at the same time. If each took what is most urgent among what
*it* has, one would start an all_reduce that another has not heard of, while that one starts another: a deadlock. So
before each grant the ranks agree on a number: how many items all of them have submitted (the least of their counts).
The items up to that number, and how far each has come, are the same everywhere, so the choice is a pure function of
them. The agreement is a small all_reduce, a microsecond over shared memory and a round trip between hosts, against
segments of megabytes.

[Note: credit]
A grant is what the wire moves in ``GRANT_S`` at the bandwidth that was measured (the ranks agree on the least of
theirs, in the same exchange), and a segment at least. So there are few agreements where the wire is fast, and an urgent
item waits for no more than a grant where it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GRANT_S", "Item", "Scheduler"]

GRANT_S = 5e-3


@dataclass
class Item:
    """What was submitted at once: its ``segments`` (whatever the stream runs), each of about ``segment_bytes``.

    A higher ``priority`` is more urgent.
    """

    segments: Sequence[Any]
    priority: int = 0
    segment_bytes: int = 0
    context: Any = None
    number: int = field(default=0, init=False)
    done: int = field(default=0, init=False)  # segments


class Scheduler:
    """The items of a stream that are not complete. Not thread-safe; the stream has a lock."""

    def __init__(self) -> None:
        self.submitted = 0
        self._items: list[Item] = []

    @property
    def has_work(self) -> bool:
        """Whether an item is not complete."""
        return bool(self._items)

    def add(self, item: Item) -> None:
        """Takes the next item of this rank; it has at least one segment."""
        self.submitted += 1
        item.number = self.submitted
        self._items.append(item)

    def grant(self, agreed: int, bytes_per_s: float) -> list[tuple[Item, Any]]:
        """Returns what to move next, at least one segment, of the first ``agreed`` items: the most urgent first, and
        the oldest of those. Whoever calls runs them all. The same on every rank for the same arguments.
        """
        ready = sorted((each for each in self._items if each.number <= agreed), key=lambda each: -each.priority)
        credit_bytes = bytes_per_s * GRANT_S
        chosen: list[tuple[Item, Any]] = []
        for item in ready:
            while item.done < len(item.segments) and (not chosen or item.segment_bytes <= credit_bytes):
                chosen.append((item, item.segments[item.done]))
                credit_bytes -= item.segment_bytes
                item.done += 1
            if item.done < len(item.segments):
                break
        self._items = [each for each in self._items if each.done < len(each.segments)]
        return chosen

    def give_up(self) -> list[Item]:
        """Forgets all items; returns them."""
        items, self._items = self._items, []
        return items
