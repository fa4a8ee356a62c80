"""How long a rank that joins the others waits for them, and what ends that earlier."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from copy import copy
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from ..errors import CollectiveTimeoutError, PycommError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Look", "Patience"]

Look = Callable[[], None]  # raises what has made it vain to wait any longer
T = TypeVar("T")

_SLICE_S = 0.05  # of a wait, between two looks
_ASK_STORE_S = 0.005
_LONGEST_SLICE_S = 3600.0  # what everything that waits can count
_SHORTEST_SLICE_S = 1e-3  # torch's stores take 0 for "for ever"


class Patience:
    """A deadline for all the waits of one joining, and a look around between two slices of each.

    Used by one thread.
    """

    def __init__(self, timeout_s: float, look: Look | None = None) -> None:
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._looks = () if look is None else (look,)

    def looking(self, look: Look) -> Patience:
        """Returns one with the same deadline that looks around by ``look``, too."""
        other = copy(self)
        other._looks = (*self._looks, look)
        return other

    def left_s(self) -> float:
        """Returns how long there is to wait yet; more than 0 even where the deadline has passed."""
        return min(max(self.deadline - time.monotonic(), _SHORTEST_SLICE_S), _LONGEST_SLICE_S)

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def slice_s(self) -> float:
        """Looks around, and returns how long to wait before the next time. Raises what ``look`` raises."""
        if not self._looks:
            return self.left_s()
        self._look()
        return min(self.left_s(), _SLICE_S)

    def meet(self, store: Store, name: str, rank: int, world_size: int, *, word: str, to: str) -> list[str]:
        """Leaves ``word`` in ``store`` and returns the keys of all ranks' words once they are there.

        Raises CollectiveTimeoutError, which says what they were ``to`` do, if one does not come or the store is gone.
        """
        keys = [f"{name}{member}" for member in range(world_size)]
        store.set(keys[rank], word)
        try:
            self.wait(store, keys)
        except PycommError:  # somebody is lost
            raise
        except RuntimeError as error:  # torch's
            raise CollectiveTimeoutError(
                f"init on rank {rank} of {world_size}: the others did not {to} within {self.timeout_s:.3g} s; see "
                f"their own errors ({str(error).partition(chr(10))[0]})"
            ) from error
        return keys

    def wait(self, store: Store, keys: Sequence[str]) -> None:
        """Returns once all ``keys`` are in ``store``; raises what the store does at the deadline, or if it is gone."""
        while self._looks and not self.is_over():
            self._look()
            if store.check(list(keys)):
                return
            time.sleep(_ASK_STORE_S)  # torch logs two lines for each wait that runs out
        store.wait(list(keys), timedelta(seconds=self.left_s()))

    def run(self, joining: Callable[[], T]) -> T:
        """Returns what ``joining()`` does, which blocks where nobody can look around: in a thread, if there is a look.

        If that ends the wait the thread stays behind, until ``joining`` gives up by itself.
        """
        if not self._looks:
            return joining()
        outcome: Future[T] = Future()

        def settle() -> None:
            try:
                outcome.set_result(joining())
            except BaseException as error:
                outcome.set_exception(error)

        Thread(target=settle, name="pycomm joins", daemon=True).start()
        while not wait([outcome], self.slice_s()).done:
            pass
        return outcome.result()

    def _look(self) -> None:
        for look in self._looks:
            look()
