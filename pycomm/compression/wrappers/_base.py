"""What the wrappers have in common: an inner compressor that does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...errors import ConfigError
from ..base import Codec, Compressor, Context, Message, Part, check_entries
from ..state import NamedBuffers

__all__ = ["Wrapper"]


class Wrapper(Compressor):
    """Passes everything on to ``inner``; a member changes what it is about."""

    inner: Compressor
    is_stateful = True
    keeps_residual: ClassVar[bool] = False  # of what its codec does not send
    is_for_gathers = False

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ConfigError(
                f"{self.name}: expected a compressor to wrap, got {self.inner!r}; "
                f"for a text pass pycomm.compression.parse(text)"
            )
        self._kept: dict[str, NamedBuffers] = {}  # by their names in a saved state
        if self.keeps_residual and not self.inner.is_for_feedback:
            raise ConfigError(
                f"{self.name} around {self.inner.spec}: what that sends is larger than its input, and stays right only "
                f"on average; leave is_unbiased out, or {self.name}"
            )
        if self.inner.name == "policy":
            raise ConfigError(f"{self.name} around policy: a policy chooses among compressors, so it stands outermost")

    @property
    def spec(self) -> str:
        return f"{self.inner.spec}+{super().spec}"

    @property
    def codec(self) -> Codec:
        """That of ``inner``."""
        return self.inner.codec

    @property
    def sees_shapes(self) -> bool:  # type: ignore[override]
        return self.inner.sees_shapes

    @property
    def needs_total(self) -> bool:  # type: ignore[override]
        return self.inner.needs_total

    @property
    def is_for_shards(self) -> bool:  # type: ignore[override]
        return self.inner.is_for_shards

    @property
    def is_for_vectors(self) -> bool:  # type: ignore[override]
        return self.inner.is_for_vectors

    def check(self, parts: Sequence[Part]) -> None:
        super().check(parts)
        self.inner.check(parts)
        for kept in self._kept.values():
            kept.check(parts)

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        return self.inner.calls_of(parts)

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        return self.inner.begin(flat, context)

    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        self.inner.end(message, total, context)

    def _entries(self) -> set[str]:
        """Returns the names of what ``_own_state`` returns."""
        return set(self._kept)

    def _own_state(self) -> dict[str, Any]:
        """Returns what this wrapper itself has to save."""
        return {name: kept.state_dict() for name, kept in self._kept.items()}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Takes what ``_own_state`` returned; it has those entries."""
        for name, kept in self._kept.items():
            kept.load_state_dict(state[name])

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self._own_state(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_entries(state, {self.name, "inner"}, self.spec)
        check_entries(state[self.name], self._entries(), self.spec)
        self.inner.load_state_dict(state["inner"])
        self._load_own_state(state[self.name])


def numel_of(parts: Sequence[Part]) -> int:
    """Returns the elements of all ``parts``."""
    return sum(part.numel for part in parts)
