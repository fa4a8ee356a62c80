"""Measures a collective: time, bandwidth and exactness over message sizes, and the ratio to other libraries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .._arguments import PICTURES, check_output, check_transport, positive, positive_int

if TYPE_CHECKING:
    from .job import Job
    from .report import Report
    from .session import Settings

__all__ = ["main", "parse"]

EPILOG = """\
examples:
  pycomm bench all_reduce                                   two ranks, 4 B to 64 MiB
  pycomm bench all_reduce -n 2,4 --against gloo,openmpi     beside other libraries, in turns, with ratios
  pycomm bench all_reduce --against ../before/              beside another version, built in place there
  mpirun -n 4 python -m pycomm bench all_reduce             inside a launcher: these ranks are measured
  pycomm bench --make-peers                                 builds the peers' environments

private buffers: calls back to back, 2 to 16 buffers in turn (64 MiB a rank or more for messages of 4 MiB and up).
shared buffers: in the segment that the ranks share (pycomm.empty(..., shared=True)), the input written anew before each
call, the time of the call alone; peers do the same with buffers of their own.
sendrecv: every rank to the next one at once. send: one message at a time, from rank to rank; of two, half a round trip.
"""


def _parser() -> argparse.ArgumentParser:
    from .worker.cases import OPS, VERBS

    parser = argparse.ArgumentParser(
        prog="pycomm bench", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=list(VERBS), help=", ".join(VERBS), metavar="VERB")
    add(
        "-n", dest="world_sizes", type=_world_sizes, metavar="N[,N...]", help="ranks to start on this host (default: 2)"
    )
    add("-b", "--min-bytes", default="4B", metavar="SIZE", help="smallest message (default: %(default)s)")
    add("-e", "--max-bytes", default="64MiB", metavar="SIZE", help="largest message (default: %(default)s)")
    add("-f", "--step-factor", type=positive, default=4, metavar="F", help="from size to size (default: %(default)s)")
    add("-d", "--dtype", default="float32", help="torch's name of the element type (default: %(default)s)")
    add("-o", "--op", default="sum", choices=[op.lower() for op in OPS], help="reduction (default: %(default)s)")
    places = "in place, out of place (default: both; with --against: the usual one)"
    add("--place", choices=["in", "out", "both"], help=places)
    add("--buffers", choices=["private", "shared", "both"], default="private", help="see below (default: %(default)s)")
    add("--async", dest="is_async", action="store_true", help="calls are started, and then waited for")
    add("--transport", default="auto", help="pycomm's transport (default: %(default)s)")
    add("--rounds", type=positive_int, default=5, help="figures are medians over rounds (default: %(default)s)")
    add(
        "--round-ms",
        type=positive,
        default=20,
        metavar="MS",
        help="time for each library's turn (default: %(default)s)",
    )
    add("--no-pin", action="store_true", help="do not give each rank of pycomm a core of its own, if there are enough")
    add("--against", default="", metavar="LIST", help="peers: gloo,openmpi,mpich,impi; a path: another pycomm")
    add("--peers-dir", type=Path, default=Path(".peers"), help="the peers' environments (default: %(default)s)")
    add("--make-peers", action="store_true", help="build the peers' environments from PyPI and exit")
    add("--json", type=Path, metavar="FILE", help="write JSON lines: the machine's facts, then one result a line")
    add("--plot", type=Path, metavar="FILE", help="draw time and ratio over size (.png, .svg, .pdf)")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings | None]:
    """Parses and checks the command line; no settings means that there is nothing to measure. Raises ConfigError."""
    from ...types import dtype_of_name
    from .peers import peer_names
    from .session import Settings
    from .sizes import sweep_of
    from .worker.cases import VERBS

    parser = _parser()
    options = parser.parse_args(argv)
    if options.make_peers:
        return options, None
    if options.verb is None:
        parser.error("name a collective, for example: pycomm bench all_reduce")
    dtype = dtype_of_name(options.dtype)
    if dtype is None or dtype.family in ("bool", "complex", "float8"):
        raise ConfigError(f"--dtype {options.dtype}: expected one of torch's float or integer types, such as bfloat16.")
    check_transport(options.transport)
    check_output("--json", options.json)
    check_output("--plot", options.plot, PICTURES)
    against = peer_names(options.against)
    verb = VERBS[options.verb]
    places = verb.places[:1] if options.place is None and against else verb.places
    if options.place in ("in", "out"):
        places = (options.place,)
        if options.place not in verb.places:
            place = "in place" if verb.places == ("in",) else "out of place"
            raise ConfigError(f"--place {options.place}: {options.verb} is only done {place}.")
    if options.is_async and not verb.has_async:
        raise ConfigError(f"--async: {options.verb} is made of messages that are started anyway; leave it out.")
    settings = Settings(
        verb=options.verb,
        sizes=tuple(sweep_of(options)),
        dtype=dtype.name,
        itemsize=dtype.itemsize,
        op=options.op.upper() if verb.reduces else "SUM",
        places=places,
        buffers=("private", "shared") if options.buffers == "both" else (options.buffers,),
        rounds=options.rounds,
        round_ms=options.round_ms,
        against=against,
        peers_dir=options.peers_dir,
        transport=options.transport,
        is_pinned=not options.no_pin,
        is_async=options.is_async,
    )
    return options, settings


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if any element of pycomm's results was wrong."""
    options, settings = parse(argv)
    if settings is None:
        from .peers import make_peers

        make_peers(options.peers_dir)
        return 0
    if options.plot is not None:
        from .plot import require_matplotlib

        require_matplotlib()
    from ...topology import detect_launch

    is_inside = detect_launch().launcher != "none"
    try:
        return _measure_inside(options, settings) if is_inside else _measure(options, settings)
    except KeyboardInterrupt:
        print("interrupted; the jobs were ended", file=sys.stderr)
        return 130


