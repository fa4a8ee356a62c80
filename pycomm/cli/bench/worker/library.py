"""The contract between the benchmark and a library under test, and the buffers that it hands out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cases import Bits, Case, Values

__all__ = ["Buffer", "Call", "Library", "UnsupportedCaseError"]

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class UnsupportedCaseError(Exception):
    """The library does not offer this verb, element type, operator or placement."""


@dataclass(frozen=True)
class Buffer:
    """A buffer as the library takes it (``tensor``), and the same memory as integers (``bits``) to fill and compare."""

    tensor: Any
    bits: Bits

    def part(self, index: int, num_parts: int) -> Buffer:
        """Returns a view of one of ``num_parts`` equal parts."""
        numel = len(self.bits) // num_parts
        chosen = slice(index * numel, (index + 1) * numel)
        return Buffer(self.tensor[chosen], self.bits[chosen])


class Library(ABC):
    """A library under test, started in this rank."""

    version: str
    rank: int
    world_size: int

    @abstractmethod
    def buffer(self, numel: int, dtype: str, is_shared: bool) -> Buffer:
        """Allocates ``numel`` elements; ``is_shared`` asks for the library's shared segment where it has one."""

    @abstractmethod
    def encode(self, values: Values, dtype: str) -> Bits:
        """Returns ``values`` as elements of ``dtype``, seen as integers of the same size."""

    @abstractmethod
    def bind(self, case: Case, output: Buffer, input: Buffer, root: int) -> Call:
        """Returns the call that a user of the library would write for speed, arguments prepared once.

        Raises UnsupportedCaseError if the library cannot do it.
        """

    def neighbours(self) -> tuple[int, int]:
        """Returns the ranks after and before this one. Raises UnsupportedCaseError if there is no other."""
        if self.world_size == 1:
            raise UnsupportedCaseError("a message needs two ranks")
        return (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

    def passing_on(self, send: Callable[[Any, int], Any], recv: Callable[[Any, int], Any]) -> Callable[..., None]:
        """Returns what the verb "send" calls, as ``call(output, input, root)``, by what moves one message."""
        (after, before), me = self.neighbours(), self.rank

        def pass_on(output: Any, input: Any, root: int) -> None:
            if root == me:
                send(input, after)
            elif root == before:
                recv(output, before)

        return pass_on

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank is here."""

    def line_ns(self) -> float:
        """One-way latency of a cache line between cores, in ns, if the library measures it; else 0."""
        return 0.0

    def close(self) -> None:  # noqa: B027 - optional
        """Leaves the job in order."""
