"""Every algorithm of one collective in turns, in one job: ``python benchmarks/algorithms.py -n 4 --transport mpi``.

Columns are the algorithms; `auto` is the verb as a user calls it, and over MPI `MPI_Allreduce` is the MPI's own, called
as an mpi4py user would. After each size: what `auto` needs of the time of the best single algorithm, and `ring` of that
of MPI_Allreduce, each two alone in many short turns; a ratio is the median over rounds of the ratio in one round. At
the end the error of the link model that `pycomm tune` fitted, against these times, which it has not seen; sizes that
tune has timed too are left out. With ``--fit`` the model is fitted in this job, to every second size from 1 MiB on, and
its error is that on the others: so a machine whose speed changes from minute to minute does not count as an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

import pycomm
from pycomm.algorithms import tuned
from pycomm.algorithms.cost import LinkModel
from pycomm.cli.bench.session import own_mpirun
from pycomm.cli.bench.sizes import sweep_of
from pycomm.cli.tune.fit import Measured, error_of, fit, probe
from pycomm.cli.tune.measure import time_in_turns
from pycomm.collectives.context import resolve
from pycomm.launch.run import run_job
from pycomm.sizes import format_bytes
from pycomm.topology import detect_launch

Call = Callable[[], None]

PAIR_TURN_MS, PAIR_S = 2.0, 0.6  # of `auto` beside the best: as many rounds as fit the seconds,
PAIR_ROUNDS = 12, 60  # within these; even, so that each is first in as many


def main() -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("-b", "--min-bytes", default="4B")
    parser.add_argument("-e", "--max-bytes", default="64MiB")
    parser.add_argument("-f", "--step-factor", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=10)
    parser.add_argument("--fit", action="store_true", help="fit the model here, to every second size")
    parser.add_argument("--only", default="", help="algorithms, instead of all")
    options = parser.parse_args()
    if detect_launch().launcher != "none":
        torch.set_num_threads(1)
        return run(options)
    if options.transport == "mpi":
        return subprocess.call([own_mpirun(), "-n", str(options.n), sys.executable, *sys.argv])
    return run_job(["-n", str(options.n), *sys.argv])


def run(options: argparse.Namespace) -> int:
    """One rank: all sizes."""
    with pycomm.init(options.transport):
        group = resolve(None)
        show = print if group.rank == 0 else (lambda *_, **__: None)
        names = options.only.split(",") if options.only else group.engine.selector.candidates("all_reduce")
        show(f"all_reduce of float32, {group.world_size} ranks over {group.transport.name}, median us a call")
        errors: dict[int, list[float]] = {}
        measured: list[Measured] = []
        for nbytes in sweep_of(options):
            tensor = torch.zeros(nbytes // 4)
            calls: dict[str, Call] = {"auto": partial(pycomm.all_reduce, tensor)}
            if group.transport.supports("all_reduce", torch.float32, pycomm.ReduceOp.SUM):
                calls["native"] = partial(pycomm.all_reduce, tensor, algorithm="native")
            calls |= {name: partial(pycomm.all_reduce, tensor, algorithm=name) for name in names}
            if group.transport.name == "mpi":
                calls["MPI_Allreduce"] = mpi_call(tensor)
            times = time_in_turns(group, calls, options.rounds, options.round_ms)
            show(f"{format_bytes(nbytes):>8}: {cells(times)} | {', '.join(ratios(group, calls, times))}", flush=True)
            if nbytes >= 1 << 20:
                measured += [Measured("all_reduce", nbytes, name, median(times[name])) for name in names]
        for nbytes, found in held_out_errors(group, measured) if options.fit else tuned_errors(group, measured):
            errors.setdefault(nbytes, []).append(found)
        if errors:
            new, sizes = [each for found in errors.values() for each in found], ", ".join(map(format_bytes, errors))
            show(
                f"the model on sizes it was not fitted to, {sizes}: median error {median(new):.0%} of {len(new)} times"
            )
    return 0


def mpi_call(tensor: torch.Tensor) -> Call:
    """Returns the MPI's own all_reduce."""
    from mpi4py import MPI

    return partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, [tensor.numpy(), MPI.FLOAT])


def cells(times: dict[str, list[float]]) -> str:
    """Returns the medians, in us."""
    return ", ".join(f"{name} {median(each) * 1e6:.1f}" for name, each in times.items())


def ratios(group: pycomm.Group, calls: dict[str, Call], times: dict[str, list[float]]) -> list[str]:
    """Returns what is said of one size: `auto` beside the best single algorithm, and `ring` beside the MPI's own."""
    singles = [name for name in times if name not in ("auto", "MPI_Allreduce")]
    pairs = [("auto", min(singles, key=lambda name: median(times[name])))]
    if "MPI_Allreduce" in times and "ring" in times:
        pairs.append(("ring", "MPI_Allreduce"))
    said = []
    for pair in pairs:
        round_s = sum(max(median(times[name]), PAIR_TURN_MS / 1e3) for name in pair)
        rounds = min(max(int(PAIR_S / round_s) // 2 * 2, PAIR_ROUNDS[0]), PAIR_ROUNDS[1])
        first, second = time_in_turns(group, {name: calls[name] for name in pair}, rounds, PAIR_TURN_MS).values()
        said.append(f"{'/'.join(pair)} {median(a / b for a, b in zip(first, second, strict=True)):.2f}")
    return said


def tuned_errors(group: pycomm.Group, measured: list[Measured]) -> list[tuple[int, float]]:
    """Returns the bytes and |predicted - measured| / measured, by what `pycomm tune` stored, of sizes it did not time.

    Nothing if such groups were not tuned here.
    """
    topology = group.engine.selector.topology
    stored = tuned.read_place((group.transport.name, group.world_size, len(topology.hosts)))
    if stored is None:
        return []
    known = {row["nbytes"] for row in stored[1] if row["verb"] == "all_reduce"}
    return errors_of(group, stored[0], [each for each in measured if each.nbytes not in known])


def held_out_errors(group: pycomm.Group, measured: list[Measured]) -> list[tuple[int, float]]:
    """Returns the same by a model fitted to the first, third, ... size, of the second, fourth, ..."""
    sizes = sorted({each.nbytes for each in measured})
    shown = [each for each in measured if each.nbytes in sizes[::2]]
    model = fit(probe(group), shown, group.engine.selector.topology, group.transport.segment_bytes)
    return errors_of(group, model, [each for each in measured if each.nbytes in sizes[1::2]])


def errors_of(group: pycomm.Group, model: LinkModel, measured: list[Measured]) -> list[tuple[int, float]]:
    """Returns the bytes and the error of each."""
    errors = error_of(model, measured, group.engine.selector.topology, group.transport.segment_bytes)
    return [(each.nbytes, error) for each, error in zip(measured, errors, strict=True)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
