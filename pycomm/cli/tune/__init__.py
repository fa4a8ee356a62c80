"""Measures which algorithm is best for each size on this machine, and stores the table that `auto` goes by."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from ...errors import ConfigError
from .._arguments import check_output, check_transport, positive, positive_int

__all__ = ["main"]

EPILOG = """\
examples:
  pycomm tune -n 4                          four ranks on this host over shared memory
  pycomm tune -n 4 --transport mpi          over MPI; starts the ranks by mpirun
  torchrun ... -m pycomm tune               inside a launcher: these ranks are tuned, on all of their hosts
  pycomm tune --show                        prints the table in force; runs nothing

An algorithm is timed only after its result has been checked. Every host stores the same rules in its own cache folder
(PYCOMM_CACHE_DIR). PYCOMM_ALGORITHMS holds rules that are asked before them, in the same grammar.
"""

_VERBS = "all_reduce,reduce_scatter_single,all_gather_single,broadcast,reduce"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycomm tune", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-n", dest="ranks", type=positive_int, metavar="N", help="ranks to start on this host (default: 2)")
    add("--transport", default="auto", help="pycomm's transport (default: %(default)s)")
    add("--verbs", default=_VERBS, metavar="LIST", help="collectives to tune (default: %(default)s)")
    add("-b", "--min-bytes", default="4B", metavar="SIZE", help="smallest message (default: %(default)s)")
    add("-e", "--max-bytes", default="16MiB", metavar="SIZE", help="largest message (default: %(default)s)")
    add("-f", "--step-factor", type=positive, default=8, metavar="F", help="from size to size (default: %(default)s)")
    add("--rounds", type=positive_int, default=5, help="times are medians over rounds (default: %(default)s)")
    add(
        "--round-ms",
        type=positive,
        default=8,
        metavar="MS",
        help="time for each algorithm's turn (default: %(default)s)",
    )
    add(
        "--near",
        type=positive_int,
        default=4,
        metavar="N",
        help="algorithms to time, of those predicted best (default: 4)",
    )
    add("--dry-run", action="store_true", help="print what would be stored, and store nothing")
    add("--show", action="store_true", help="print the table in force and where each rule comes from, and exit")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 if the ranks agreed on a table."""
    options = _parser().parse_args(argv)
    if options.show:
        _show()
        return 0
    from ...topology import detect_launch
    from ..bench.sizes import sweep_of

    verbs = [verb.strip() for verb in options.verbs.split(",")]
    unknown = [verb for verb in verbs if verb not in _VERBS.split(",")]
    if unknown:
        raise ConfigError(f"--verbs {options.verbs}: {unknown[0]!r} cannot be tuned; expected some of {_VERBS}")
    sizes = sweep_of(options)
    check_transport(options.transport)
    launch = detect_launch()
    if launch.launcher != "none" and options.ranks not in (None, launch.world_size):
        raise ConfigError(f"-n {options.ranks}: the launcher has started {launch.world_size} ranks; leave -n out.")
    _check_folder(options.dry_run)
    if launch.launcher == "none":
        return _start(options.ranks or 2, options.transport, list(argv))
    return _tune_inside(options, verbs, sizes)


def _check_folder(is_dry_run: bool) -> None:
    """Makes the folder that the table goes to; a table there that cannot be read is set aside, as it stops ranks.

    Raises ConfigError if the folder cannot be made, before anything is measured.
    """
    from ...algorithms import tuned

    folder = tuned.folder()
    try:
        for path in tuned.set_damaged_aside():
            print(f"# the table that was there cannot be read; it is {path} from now on", flush=True)
        if not is_dry_run:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the table cannot be stored in {folder}: {error.strerror}; set PYCOMM_CACHE_DIR to a folder that you may "
            "write, or use --dry-run"
        ) from error
    if not is_dry_run:
        check_output("PYCOMM_CACHE_DIR:", tuned.table_path())


def _show() -> None:
    from ...algorithms.selection import load_table
    from ...algorithms.tables import show_rules
    from ...algorithms.tuned import table_path

    path = table_path()
    print(f"# tuned rules: {path}{'' if path.exists() else ' (not there)'}")
    print(show_rules(load_table().rules, has_sources=True), end="")


def _start(ranks: int, transport: str, argv: list[str]) -> int:
    """Starts the ranks, which run this command too."""
    if transport == "mpi":
        from ..bench.session import own_mpirun

        return subprocess.call([own_mpirun(), "-n", str(ranks), sys.executable, "-m", "pycomm", "tune", *argv])
    from ...launch.run import run_job

    return run_job(["-n", str(ranks), "-m", "pycomm", "tune", *argv])


def _tune_inside(options: argparse.Namespace, verbs: list[str], sizes: list[int]) -> int:
    import pycomm

    from ...algorithms import tuned
    from ...algorithms.tables import show_rules
    from .fit import error_of
    from .job import Effort, as_dicts, tune

    with pycomm.init(options.transport) as group:
        is_first = group.rank == 0

        def note(text: str) -> None:
            if is_first:
                print(f"# {text}", flush=True)

        result = tune(group, verbs, sizes, Effort(options.rounds, options.round_ms, options.near), note)
        topology = group.engine.selector.topology
        large = [each for each in result.measured if each.nbytes >= 1 << 20 and each.algorithm != "native"]
        if is_first:
            print(show_rules(result.rules), end="")
            if large:
                errors = error_of(result.links, large, topology, group.transport.segment_bytes)
                print(f"# the model, 1 MiB and up, each size by the others: median error {median(errors):.0%}")
        is_first_here = topology.local_rank_of(group.rank) == 0
        if is_first_here and not options.dry_run:
            path = tuned.save(result.place, result.rules, result.links, as_dicts(result.measured))
            print(f"# stored in {path}", flush=True)
        pycomm.barrier()
    return 0
