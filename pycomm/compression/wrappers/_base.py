"""What the wrappers have in common: an inner compressor that does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError, ConfigError
from ..base import Codec, Compressor, Context, Message, Part

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

    def calls_of(self, parts: Sequence[Part]) -> tuple[int, ...]:
        return self.inner.calls_of(parts)

    def begin(self, flat: torch.Tensor, context: Context) -> Message | None:
        return self.inner.begin(flat, context)

    def end(self, message: Message, total: torch.Tensor, context: Context) -> None:
        self.inner.end(message, total, context)

    def _own_state(self) -> dict[str, Any]:
        """Returns what this wrapper itself has to save."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Takes what ``_own_state`` returned."""

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self._own_state(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {self.name, "inner"}:
            raise CheckpointError(
                f"compression {self.spec!r}: expected a state with the entries {self.name!r} and 'inner', got "
                f"{sorted(state)}; load it into the compressor that saved it"
            )
        self._load_own_state(state[self.name])
        self.inner.load_state_dict(state["inner"])


def numel_of(parts: Sequence[Part]) -> int:
    """Returns the elements of all ``parts``."""
    return sum(part.numel for part in parts)
