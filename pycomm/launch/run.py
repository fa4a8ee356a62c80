"""Starts the ranks of a job: torch's elastic launcher, with settings that suit one host and exit codes that tell.

All options of ``torchrun`` are understood. What differs: ``-n`` is short for ``--nproc-per-node``; on one host the
ranks meet in a file without a name, and nothing listens (``_loopback.py``); OMP_NUM_THREADS shares out the cores; ranks
that outnumber them share a session (``_session.py``); the exit code is that of the rank that failed first.

[Note: who failed first]
torch's launcher looks at its ranks ten times a second, and knows to a second when one failed. When it looks, a rank
may have ended and others of its loss; then it ends the rest by SIGTERM. So not the first is who ended by that (unless
it was seen first, before any was sent), nor whose last words are a PeerLostError (``collectives/last_words.py`` writes
those down). Of the others a signal counts before an exit code: a program may handle the loss of a rank, and exit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, PeerLostError, TransportError
from ..topology import available_cores
from ._session import one_session

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["parse_arguments", "run_job"]

_LOOPBACK = "127.0.0.1"  # torchrun's default for --master-addr, too


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns torchrun's settings for a command line. Raises ConfigError; exits for --help and unknown options."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    parser.prog = "pycomm run"
    parser.description = "Starts the ranks of a job on this host; the options are those of torchrun."
    parser.add_argument(
        "-n", dest="nproc_per_node", metavar="N", default=argparse.SUPPRESS, help="Short for --nproc-per-node."
    )
    settings = parser.parse_args(list(arguments))
    if not (settings.module or settings.no_python or settings.run_path or Path(settings.training_script).is_file()):
        raise ConfigError(
            f"no such script: {settings.training_script!r} (in {Path.cwd()}); give its path, or `-m package.module`"
        )
    try:
        is_one_host = parse_min_max_nnodes(settings.nnodes)[1] == 1
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--nnodes: expected N or MIN:MAX, got {settings.nnodes!r}") from error
    asks_for_another = settings.rdzv_endpoint or settings.rdzv_backend != "static" or settings.master_addr != _LOOPBACK
    if settings.standalone or (is_one_host and not asks_for_another):
        from ._loopback import BACKEND, register

        register()
        settings.standalone = False
        settings.rdzv_backend, settings.rdzv_endpoint = BACKEND, f"{_LOOPBACK}:{settings.master_port or 0}"
        settings.rdzv_id, settings.local_addr = str(uuid.uuid4()), _LOOPBACK
    return settings


def run_job(arguments: Sequence[str]) -> int:
    """Runs the job of the command line ``arguments`` to its end and returns its exit code.

    That is 0, or the exit code of the rank that failed first, 128 + the signal if one ended it; that of one of those
    that failed where it cannot be told which was the first. Raises ConfigError for settings that cannot be used,
    TransportError if the hosts of the job do not find each other.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import determine_local_world_size, run

    settings = parse_arguments(arguments)
    try:
        local_world_size = determine_local_world_size(settings.nproc_per_node)
    except ValueError as error:
        raise ConfigError(f"-n: expected a number of ranks, cpu, gpu or auto: {error}") from error
    if local_world_size < 1:
        raise ConfigError(f"-n: expected at least 1 rank, got {local_world_size}")
    settings.nproc_per_node = str(local_world_size)
    cores = available_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_world_size)))
    try:
        with contextlib.ExitStack() as stack:
            if settings.log_dir is None:  # torchrun leaves a directory in /tmp behind, with how the ranks failed
                settings.log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-run-"))
            if local_world_size > cores:
                stack.enter_context(one_session())
            run(settings)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        text, code = _describe(error.failures)
        print(f"pycomm run: {text}; the other ranks were ended", file=sys.stderr)
        return code
    except SignalException as error:  # somebody ended the launcher; it has ended the ranks
        return 128 + int(error.sigval)
    except RendezvousError as error:
        raise TransportError(
            f"the {settings.nnodes} hosts of the job did not find each other at {settings.rdzv_endpoint!r}: {error}; "
            f"see whether each of them runs this command with the same --rdzv-endpoint and --rdzv-id"
        ) from error
    return 0


def _describe(failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
    """Returns what is said of ``failures``, by rank in the order in which they were seen, and the job's exit code."""
    seen_first = next(iter(failures))
    causes = [
        rank
        for rank, failure in failures.items()
        if not _has_lost_another(failure) and (rank == seen_first or failure.exitcode != -signal.SIGTERM)
    ]
    causes = [rank for rank in causes if failures[rank].exitcode < 0] or causes
    first = failures[causes[0] if causes else seen_first]
    code = int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)
    if len(causes) == 1:
        how = "failed first, with" if first.exitcode > 0 else "was the first to end, by"
        return f"rank {causes[0]} (pid {first.pid}) {how} {_status(first)}", code
    ends = [f"rank {rank} (pid {failures[rank].pid}) by {_status(failures[rank])}" for rank in causes or failures]
    return f"which rank failed first cannot be told: {', '.join(ends)}", code


def _has_lost_another(failure: ProcessFailure) -> bool:
    message: Any = failure.message  # a dict if there is an error file
    return isinstance(message, dict) and str(message.get("message")).startswith(PeerLostError.__name__)


def _status(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        lost = " as it had lost another rank" if _has_lost_another(failure) else ""
        return f"exit code {failure.exitcode}{lost}"
    try:
        return signal.Signals(-failure.exitcode).name
    except ValueError:
        return f"signal {-failure.exitcode}"
