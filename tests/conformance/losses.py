"""Programs (``programs.py``) in which a rank is lost: what is under way ends, and the others go on without it."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

from programs import Program

import pycomm
from harness import run_ranks

HOW = ("killed", "interrupted", "leaves")  # by SIGKILL; by Ctrl-C, wherever it is; with its program done, as it has it


def run(
    ranks: int, seed: int, transport: str, how: str, kind: type[Program] = Program, timeout_s: float = 600.0
) -> list[Any]:
    """Runs the program ``seed`` of a ``kind``; returns what each rank was told of the loss."""
    died = [_victim_of(seed, ranks)] if how == "killed" else []
    job = (bereaved, seed, transport, how, kind)
    told = run_ranks(ranks, *job, transport=transport, casualties=died, timeout_s=timeout_s)
    assert all(each for rank, each in enumerate(told) if rank != _victim_of(seed, ranks)), "somebody was not told"
    return told


def _victim_of(seed: int, ranks: int) -> int:
    return random.Random(seed).randrange(ranks)


def bereaved(rank: int, seed: int, transport: str, how: str, kind: type[Program]) -> list[str]:
    """One rank's part."""
    ranks = pycomm.world_size()
    victim = _victim_of(seed, ranks)
    # Of one of all others nobody could say whether it is the program's or that of those who go on: docs/faults.md.
    program = kind(rank, seed, transport, group_sizes=[size for size in range(1, ranks + 1) if size != ranks - 1])
    if rank == victim:
        _lose(program, random.Random(seed), how)
        return []
    told: list[str] = []
    try:
        program.run(1_000_000)
    except pycomm.PeerLostError as error:
        told.append(str(error))
    except pycomm.CollectiveMismatchError as error:  # by a call that the lost rank had begun and the others come to
        assert transport != "shm", "there it is looked for first"
        told.append(str(error))
    program.leave()  # so that nobody waits for this rank in a group without the lost one
    for work, check, what in program.under_way:
        try:
            work.wait()
            check()
            told.append(f"done: {what}")
        except (pycomm.TransportError, pycomm.CollectiveMismatchError) as error:  # or: this rank has closed the group
            assert not isinstance(error, pycomm.CollectiveTimeoutError), what
            told.append(str(error))
        except Exception as error:
            error.add_note(f"waiting for {what}, after {told}")
            raise
    survivors = pycomm.new_group([member for member in range(ranks) if member != victim])
    assert isinstance(survivors, pycomm.Group)
    kind(rank, seed + 1, transport, survivors).run(30)
    return told


def _lose(program: Program, dice: random.Random, how: str) -> None:
    """Runs ``program`` until this rank is lost."""
    if how == "leaves":
        program.run(dice.randrange(200))
        return
    delay_s, has_left = dice.uniform(0.0, 1.5), threading.Event()

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
        program.run(1_000_000)
    except KeyboardInterrupt:
        pass
    finally:  # else the thread would keep a process that fails
        has_left.set()
        signal.signal(signal.SIGINT, before)
