"""torch's futures of handles, as ``get_future`` gives them.

[Note: errors that reach whoever waits]
``wait`` raises the call's own error. A future is another matter: ``Future.set_exception`` of Python stores the error as
a value, which torch's C++ takes for a result. The future handed out here is the ``then`` of another one: an error that
its callback raises is an error for C++ too, a RuntimeError with the error's name and text.

[Note: callbacks that wait]
A callback of a future may make a call of the same group and wait for it: PowerSGD's hook does. It may therefore not run
on the thread that runs the group's calls. ``Tellers`` has a thread of its own for callbacks, and another one for the
futures that are asked for inside callbacks, and so on: nobody waits for a thread that waits for him.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .work import Work

__all__ = ["Tellers", "future_of"]


class Tellers:
    """The threads that run the callbacks of a group's futures, in order; see [Note: callbacks that wait]."""

    def __init__(self) -> None:
        self._by_depth: dict[int, ThreadPoolExecutor] = {}

    def teller(self) -> Callable[[Callable[[], None]], None]:
        """Returns what is to run the callbacks of a future that this thread asks for: by telling that future."""
        depth = getattr(_thread, "depth", 0)
        if depth not in self._by_depth:
            name = f"pycomm-callbacks-{depth}"
            self._by_depth[depth] = ThreadPoolExecutor(1, name, initializer=_set_depth, initargs=(depth + 1,))
        executor = self._by_depth[depth]

        def run(tell: Callable[[], None]) -> None:
            try:
                executor.submit(tell)
            except RuntimeError:  # the group has been closed; who waits for the future hears all the same
                tell()

        return run

    def close(self) -> None:
        """Ends the threads, once they are idle."""
        for executor in self._by_depth.values():
            executor.shutdown(wait=False)


_thread = threading.local()


def _set_depth(depth: int) -> None:
    _thread.depth = depth


def future_of(works: Sequence[Work], value: Callable[[], Any]) -> torch.futures.Future[Any]:
    """Returns a future of ``value()`` after all of ``works``, which are one group's in the order of the calls.

    Messages move when somebody waits for them: a thread does, for as long as the group's timeout.
    """
    ended: torch.futures.Future[BaseException | None] = torch.futures.Future()

    def end(done: torch.futures.Future[BaseException | None]) -> Any:
        error = done.value()
        if error is not None:
            raise error
        return value()

    future: torch.futures.Future[Any] = ended.then(end)
    if all(work.has_been_seen_to_end() for work in works):
        ended.set_result(None)
    elif any(work.is_message for work in works):
        threading.Thread(target=_wait_and_tell, args=(works, ended), name="pycomm-message", daemon=True).start()
    else:  # a group's calls end in order: the last one's end is that of all
        teller = works[-1].tellers.teller()
        works[-1].future.add_done_callback(lambda _: teller(lambda: ended.set_result(None)))
    return future


def _wait_and_tell(works: Sequence[Work], ended: torch.futures.Future[BaseException | None]) -> None:
    first_error = None
    for work in works:
        try:
            work.result()
        except Exception as error:  # it is kept, for whoever asks the future
            first_error = first_error or error
    ended.set_result(first_error)
