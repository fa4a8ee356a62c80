"""What a rank that ends of the loss of another one leaves for its launcher, which else takes it for the cause."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from types import TracebackType

from ..errors import PeerLostError

__all__ = ["leave_last_words", "leave_last_words_of_uncaught_errors"]


def leave_last_words(error: BaseException) -> None:
    """Writes a PeerLostError into the error file that torch's launcher names, as ``record`` of torch would.

    Does nothing with other errors, without such a launcher, or where there are last words already.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path and isinstance(error, PeerLostError):
        extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        words = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            json.dump(words, file)


def leave_last_words_of_uncaught_errors() -> None:
    """Has errors that end this process leave them. Calling it again changes nothing."""
    global _has_hook
    if _has_hook:
        return
    _has_hook = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_last_words(error)
        previous(kind, error, trace)

    sys.excepthook = hook


_has_hook = False