def _measure(options: argparse.Namespace, settings: Settings) -> int:
    """Starts the jobs and drives them from this process."""
    from .._interrupt import INTERRUPT
    from .facts import machine_facts
    from .report import Report
    from .session import start_jobs

    INTERRUPT.listen()
    with closing(Report(options.json)) as report:
        report.facts(machine_facts())
        try:
            for world_size in options.world_sizes or [2]:
                with start_jobs(settings, world_size, report.note) as jobs:
                    _show(report, jobs, settings, world_size)
        finally:
            _draw(report, options.plot)
        return 1 if report.num_wrong else 0


def _measure_inside(options: argparse.Namespace, settings: Settings) -> int:
    """This process is one rank of a launcher's: all ranks walk through the same cases, rank 0 shows them."""
    from .facts import machine_facts
    from .job import InsideJob
    from .report import Report
    from .worker.__main__ import pin_to_core, start_library
    from .worker.runner import Runner

    if settings.against:
        raise ConfigError("--against starts jobs of its own: run `pycomm bench` without a launcher, and give it -n.")
    facts = machine_facts()  # of all cores, so before this rank is given one
    if settings.is_pinned:
        pin_to_core()
    job = InsideJob(Runner(start_library("pycomm", settings.transport, "")))
    if options.world_sizes not in (None, [job.world_size]):
        asked = ",".join(map(str, options.world_sizes))
        raise ConfigError(f"-n {asked}: the launcher has started {job.world_size} ranks; leave -n out.")
    with closing(Report(options.json, is_silent=job.rank != 0)) as report:
        report.facts(facts)
        _show(report, [job], settings, job.world_size)
        if job.rank == 0:
            _draw(report, options.plot)
        job.close()
        return 1 if report.num_wrong else 0


def _show(report: Report, jobs: list[Job], settings: Settings, world_size: int) -> None:
    from .session import run_cases

    versions = {job.name.partition(":")[0]: job.version for job in jobs}
    report.facts({"world_size": world_size, **versions})
    for buffers in settings.buffers:
        how = "back to back" if buffers == "private" else "input freshly written before each call"
        how += ", started and waited for" if settings.is_async else ""
        title = f"{settings.verb}, {world_size} ranks, {buffers} buffers, {how}"
        rows = run_cases(jobs, settings, world_size, buffers, report.note)
        report.table(title, rows, settings.places, settings.against)


def _world_sizes(text: str) -> list[int]:
    """Returns what ``2,4,8`` means, as a type of argparse."""
    return [positive_int(part) for part in text.split(",")]


def _draw(report: Report, path: Path | None) -> None:
    if path is not None and report.cells:
        from .plot import plot

        plot(report.cells, path)
        report.console.print(f"drawn: {path}")
