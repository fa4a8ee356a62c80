"""Programs (``programs.py``) in which a rank is lost: what is under way ends, and the others go on without it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from programs import Program

import pycomm
from losing import HOW, lose, run_losing_one, victim_of

__all__ = ["HOW", "bereaved", "run"]


def run(
    ranks: int, seed: int, transport: str, how: str, kind: type[Program] = Program, timeout_s: float = 600.0
) -> list[Any]:
    """Runs the program ``seed`` of a ``kind``; returns what each rank was told of the loss."""
    job = (bereaved, seed, transport, how, kind)
    return run_losing_one(ranks, seed, how, *job, transport=transport, timeout_s=timeout_s)


def bereaved(rank: int, seed: int, transport: str, how: str, kind: type[Program]) -> list[str]:
    """One rank's part."""
    ranks = pycomm.world_size()
    victim = victim_of(seed, ranks)
    # Of one of all others nobody could say whether it is the program's or that of those who go on: docs/faults.md.
    program = kind(rank, seed, transport, group_sizes=[size for size in range(1, ranks + 1) if size != ranks - 1])
    if rank == victim:
        _lose(program, random.Random(seed), how)
        return []
    try:
        program.run(1_000_000)
    except (pycomm.PeerLostError, pycomm.CollectiveMismatchError) as error:
        first: Exception = error
    told = [str(first)]
    is_mismatch = isinstance(first, pycomm.CollectiveMismatchError)  # by a call that the lost rank had begun
    assert not is_mismatch or transport != "shm", "there it is looked for first"
    # Else nobody may wait for this rank in a group without the lost one: who makes a group is looked for there.
    makes_group_first = seed % 2 == 0
    if not makes_group_first:
        _end(program, told)
    if is_mismatch or not makes_group_first:  # what it was told was of one that has closed its group so, maybe
        first = _at_the_whole()
    assert isinstance(first, pycomm.PeerLostError) and first.global_rank == victim, (
        f"not of {victim}: {first!r}, {told}"
    )
    survivors = pycomm.new_group([member for member in range(ranks) if member != first.global_rank])
    assert isinstance(survivors, pycomm.Group)
    if makes_group_first:
        _end(program, told)
    kind(rank, seed + 1, transport, survivors).run(30)
    return told


def _at_the_whole() -> Exception:
    """Returns what a call on the group of all ranks is told of the loss."""
    while True:
        try:
            pycomm.barrier()
        except pycomm.CollectiveMismatchError:  # from others, who have not been told
            continue
        except pycomm.TransportError as error:
            return error
        raise AssertionError("nobody is lost")


def _end(program: Program, told: list[str]) -> None:
    """Closes what the program has made; adds what its calls under way are told, or that they are done."""
    program.leave()
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


def _lose(program: Program, dice: random.Random, how: str) -> None:
    """Runs ``program`` until this rank is lost."""
    if how == "leaves":
        program.run(dice.randrange(200))
    else:
        lose(partial(program.run, 1_000_000), program.seed, how)
