"""A lane of a stream: a group of its own, and the thread that runs one segment at a time on it.

Each time a thread is woken beside a computation costs that computation its caches and Python's lock; so a segment is
handed over by two queues in C, without the handles that asynchronous calls have.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..collectives.group import Group
from .slices import shorten_slice

__all__ = ["Lane"]


class Lane:
    """Runs what ``start`` is given, in order. ``has_thread`` False: in the caller's own thread, before it returns."""

    def __init__(self, group: Group, has_thread: bool) -> None:
        self.group = group
        self._has_thread = has_thread
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_busy = False

    def start(self, job: Callable[[], None]) -> None:
        """Runs ``job``, which raises nothing, after the one before; waits for the end of that."""
        self.wait()
        if not self._has_thread:
            job()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"pycomm-{self.group.name}", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._jobs.put(job)

    def wait(self) -> None:
        """Blocks until nothing runs."""
        if self._is_busy:
            self._ended.get()
            self._is_busy = False

    def stop(self) -> None:
        """Ends the thread after its last job."""
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        shorten_slice()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # its tensors are not kept until the next one comes
            self._ended.put(None)
