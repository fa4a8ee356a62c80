"""``python -m worker``: joins the job it was launched in, connects to the conductor, and serves until told to leave."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from typing import Any

from .cases import Case
from .library import Library
from .runner import Runner
from .wire import Channel, connect

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel end this rank when its launcher has ended: the conductor cannot end ranks it has not met yet."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pin_to_core() -> None:
    """Gives this rank of pycomm a core of its own, if there are enough; the MPIs' launchers do this for theirs."""
    from pycomm.topology import detect_launch

    launch, cores = detect_launch(), sorted(os.sched_getaffinity(0))
    if launch.world_size == launch.local_world_size <= len(cores):  # else the local rank may not be known
        os.sched_setaffinity(0, {cores[launch.local_rank]})


def start_library(name: str, transport: str, rendezvous_file: str) -> Library:
    """Imports and starts the library under test."""
    if name == "mpi":
        from .mpi_library import MPILibrary

        return MPILibrary()
    if name == "tcp":
        from .tcp_reference import TcpReference

        return TcpReference(rendezvous_file)
    from .torch_library import GlooLibrary, PycommLibrary

    return GlooLibrary(rendezvous_file) if name == "gloo" else PycommLibrary(transport)


def serve(channel: Channel, runner: Runner) -> None:
    """Carries out commands until the conductor says ``exit`` or goes away."""
    while True:
        try:
            command: dict[str, Any] = channel.receive()
        except EOFError:
            os._exit(0)  # nobody is left to report to; leaving in order could wait for ranks that are gone too
        match command.pop("do"):
            case "prepare":
                answer = runner.prepare(Case(**command))
            case "run":
                answer = runner.run(**command)
            case "release":
                answer = runner.release()
            case _:
                return
        channel.send(answer)


def main() -> None:
    """Parses the arguments that the conductor gave."""
    parser = argparse.ArgumentParser(prog="worker", description=__doc__)
    parser.add_argument("--connect", required=True, metavar="PATH", help="the conductor's Unix socket")
    parser.add_argument("--library", required=True, choices=["pycomm", "gloo", "mpi", "tcp"])
    parser.add_argument("--transport", default="auto", help="pycomm's transport")
    parser.add_argument("--rendezvous-file", default="", help="where the ranks of gloo and tcp meet")
    parser.add_argument("--pin", action="store_true", help="one core for each rank if there are enough")
    options = parser.parse_args()

    die_with_parent()
    channel = connect(options.connect)
    try:
        if options.pin:
            pin_to_core()
        library = start_library(options.library, options.transport, options.rendezvous_file)
        facts = {"version": library.version, "cores": sorted(os.sched_getaffinity(0))}
        channel.send({"rank": library.rank, "world_size": library.world_size, **facts})
        serve(channel, Runner(library))
        library.close()
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send({"error": f"{type(error).__name__}: {error}"})
        sys.stderr.flush()
        os._exit(1)  # the other ranks may be in a collective: do not wait for them


if __name__ == "__main__":
    main()
