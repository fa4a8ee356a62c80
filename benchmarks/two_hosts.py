"""all_reduce between two hosts: how near to what the cable can carry, and beside gloo and the MPIs.

The hosts are namespaces of this machine (pycomm/launch/two_hosts.py), joined by a cable of a chosen rate; two ranks run
in each. Every library has four ranks of its own; they take turns, so that all figures are of one run. As root:

    python benchmarks/two_hosts.py --rate 100mbit,1gbit                    the table
    python benchmarks/two_hosts.py --rate 1gbit -- python job.py           any job: ranks as torchrun starts them

The bound is bytes / rate, for the fewest bytes that can cross: each host has to learn the other's sum, so S bytes go
each way for a buffer of S. TCP's and Ethernet's headers alone make 1.046 of it (1448 bytes of every 1514). What this
machine carries in this minute the column tcp says: plain streams of the same bytes, with nothing added up.

A round in which the hypervisor gave more than 2 % of the cores' time to other machines is measured again, at most five
times as often as there are rounds: then even the queue that plays the cable stood still.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from pycomm.cli.bench.facts import StolenTime, machine_facts
from pycomm.cli.bench.job import JobFailedError, SpawnedJob
from pycomm.cli.bench.measure import Load, take_round
from pycomm.cli.bench.peers import MAKE_PEERS, PEERS, Variant, missing_peers
from pycomm.cli.bench.worker.cases import Case
from pycomm.errors import ConfigError, PycommError
from pycomm.launch.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from pycomm.sizes import format_bytes, parse_bytes

RANKS = (2, 2)
ROOT = Path(__file__).resolve().parents[1]
MOST_CALLS = 20
MOST_STOLEN = 0.02  # of the cores' time in a round that counts
MOST_REPEATS = 5  # for each round
LIBRARIES = ("gloo", "mpich", "openmpi", "tcp")
COMPARED = ("gloo", "tcp")  # with these pycomm is, round by round
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}

# What reaches the second host, and keeps the MPIs from taking the two hosts for one; the rest is their own choice.
MPI_FLAGS = {
    "mpich": (
        "-launcher-exec",
        "{agent}",
        "-localhost",
        ADDRESSES[0],
        "-iface",
        INTERFACE,
        "-hosts",
        "{hosts}",
        "-ppn",
        "2",
    ),
    "openmpi": (
        *("--prtemca", "plm_ssh_agent", "{agent}", "--host", "{slots}", "--map-by", "ppr:2:node", "--bind-to", "none"),
        *("--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
        *("--mca", "btl_tcp_if_include", INTERFACE, "--mca", "coll_han_priority", "100"),
    ),
}
MPI_SETTINGS = {
    "mpich": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE},
    "openmpi": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
}
AGENT = """#!/bin/sh
# As ssh: options, a host, then a command.
while case $1 in -*) true ;; *) false ;; esac; do shift; done
case $1 in {first}) pid={pids[0]} ;; *) pid={pids[1]} ;; esac
shift
exec nsenter --target $pid --net --uts --ipc --mount --pid=/proc/$pid/ns/pid_for_children --wd=. -- sh -c "$*"
"""


class HostsJob(SpawnedJob):
    """Four ranks of one library, two on each host; a context manager."""

    def start_ranks(self, hosts: TwoHosts, library: str) -> None:
        """Starts ranks as torchrun would."""
        command = [sys.executable, "-m", "pycomm.cli.bench.worker", "--connect", self.socket_path]
        command += ["--library", library, "--rendezvous-file", self.path("store")]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        self._processes += hosts.start_job(command, RANKS, environ, stdout=self._log, stderr=self._log)

    def start_mpi(self, hosts: TwoHosts, name: str, peers_dir: Path) -> None:
        """Starts ranks by the mpirun of a peer, which gets to the hosts by an agent in place of ssh."""
        agent = Path(self.path("agent"))
        agent.write_text(AGENT.format(first=ADDRESSES[0], pids=hosts.pids))
        agent.chmod(0o700)
        command, environ = PEERS[name].command(Variant(name=""), sum(RANKS), peers_dir)
        places = {"agent": agent, "hosts": ",".join(ADDRESSES), "slots": ",".join(f"{each}:2" for each in ADDRESSES)}
        flags = [flag.format(**places) for flag in MPI_FLAGS[name]]
        command[3:3] = flags  # mpirun -n 4 FLAGS python -m worker
        command += ["--connect", self.socket_path, "--library", "mpi"]
        # The launcher stays among this machine's processes, where the agent finds the hosts'.
        command = ["nsenter", "--target", str(hosts.pids[0]), "--net", "--uts", "--", *command]
        self.start(command, environ | MPI_SETTINGS[name])

    def __enter__(self) -> HostsJob:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.kill() if error else self.close()


def measure_rate(rate: str, options: argparse.Namespace, console: Console) -> int:
    """Prints the table of one rate; returns how many elements of pycomm's results were wrong."""
    bits_per_s = bits_of(rate)
    with TwoHosts(rate, options.congestion) as hosts, ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start_jobs(hosts, options, console)]
        table = Table(
            title=f"all_reduce of float32, 2 x 2 ranks, {rate}/s, TCP {options.congestion}; ms a call (x bound)",
            title_justify="left",
        )
        compared = [index for index, job in enumerate(jobs) if job.name in COMPARED]
        ratios = [f"pycomm / {jobs[index].name}" for index in compared]
        for column in ("bytes", "bound", *(job.name for job in jobs), *ratios):
            table.add_column(column, justify="right")
        wrong = 0
        for nbytes in options.sizes:
            bound_s = nbytes * 8 / bits_per_s
            rounds, its_wrong, repeats = measure(jobs, nbytes, bound_s, options)
            wrong += its_wrong
            if repeats:
                console.print(f"{format_bytes(nbytes)}: {repeats} rounds did not count, other machines had the cores")
            cells = [f"{median(times) / 1e3:.1f} ({median(times) / 1e6 / bound_s:.2f})" for times in rounds]
            cells += [f"{median(map(truediv, rounds[0], rounds[index])):.2f}" for index in compared]
            table.add_row(format_bytes(nbytes), f"{bound_s * 1e3:.1f}", *cells)
        console.print(table)
        for job in jobs:
            console.print(f"{job.name}: {job.version}", highlight=False)
    return wrong


