"""Communicates every n-th call: the others add to what is owed, and their result is zero.

With an optimizer it means: skip the step where ``is_due`` says no (the sum is zero there), else step with the sum of n
gradients. Calls are counted for each set of tensors that goes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ...sizes import whole_number
from ..base import Compressor, Context, Message, Part, check_named
from ..state import NamedBuffers
from ._base import Wrapper

__all__ = ["Every", "make"]


@dataclass(eq=False)
class Every(Wrapper):
    """Sends the sum of ``n`` calls' inputs in the n-th; ``inner`` sees that call alone."""

    inner: Compressor
    n: int = 2

    name = "every"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.n, "every: the period, in calls", 1)
        if isinstance(self.inner, Every):
            raise ConfigError(
                f"every around {self.inner.spec}: expected one period, got two; "
                f"for calls that are both due write every:{self.inner.n * self.n}"
            )
        self._owed = NamedBuffers(self.spec)
        self._kept = {"owed": self._owed}
        self._calls: dict[str, int] = {}

    def is_due(self, name: str) -> bool:
        """Says whether the next call with the tensor ``name`` communicates."""
        return self._calls.get(name, 0) % self.n == self.n - 1

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        own = tuple(self._calls.get(str(part.name), 0) for part in parts)
        return own + self.inner.calls_of(parts)

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        check_named(context.parts, self.spec)
        names = [str(part.name) for part in context.parts]
        due = {self.is_due(name) for name in names}
        if len(due) > 1:
            raise ConfigError(
                f"compression {self.spec!r}: some of the tensors {names} are due and others not; reduce those that "
                f"started together in one call, or each in its own"
            )
        owed = self._owed.get(context.parts, flat)
        owed.add_(flat)
        for name in names:
            self._calls[name] = self._calls.get(name, 0) + 1
        if due == {False}:
            return None
        message = self.inner.begin(owed.clone(), context)
        if message is not None:
            owed.zero_()
        return message

    def _entries(self) -> set[str]:
        return super()._entries() | {"calls"}

    def _own_state(self) -> dict[str, Any]:
        return super()._own_state() | {"calls": dict(self._calls)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._calls = dict(state["calls"])


make = Every
