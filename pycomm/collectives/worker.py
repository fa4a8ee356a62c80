"""The thread of a group that runs its asynchronous calls, in the order in which they were made."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from .futures import Tellers

__all__ = ["Worker"]

_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class Worker:
    """One thread, started at the first job. It holds its queue alone, so that the group can be collected; then it ends,
    as it does after ``stop``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        # A thread may make a call while another one, or a signal handler in the middle of it, closes the group.
        self._submitting = threading.RLock()
        self._refuses = False
        self.tellers = Tellers()  # run callbacks that make calls of the group, as this thread cannot

    @property
    def is_free(self) -> bool:
        """Whether every job has been waited for by ``wait``."""
        return self._last is None

    @property
    def is_idle(self) -> bool:
        """Whether every job is done, so that ``wait`` would not block."""
        return self._last is None or self._last.done()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs on the worker's own thread: it may not wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, job: Callable[[], None], done: Future[Any]) -> bool:
        """Runs ``job``, which completes ``done``, after those before it. Returns False if it is refused."""
        with self._submitting:
            if self._refuses:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None).atexit = False  # handlers of the exit may still make calls
            self._last = done
            self._jobs.put(job)
        return True

    def refuse(self) -> None:
        """Takes no job any more: those that there are can be waited for."""
        with self._submitting:
            self._refuses = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until every job is done; returns False if ``timeout_s`` ran out before."""
        if self._last is not None:
            if not wait([self._last], timeout_s).done:
                return False
            self._last = None
        return True

    def stop(self) -> None:
        """Ends the thread after its last job, and those of callbacks."""
        self._jobs.put(None)
        self.tellers.close()


def _work_off(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors are not kept until the next one comes
