"""What a rank that ends of the loss of another one leaves for its launcher, which else takes it for the cause.

It also ends after the lost one, for a moment: a launcher that sees it first ends all others, and never learns how the
lost one, which is still being taken apart, would have ended. A launcher that sees the lost one does not wait for this.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from types import TracebackType

from ..errors import PeerLostError

__all__ = ["leave_last_words", "leave_last_words_of_uncaught_errors"]

_GIVES_WAY_S = 2.0  # to a process that has torch loaded, on a busy machine, and a launcher that looks each 0.1 s


def leave_last_words(error: BaseException) -> None:
    """Writes a PeerLostError into the error file that torch's launcher names, as ``record`` of torch would.

    Does nothing with other errors, without such a launcher, or where there are last words already.
    """
    global _gives_way
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path and isinstance(error, PeerLostError):
        extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
        words = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            json.dump(words, file)
        _gives_way = True


def _give_way() -> None:
    if _gives_way:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # what the launcher ends flushes nothing
        time.sleep(_GIVES_WAY_S)


def leave_last_words_of_uncaught_errors() -> None:
    """Has errors that end this process leave them. Calling it again changes nothing."""
    global _has_hook
    if _has_hook:
        return
    _has_hook = True
    atexit.register(_give_way)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_last_words(error)
        previous(kind, error, trace)

    sys.excepthook = hook


_has_hook = _gives_way = False
