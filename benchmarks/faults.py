"""What happens when ranks fail, measured: ``python benchmarks/faults.py``; a part: ``... faults.py deaths --kills 50``.

The ranks are processes forked from one that has torch and pycomm loaded; a driver kills, stops and interrupts them.
Times are of CLOCK_MONOTONIC, which all processes of a host share. Beside pycomm stands gloo, as torch.distributed
offers it, where it can do the thing at all. The seed is printed; --seed repeats a run's choices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from faults_libraries import LIBRARIES, RANKS, Pycomm
from faults_restarts import measure_restarts
from rich.console import Console
from rich.table import Table

import pycomm
from pycomm.ops import native
from pycomm.transport import TRANSPORTS

NUMELS = (1, 1000, 100_000, 4_000_000)
DEATH_TIMEOUT_S = 2.0  # what ends gloo's survivors; its default is half an hour
_CONTEXT = multiprocessing.get_context("fork")


class Row(NamedTuple):
    """One line of the table; ``bar`` is what the project asks for."""

    what: str
    library: str
    result: str
    bar: str


# -- the driver's side -------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """The processes of one trial and the driver's ends of their pipes."""

    processes: list[Any]
    pipes: list[Connection]

    def told(self, but: int = -1) -> list[Any]:
        """Returns what each rank, except ``but``, says next."""
        found = []
        for rank, pipe in enumerate(self.pipes):
            if rank == but:
                continue
            assert pipe.poll(60), f"rank {rank} said nothing for 60 s"
            found.append(pipe.recv())
        return found

    def kill(self, rank: int) -> int:
        """Sends SIGKILL and returns when, in ns."""
        at_ns = time.monotonic_ns()
        self.processes[rank].kill()
        return at_ns


