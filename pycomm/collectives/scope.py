"""The contexts that every call of a group runs in."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..errors import PycommError, forget_locals
from ..transport import _wording as wording

if TYPE_CHECKING:
    from ..transport.base import Transport
    from .group import Group

__all__ = ["Scope", "Turn", "Turns"]


class Turns:
    """Who is inside a collective of a group: one thread at a time. ``is_moving``: where others may wait for it, which
    stays so if it leaves that call by an error that is not pycomm's.
    """

    __slots__ = ("holder", "is_moving", "lock", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.lock = threading.Lock()  # held by the thread that is inside
        self.holder = 0
        self.is_moving = False


class Turn(AbstractContextManager[None]):
    """The span in which one thread is inside a collective of this group. Raises TransportError if another one is.

    Who leaves the call by Ctrl-C, or, while its data moves, by any error that is not pycomm's (of a signal handler, or
    of a caller's codec), leaves the other ranks in the middle of it: they are told, and the group is broken.
    """

    __slots__ = ("_turns", "_verb")

    def __init__(self, turns: Turns, verb: str) -> None:
        self._turns = turns
        self._verb = verb

    def __enter__(self) -> None:
        turns = self._turns
        if not turns.lock.acquire(blocking=False):
            raise wording.other_thread(turns.transport.place(self._verb))
        turns.holder = threading.get_ident()
        turns.is_moving = False

    def begin(self) -> None:
        """From here on the other ranks wait for this one."""
        self._turns.is_moving = True

    def end(self) -> None:
        """The ranks are in step again: what fails now is this one's own affair."""
        self._turns.is_moving = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        turns = self._turns
        if error is None or isinstance(error, PycommError):
            turns.is_moving = False
        if isinstance(error, PycommError | KeyboardInterrupt):
            forget_locals(error)  # while the turn lasts: who closes the group waits for its end
        try:
            is_own = error is not None and not isinstance(error, PycommError)
            if is_own and (turns.is_moving or isinstance(error, KeyboardInterrupt | SystemExit)):
                turns.transport.abandon()
        finally:
            turns.holder = 0
            turns.lock.release()


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
        if isinstance(error, PycommError | KeyboardInterrupt):
            forget_locals(error)  # messages have no turn
        if not isinstance(error, PycommError):
            return
        text = error.args[0] if error.args else ""
        if getattr(error, "_is_located", False):
            if self._seq is not None and not text.startswith(self._verb):  # it is about a message of a plan
                error.args = (f"{self._verb}: {text}", *error.args[1:])
            return
        group = self._group
        call = "" if self._seq is None else f", call {self._seq}"
        where = f"[{self._verb}{call}, group {group.name!r}, {group.member}]"
        error.args = (f"{where} {text}", *error.args[1:])
        error._is_located = True  # type: ignore[attr-defined]
