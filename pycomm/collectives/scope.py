"""The context that every call of a group runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..errors import PycommError

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Scope"]


class Scope(AbstractContextManager[None]):
    """What every call runs in: pycomm's errors say where they happened, once, and tensors made here are ordinary.

    Ordinary also under the caller's ``torch.inference_mode()``: other threads may have to write them.
    """

    __slots__ = ("_group", "_mode", "_seq", "_verb")

    def __init__(self, group: Group, verb: str, seq: int | None) -> None:
        self._group = group
        self._verb = verb
        self._seq = seq
        self._mode: torch.inference_mode | None = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._mode = torch.inference_mode(False)
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, tb)
            self._mode = None
        if not isinstance(error, PycommError):
            return
        text = error.args[0] if error.args else ""
        if getattr(error, "_is_located", False):
            if self._seq is not None and not text.startswith(self._verb):  # it is about a message of a plan
                error.args = (f"{self._verb}: {text}", *error.args[1:])
            return
        group = self._group
        call = "" if self._seq is None else f", call {self._seq}"
        where = f"[{self._verb}{call}, group {group.name!r}, rank {group.rank} of {group.world_size}]"
        error.args = (f"{where} {text}", *error.args[1:])
        error._is_located = True  # type: ignore[attr-defined]