@contextmanager
def ranks_of(body: Callable[..., None], *args: Any) -> Iterator[Ranks]:
    """Starts ``body(rank, folder, pipe, *args)`` on every rank; ends them all in the end."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        pipes = [_CONTEXT.Pipe() for _ in range(RANKS)]
        processes = [
            _CONTEXT.Process(target=_rank_main, args=(body, rank, folder, pipes[rank][1], args), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            yield Ranks(processes, [mine for mine, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()
            for mine, _ in pipes:
                mine.close()


def _rank_main(body: Callable[..., None], rank: int, folder: str, pipe: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    body(rank, folder, pipe, *args)
    os._exit(0)


# -- deaths ------------------------------------------------------------------------------------------------------------


def _lose_one(rank: int, folder: str, pipe: Connection, library: str, numel: int) -> None:
    member = LIBRARIES[library](rank, folder, DEATH_TIMEOUT_S)
    tensor = torch.empty(numel)
    member.all_reduce(tensor)
    pipe.send("ready")
    named = -1
    try:
        while True:
            tensor.fill_(1.0)
            member.all_reduce(tensor)
            assert (tensor == RANKS).all(), "wrong sum"
    except member.errors as error:
        at_ns, named = time.monotonic_ns(), getattr(error, "rank", -1)
    pipe.send((at_ns, named))
    survivors = pipe.recv()
    begin_ns = time.monotonic_ns()
    member.go_on_with(survivors)
    tensor.fill_(1.0)
    member.all_reduce(tensor)
    pipe.send((time.monotonic_ns() - begin_ns, bool((tensor == len(survivors)).all())))
    pipe.recv()  # until everybody has told


def measure_deaths(library: str, kills: int, chance: random.Random) -> list[Row]:
    """Kills one of four at a random moment, ``kills`` times."""
    noticed_ms, again_ms, named_right, sums_right = [], [], 0, 0
    for _ in range(kills):
        victim, numel = chance.randrange(RANKS), chance.choice(NUMELS)
        with ranks_of(_lose_one, library, numel) as ranks:
            ranks.told()
            time.sleep(chance.uniform(0.002, 0.05))
            killed_ns = ranks.kill(victim)
            told = ranks.told(but=victim)
            noticed_ms.append(max(at_ns - killed_ns for at_ns, _ in told) / 1e6)
            named_right += all(named == victim for _, named in told)
            survivors = [rank for rank in range(RANKS) if rank != victim]
            for rank in survivors:
                ranks.pipes[rank].send(survivors)
            told = ranks.told(but=victim)
            again_ms.append(max(spent_ns for spent_ns, _ in told) / 1e6)
            sums_right += all(is_right for _, is_right in told)
    return [
        Row("death to an error on every survivor", library, _spread(noticed_ms), "median 20 ms, worst 200 ms"),
        Row("... that names the dead rank, on every survivor", library, f"{named_right} of {kills}", "all"),
        Row("a new group of the survivors, and an all_reduce", library, _spread(again_ms), "50 ms"),
        Row("... whose sum is right", library, f"{sums_right} of {kills}", "all"),
    ]


# -- all ranks killed --------------------------------------------------------------------------------------------------


def _be_killed(rank: int, folder: str, pipe: Connection) -> None:
    member = Pycomm(rank, folder)
    pycomm.empty(100_000, shared=True).fill_(1.0)
    pipe.send("ready")
    with suppress(pycomm.PeerLostError):  # of one that was killed a moment before
        while True:
            member.all_reduce(torch.ones(100_000))
    signal.pause()


def _names() -> set[str]:
    files = {f"{folder}/{name}" for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder)}
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line}
    return files | {name for name in sockets if "pycomm" in name}


def measure_all_killed(times: int) -> list[Row]:
    """Kills all four at once, ``times`` times; counts the jobs that left a process, a file or a socket."""
    left = 0
    for _ in range(times):
        before = _names()
        with ranks_of(_be_killed) as ranks:
            ranks.told()
            for rank in reversed(range(RANKS)):
                ranks.kill(rank)
            pids = [process.pid for process in ranks.processes]
            for process in ranks.processes:
                process.join()
        new = {name for name in _names() - before if "pycomm" in name or name.startswith("/dev/shm")}
        left += bool(new) or any(os.path.exists(f"/proc/{pid}") for pid in pids)
    return [Row("SIGKILL of all ranks leaves a process, name or socket", "pycomm", f"{left} of {times}", "none")]


# -- Ctrl-C, and waiting -----------------------------------------------------------------------------------------------


def _be_interrupted(rank: int, folder: str, pipe: Connection, library: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    member = LIBRARIES[library](rank, folder)
    tensor = torch.ones(1000)
    member.all_reduce(tensor)
    pipe.send("ready")
    if rank == RANKS - 1:
        pipe.recv()  # never comes to the next
        return
    try:
        member.all_reduce(tensor)
    except KeyboardInterrupt:
        pipe.send(time.monotonic_ns())
    except pycomm.PeerLostError:  # the trial is over, the others are being ended
        return
    pipe.recv()


def measure_interrupts(times: int) -> list[Row]:
    """Sends SIGINT to a rank that waits for another, ``times`` times. gloo does not return, so it is not asked."""
    spent_ms = []
    for _ in range(times):
        with ranks_of(_be_interrupted, "pycomm") as ranks:
            ranks.told()
            time.sleep(0.2)
            sent_ns = time.monotonic_ns()
            os.kill(ranks.processes[0].pid, signal.SIGINT)
            assert ranks.pipes[0].poll(60)
            spent_ms.append((ranks.pipes[0].recv() - sent_ns) / 1e6)
    return [Row("Ctrl-C while blocked, to KeyboardInterrupt", "pycomm", _spread(spent_ms), "200 ms")]


def _wait(rank: int, folder: str, pipe: Connection, library: str) -> None:
    member = LIBRARIES[library](rank, folder)
    tensor = torch.ones(1000)
    member.all_reduce(tensor)
    pipe.send(None)
    pipe.recv()
    before_s = time.process_time()
    member.all_reduce(tensor)
    pipe.send((time.process_time() - before_s, bool((tensor == RANKS**2).all())))
    pipe.recv()


def measure_waiting(library: str) -> list[Row]:
    """Stops one rank (SIGSTOP) for 3 s, in which the others wait for it."""
    with ranks_of(_wait, library) as ranks:
        ranks.told()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        for pipe in ranks.pipes:
            pipe.send("go")
        time.sleep(3.0)
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        told = ranks.told()
    worst_s = max(spent_s for rank, (spent_s, _) in enumerate(told) if rank != 1)
    right = sum(is_right for _, is_right in told)
    return [
        Row("CPU seconds of a rank that waits 3 s", library, f"worst {worst_s:.3f} s", "0.05 s"),
        Row("right results after SIGSTOP for 3 s", library, f"{right} of {RANKS}", "all"),
    ]


# -- disagreement ------------------------------------------------------------------------------------------------------


def _disagree(rank: int, folder: str, pipe: Connection) -> None:
    Pycomm(rank, folder)
    ones = torch.ones(4)
    calls: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: pycomm.all_reduce(ones), lambda: pycomm.all_reduce(ones[:3])),
        (lambda: pycomm.all_reduce(ones), lambda: pycomm.all_reduce(ones.int())),
        (lambda: pycomm.all_reduce(ones), lambda: pycomm.all_reduce(ones, pycomm.ReduceOp.MAX)),
        (lambda: pycomm.all_reduce(ones), lambda: pycomm.barrier()),
        (lambda: pycomm.broadcast(ones, 0), lambda: pycomm.broadcast(ones, 1)),
        (
            lambda: pycomm.all_to_all_single(torch.empty(4), ones, [1] * 4, [1] * 4),
            lambda: pycomm.all_to_all_single(torch.empty(5), ones, [2, 1, 1, 1], [1] * 4),
        ),
        (lambda: pycomm.all_reduce(torch.ones(500_000)), lambda: pycomm.all_reduce(ones)),
    ]
    for usual, other in calls:
        pycomm.barrier()  # so that all of them begin together
        begin_ns = time.monotonic_ns()
        try:
            (other if rank == 2 else usual)()
            pipe.send((0, False))
        except pycomm.CollectiveMismatchError as error:
            pipe.send((time.monotonic_ns() - begin_ns, "rank 0" in str(error) and "rank 2" in str(error)))
    pipe.recv()


KINDS = 7  # calls of _disagree


def measure_disagreements(times: int) -> list[Row]:
    """One of four calls something else: count, dtype, op, verb, root, splits, large against small."""
    spent_ms, shown, asked = [], 0, 0
    for _ in range(times):
        with ranks_of(_disagree) as ranks:
            for _ in range(KINDS):
                told = ranks.told()
                spent_ms.append(max(spent_ns for spent_ns, _ in told) / 1e6)
                shown += sum(bool(is_shown) for _, is_shown in told)
                asked += RANKS
    return [
        Row("ranks disagree, to an error on all of them", "pycomm", _spread(spent_ms), "100 ms"),
        Row("... that shows both sides", "pycomm", f"{shown} of {asked}", "all"),
    ]


HEADER = ("what", "library", "measured", "asked for")


# -- the table ---------------------------------------------------------------------------------------------------------


def _spread(values_ms: list[float]) -> str:
    return f"median {median(values_ms):.1f} ms, worst {max(values_ms):.1f} ms"


def main() -> int:
    """Measures the parts asked for and prints the table."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "deaths": lambda: [
            *measure_deaths("pycomm", options.kills, random.Random(options.seed)),
            *measure_deaths("gloo", max(1, options.kills // 40), random.Random(options.seed)),
        ],
        "all-killed": lambda: measure_all_killed(options.kills // 2),
        "interrupts": lambda: measure_interrupts(20),
        "waiting": lambda: [*measure_waiting("pycomm"), *measure_waiting("gloo")],
        "disagreements": lambda: measure_disagreements(5),
        "restarts": lambda: [Row(*row) for row in measure_restarts(options.restarts)],
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all of them if none is named")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/faults.md has it")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    print(f"seed {options.seed}, {os.cpu_count()} cores, {RANKS} ranks")
    native()
    TRANSPORTS.load("shm")
    for name in pycomm.__all__:  # they load on first use
        getattr(pycomm, name)
    rows = [row for name, measure in parts.items() if not options.parts or name in options.parts for row in measure()]
    if options.markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * 4, *rows)))
        return 0
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
