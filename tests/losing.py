"""How a rank is lost in the middle of what it does, for tests of what the others do then."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

from harness import run_ranks

HOW = ("killed", "interrupted", "leaves")  # by SIGKILL; by Ctrl-C, wherever it is; with its program done, as it has it
_WITHIN_S = 1.5


def victim_of(seed: int, ranks: int) -> int:
    """Returns the rank that is lost."""
    return random.Random(seed).randrange(ranks)


def run_losing_one(
    ranks: int, seed: int, how: str, bereaved: Callable[..., Any], *args: Any, transport: str, timeout_s: float
) -> list[Any]:
    """Returns what each rank was told of the loss: ``bereaved(rank, *args)``, which loses rank ``victim_of``."""
    victim = victim_of(seed, ranks)
    died = [victim] if how == "killed" else []
    told = run_ranks(ranks, bereaved, *args, transport=transport, casualties=died, timeout_s=timeout_s)
    assert all(each for rank, each in enumerate(told) if rank != victim), "somebody was not told"
    return told


def lose(work: Callable[[], object], seed: int, how: str) -> None:
    """Does ``work``, which has no end, until this rank is lost: killed or interrupted, within ``_WITHIN_S``."""
    has_left = threading.Event()
    delay_s = random.Random(seed).uniform(0.0, _WITHIN_S)

    def interrupt(signum: int, frame: Any) -> None:
        if not has_left.is_set():
            raise KeyboardInterrupt

    def end() -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while not has_left.is_set():  # again: what a destructor raises is lost
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            has_left.wait(0.3)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        threading.Timer(delay_s, end).start()  # which may be over before this returns
        work()
    except KeyboardInterrupt:
        pass
    finally:  # else the thread would keep a process that fails
        has_left.set()
        signal.signal(signal.SIGINT, before)