def start_jobs(hosts: TwoHosts, options: argparse.Namespace, console: Console) -> Iterator[HostsJob]:
    """Yields pycomm's job, then those of the peers that can be had."""
    for name in ("pycomm", *options.against):
        if name in missing_peers([name], options.peers_dir):
            console.print(f"{name} is not in {options.peers_dir} and is left out; build it with: {MAKE_PEERS}")
            continue
        job = HostsJob(name, sum(RANKS))
        try:
            job.start_mpi(hosts, name, options.peers_dir) if name in PEERS else job.start_ranks(hosts, name)
            job.wait_until_ready()
        except BaseException as error:
            job.kill()
            if name in PEERS and isinstance(error, JobFailedError):
                console.print(f"{error}\n{name} is left out.", highlight=False)
                continue
            raise
        yield job


def measure(
    jobs: Sequence[HostsJob], nbytes: int, bound_s: float, options: argparse.Namespace
) -> tuple[list[list[float]], int, int]:
    """Returns each job's times by round, in us, pycomm's wrong elements, and the rounds that did not count."""
    case = Case(
        verb="all_reduce", numel=nbytes // 4, dtype="float32", itemsize=4, op="SUM", place="in", buffers="private"
    )
    load = Load(num_chunks=max(2, min(MOST_CALLS, round(options.turn_s / bound_s))), chunk_calls=1, samples=0)
    rounds: list[list[float]] = [[] for _ in jobs]
    wrong = repeats = 0
    for job in jobs:
        job.prepare(case)
    while (round_index := len(rounds[0])) < options.rounds:
        stolen = StolenTime()
        for turn in range(len(jobs)):
            index = (turn + round_index) % len(jobs)  # another one goes first in each round
            answers = jobs[index].run(round_index=round_index, **load._asdict())
            rounds[index].append(take_round(load, answers)[0])
            wrong += sum(answer["wrong"] for answer in answers) if index == 0 else 0
        if stolen.share() > MOST_STOLEN and repeats < MOST_REPEATS * options.rounds:
            repeats += 1
            for times in rounds:
                times.pop()
    for job in jobs:
        job.release()
    return rounds, wrong, repeats


def bits_of(rate: str) -> float:
    """Returns bits a second of a rate as tc writes it: 100mbit."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ConfigError(f"--rate {rate}: expected a number and one of {', '.join(UNITS)}, such as 100mbit")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; ``command`` is what follows ``--``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit,1gbit", help="of the cable, or several (default: %(default)s)")
    parser.add_argument("--congestion", default="cubic", help="control of TCP: cubic, bbr, reno (default: %(default)s)")
    parser.add_argument("--sizes", default="1MiB,16MiB,64MiB", help="of the buffer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over rounds (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=0.7, help="time for a turn, two calls at least (%(default)s)")
    parser.add_argument("--against", default=",".join(LIBRARIES), help="peers beside pycomm (default: %(default)s)")
    parser.add_argument("--peers-dir", type=Path, default=Path(".peers"), help="their environments (%(default)s)")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    options.command = argv[split + 1 :]
    options.sizes = [parse_bytes(size) for size in options.sizes.split(",")]
    options.against = [name for name in options.against.split(",") if name]
    unknown = set(options.against) - set(LIBRARIES)
    if unknown:
        raise ConfigError(f"--against: unknown {', '.join(sorted(unknown))}; known: {', '.join(LIBRARIES)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Measures, or runs a command; returns its exit code, 1 if a result was wrong."""
    options = parse(argv)
    rates = options.rate.split(",")
    for rate in rates:
        bits_of(rate)
    if options.command:
        with TwoHosts(rates[0], options.congestion) as hosts:
            return hosts.run_job(options.command, RANKS)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(machine_facts())
    return 1 if sum(measure_rate(rate, options, console) for rate in rates) else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except PycommError as error:
        raise SystemExit(f"two_hosts: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
