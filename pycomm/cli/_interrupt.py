"""Ctrl-C for commands that run until it comes."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["INTERRUPT"]


class Interrupt:
    """Remembers Ctrl-C: Python drops a KeyboardInterrupt that happens to rise in a destructor or a finalizer."""

    def __init__(self) -> None:
        self._has_come = False

    def listen(self) -> None:
        """Takes over SIGINT, which raises KeyboardInterrupt as before."""
        signal.signal(signal.SIGINT, self._note)

    def raise_again(self) -> None:
        """Raises KeyboardInterrupt if there was one that did not end the program."""
        if self._has_come:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        signal.default_int_handler(number, frame)


INTERRUPT = Interrupt()
