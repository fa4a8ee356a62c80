"""Ranks that share cores are started in one session, each in a process group of its own.

torch's launcher gives every rank a session, so that Ctrl-C reaches the launcher alone, which ends the ranks in order.
Linux shares out a core among sessions first (autogroup, sched(7)), and sched_yield passes it on within one. So a rank
that waits for another one of its core, and yields to it, gets the core back until its session's turn is over. (Eight
ranks on two cores, all in one session instead of each in one: all_reduce of 1 to 16 MiB takes 0.75 to 0.87 of the time,
and nine of ten yields less are made.) A process group is out of Ctrl-C's reach just as well, and is what torch's
launcher ends.

A group in the background may not read from the terminal. A rank that tries is told so (EIO); without SIGTTIN ignored it
would stop.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

__all__ = ["one_session"]


@contextlib.contextmanager
def one_session() -> Iterator[None]:
    """Makes torch's launcher start its ranks in this process's session, from the main thread.

    It has no setting for this, so the name by which it starts processes means another function meanwhile. A torch
    without that name starts them as it does: that is slower, and nothing else.
    """
    starter = _starter_of_torch()
    popen = getattr(starter, "Popen", None)
    if popen is None:
        yield
        return
    reads_terminal = signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # inherited by the ranks
    starter.Popen = _start
    try:
        yield
    finally:
        starter.Popen = popen
        signal.signal(signal.SIGTTIN, reads_terminal)


def _starter_of_torch() -> Any:
    """Returns the module that starts the processes of torch's launcher, None if it is not where it was."""
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    except ImportError:
        return None
    return subprocess_handler


def _start(*args: Any, start_new_session: bool = False, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(*args, process_group=0 if start_new_session else None, **options)
