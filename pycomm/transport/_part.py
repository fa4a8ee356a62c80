"""What an object has in common that a transport is made of, and that calls it back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from .base import Transport

__all__ = ["Part"]

_T = TypeVar("_T", bound="Transport")


class Part(Generic[_T]):
    """Knows its transport, but does not keep it: the memory and the descriptors of a closed group go at once, without
    waiting for the collector of cycles.
    """

    def __init__(self, transport: _T) -> None:
        self._of = weakref.ref(transport)

    @property
    def _transport(self) -> _T:
        transport = self._of()
        assert transport is not None, "who calls comes from there, and what is under way has it"
        return transport
