"""A Python that has torch and pycomm loaded already, for the jobs that tests start by the hundred.

``warm_python()`` is a program to be used in the place of ``sys.executable``: ``[warm_python(), "job.py", "2"]``, with
``-m`` or ``-c``, under mpirun, inside of namespaces; for what it starts it is ``sys.executable``. Importing torch takes
a process more than a second, and is most of what such a job does.

What is started is warm_stub.py: it hands all it was given over to a server, which has imported all this and forks. The
child enters the stub's namespaces and takes over its arguments, environment, folder and files; it runs the program as
the interpreter would, off its real end. The stub stands for it with the launcher: it passes signals on and ends in the
same way; when it is killed, so is the child. Not for what tests how the interpreter starts, or by whom a process was
started: its parent is the server.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PRELOAD", "warm_python"]

PRELOAD = [  # what ranks, or the modules of their functions, import otherwise each for itself
    "torch",
    "torch._dynamo",  # the first optimizer of a process loads it, for seconds
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "numpy",
    "pytest",
    "hypothesis",
    "pycomm.collectives.init",
    "pycomm.collectives.rendezvous",
    "pycomm.collectives.verbs",
    "pycomm.compression",
    "pycomm.engines",
    "pycomm.fault",
    *(f"pycomm.transport.{name}" for name in ("shm", "torch", "mixed")),
    "harness",
]
_HIGH = 1 << 9  # descriptors from here on are nobody's
_PR_SET_PDEATHSIG = 1
_SPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000, "pid": 0x20000000}  # CLONE_NEW*


@cache
def warm_python() -> str:
    """Returns the path of the program. Its server is started by the first call, and ends with this process.

    A rank that is to use it gets the path from the test, or it would have a server of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program = folder / "python"
    stub = Path(__file__).with_name("warm_stub.py")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{stub}" "{folder}/socket" "$@"\n')
    program.chmod(0o700)
    # It ends when nobody can write to its standard input any more.
    server = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    _servers.append(server)
    return str(program)


_servers: list[subprocess.Popen[bytes]] = []  # so that their pipes stay open


# -- the server --------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A program to run, as a stub was asked to: ``files`` are what its descriptors ``numbers`` refer to."""

    stub: socket.socket
    arguments: list[str]
    folder: str
    environ: dict[bytes, bytes]
    numbers: list[int]
    files: list[int]


def serve(folder: Path) -> Request | None:
    """Returns in each child what it is to run; in the server None, at its end."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    programs: dict[int, socket.socket] = {}  # by pid
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(folder / "partial"))
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        (folder / "partial").rename(folder / "socket")  # now it can be connected to
        while True:
            for key, _ in selector.select():
                if key.fd == 0:  # whoever started this is gone
                    for pid in programs:
                        os.kill(pid, signal.SIGKILL)
                    shutil.rmtree(folder)
                    return None
                if key.fileobj is listener:
                    request = receive(listener.accept()[0])
                    if request is None:
                        continue
                    pid = os.fork()
                    if pid == 0:
                        return request
                    for fd in request.files:
                        os.close(fd)
                    programs[pid] = request.stub
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", pid))
                    selector.register(request.stub, selectors.EVENT_READ, ("stub", pid))
                    continue
                what, pid = key.data
                if pid not in programs:  # both in one round
                    continue
                if what == "stub":
                    os.kill(pid, signal.SIGKILL)
                    selector.unregister(programs[pid])
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with programs.pop(pid) as stub:
                    if stub in selector.get_map():
                        selector.unregister(stub)
                        send(stub, code)


def send(stub: socket.socket, number: int) -> None:
    """Tells a stub, which may be gone, a pid or how its program has ended."""
    try:
        stub.sendall(number.to_bytes(8, "big", signed=True))
    except OSError:
        pass


def receive(stub: socket.socket) -> Request | None:
    """Returns what a stub asks for; None if it ended before it had said so."""
    header, files, _, _ = socket.recv_fds(stub, 8, 253, socket.MSG_WAITALL)
    length = int.from_bytes(header, "big")
    body = stub.recv(length, socket.MSG_WAITALL)
    if len(header) < 8 or len(body) < length:
        stub.close()
        return None
    return Request(stub, *marshal.loads(body), files)


# -- the program -------------------------------------------------------------------------------------------------------


def become(request: Request, folder: Path) -> None:
    """Makes this process, a fork of the server in ``folder``, the one that the stub's would have been."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    enter_namespaces(libc, request.stub)
    send(request.stub, os.getpid())
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in request.files]
    os.closerange(3, _HIGH)
    request.stub.detach()
    for number, fd in zip(request.numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environb.clear()
    os.environb.update(request.environ)
    os.chdir(request.folder)
    sys.executable = str(folder / "python")  # of what this program starts in turn


def enter_namespaces(libc: Any, stub: socket.socket) -> None:
    """Returns in a process of the stub's namespaces: another one, if those of processes differ."""
    pid = struct.unpack("3i", stub.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    differ = [name for name in _SPACES if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")]
    if not differ:
        return
    if libc.setns(os.pidfd_open(pid), sum(_SPACES[name] for name in differ)) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {differ}")
    if "pid" in differ and (child := os.fork()) != 0:  # it is a process's children that are in the new one
        os.closerange(0, _HIGH)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def read_environment() -> None:
    """Does once more what Python and torch do by the environment when they are loaded or first used."""
    import numpy as np
    import torch
    import torch.distributed as dist

    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads else len(os.sched_getaffinity(0)))
    dist.set_debug_level_from_env()
    tempfile.tempdir = None
    random.seed()  # forked processes would all have one sequence
    np.random.seed()


def run(arguments: list[str], path: list[str]) -> None:
    """Runs a program as ``python ARGUMENTS`` does; ``path`` is what such a process has in sys.path at first."""
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if arguments[0] == "-u":
        is_unbuffered = bool(arguments.pop(0))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty(), write_through=is_unbuffered)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv, sys.path = arguments[1:], [os.getcwd(), *path]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv, sys.path = ["-c", *arguments[2:]], ["", *path]
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path = arguments, [str(Path(arguments[0]).resolve().parent), *path]
        vars(main)["__file__"] = os.path.abspath(arguments[0])
        exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(main))


if __name__ == "__main__":
    first_path = [each for each in sys.path[1:] if each not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own_folder = Path(sys.argv[1])
    asked_for = serve(own_folder)
    if asked_for is not None:
        become(asked_for, own_folder)
        read_environment()
        run(asked_for.arguments, first_path)
