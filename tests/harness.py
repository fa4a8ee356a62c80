"""Runs a function on every rank of a world: ``run_ranks(4, fn, transport="shm")``.

Ranks are threads (local) or processes forked from a server that has torch and pycomm loaded (shm, torch, mixed; mpi
too, where mpirun takes them for its own). There is a deadline; a failure shows every rank's traceback, tagged by rank;
at the deadline every rank's stack is dumped; nothing is ended but the processes started here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from mpi_harness import mpirun, outcome_of, run_in_world, run_once
from pycomm.monitor.watch import own_board
from pycomm.transport import TRANSPORTS
from pycomm.transport.local import LocalWorld
from warm_python import PRELOAD

__all__ = [
    "RanksFailed",
    "check_sum",
    "descendants",
    "descriptors",
    "interrupt_once_in_a_call",
    "is_in_a_call",
    "pretend_hosts",
    "proc_files",
    "run_forked",
    "run_ranks",
    "server",
    "transport_params",
    "wait_until",
    "with_small_shm",
]

_DIED = "died without a result"
_GRACE_S = 300.0  # for the other ranks, once one has died or failed, and for all of them to end
_INIT_S = 600.0  # at least, for ranks to come together, however short the deadline of what they do then
_DUMP_S = 60.0
_BEGUN = b"begun"  # what a rank sends first


@cache
def server() -> ForkServerContext:
    """Returns what forks ranks from a process that has loaded all they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:  # which is all that it knows of our sys.path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not end; the message has what each of them did."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "shm",
    timeout_s: float = 600.0,
    casualties: Collection[int] = (),
) -> list[Any]:
    """Returns ``[fn(rank, *args) for each rank]``, each run inside ``pycomm.init``. Raises RanksFailed.

    ``fn`` is a function of a module, its arguments and results can be pickled (except for threads). ``casualties`` are
    ranks whose process is meant to die; their result is None. Under mpirun the processes are those of earlier tests,
    unless there are any. ``timeout_s`` is there for hangs: the time that they have once they have come together.
    """
    if transport == "mpi":
        outcomes = _run_mpi(world_size, fn, args, timeout_s, casualties)
    else:
        runner = _run_threads if transport == "local" else _run_processes
        outcomes = runner(world_size, fn, args, transport, timeout_s)
    for rank in casualties:
        is_ok, text = outcomes[rank]
        outcomes[rank] = (True, None) if not is_ok and text.startswith(_DIED) else (False, f"should have died: {text}")
    failures = [f"[rank {rank}] {text}" for rank, (is_ok, text) in enumerate(outcomes) if not is_ok]
    if failures:
        name = f"{fn.__name__} on {world_size} ranks over {transport}"
        raise RanksFailed(f"{name}: {len(failures)} ranks failed\n" + "\n".join(failures))
    return [result for _, result in outcomes]


def wait_until(is_so: Callable[[], object], timeout_s: float = 500.0) -> None:
    """Returns once ``is_so()`` holds, which another rank, thread or process sees to; raises AssertionError at a hang.

    What a test needs to have happened it waits for by this, never by a sleep that is long enough as a rule: machines
    that other work shares, or whose hypervisor takes the cores away, stop any process for seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.002)


def run_forked(body: Callable[[], object]) -> None:
    """Runs ``body`` in a forked child of this process; an error there is printed, and an AssertionError here."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see what the child printed"


def proc_files(name: str) -> dict[int, str]:
    """Returns ``/proc/PID/name`` of every process of this machine, by pid, without those that end meanwhile.

    Any may, between two lines: other work runs here too. (``Path.glob`` raises ESRCH at those.)
    """
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return found


def descendants(pid: int) -> list[int]:
    """Returns the processes that ``pid`` started, those that they started, and so on: parents before their children."""
    parents = {each: int(stat.rpartition(")")[2].split()[1]) for each, stat in proc_files("stat").items()}
    found = [pid]
    for parent in found:
        found += [each for each, of in parents.items() if of == parent]
    return found[1:]


def descriptors(pid: int | str) -> list[tuple[str, str]]:
    """Returns (path, what it refers to) of each descriptor that a process has open; none of one that has ended."""
    found = []
    with contextlib.suppress(OSError):
        for path in (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append((path, os.readlink(path)))
    return found


def is_in_a_call() -> bool:
    """Whether a collective of this rank is under way, as its board has it; for transports of processes."""
    board = own_board()
    assert board is not None, "transport local has no board"
    return any(group.is_open and group.seq > group.ended for group in board.groups())


def interrupt_once(is_so: Callable[[], object], after_s: float = 0.0) -> None:
    """Sends this process SIGINT, from a thread, so long after something is so. For the main thread to call."""

    def interrupt() -> None:
        wait_until(is_so)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def interrupt_once_in_a_call() -> None:
    """Sends this process SIGINT, from a thread, as soon as a collective is under way. For the main thread to call."""
    interrupt_once(is_in_a_call)


def with_small_shm(command: list[str]) -> list[str]:
    """Returns the command that runs ``command`` with a /dev/shm of 256 KiB; skips the test where that cannot be had."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs a mount namespace, which this system does not give")
    script = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$@"'
    return ["unshare", "-Urm", "sh", "-c", script, "sh", *command]


def transport_params() -> list[Any]:
    """Returns the registered transports to parametrize over; one whose software is optional and missing is skipped."""
    return [pytest.param(name, marks=_marks(name)) for name in TRANSPORTS.names() if name != "nccl"]


def _marks(name: str) -> list[Any]:
    if name != "mpi":
        return []  # the native core is not optional here: without it these tests fail and say how to build it
    missing = "mpi4py" if importlib.util.find_spec("mpi4py") is None else "mpirun" if mpirun() is None else None
    skip = (
        [] if missing is None else [pytest.mark.skip(reason=f"{missing} is not installed: pip install 'pycomm[mpich]'")]
    )
    return [pytest.mark.mpi, *skip]


# -- threads -----------------------------------------------------------------------------------------------------------


def _run_threads(world_size: int, fn: Any, args: Any, transport: str, timeout_s: float) -> list[tuple[bool, Any]]:
    world = LocalWorld(world_size, timeout_s)
    outcomes: list[tuple[bool, Any] | None] = [None] * world_size

    def body(rank: int) -> None:
        try:
            with pycomm.init(world.transports[rank]):
                outcomes[rank] = (True, fn(rank, *args))
        except BaseException as error:
            outcomes[rank] = (False, traceback.format_exc())
            world.transports[rank].fail(f"it raised {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in threads):
        with tempfile.TemporaryFile("w+") as dump:
            faulthandler.dump_traceback(dump, all_threads=True)
            dump.seek(0)
            stacks = dump.read()
        for rank in range(world_size):
            world.transports[rank].fail("the harness's deadline passed")
        return [
            outcome or (False, f"still running after {timeout_s} s; stacks of all threads:\n{stacks}")
            for outcome in outcomes
        ]
    return [outcome or (False, "ended without an outcome") for outcome in outcomes]


# -- processes ---------------------------------------------------------------------------------------------------------


def _run_processes(world_size: int, fn: Any, args: Any, transport: str, timeout_s: float) -> list[tuple[bool, Any]]:
    context = server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        dumps = [Path(folder) / f"stack{rank}" for rank in range(world_size)]
        processes = [
            context.Process(
                target=_process_main,
                args=(rank, world_size, transport, store.port, timeout_s, payload, pipes[rank][1], str(dumps[rank])),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()  # so that a rank's death is the end of its pipe
            outcomes, silent = _collect([receiver for receiver, _ in pipes], timeout_s)
            for rank, process in enumerate(processes):
                # One that dies, or is done, closes its pipe a moment before it has ended.
                process.join(0.0 if rank in silent else _GRACE_S)
            stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for rank in stuck:
                stack = _stack_of(processes[rank].pid, dumps[rank])
                after = "" if outcomes[rank] is None else " (its function had ended)"
                outcomes[rank] = (False, f"still running at the deadline of {timeout_s} s{after}; stack:\n{stack}")
            for rank, process in enumerate(processes):
                if outcomes[rank] is None:
                    outcomes[rank] = (False, f"{_DIED}, exit code {process.exitcode}")
        finally:  # also if the test's own timeout, or Ctrl-C, ends this
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
                process.close()
    return outcomes


def _collect(receivers: list[Connection], timeout_s: float) -> tuple[list[Any], set[int]]:
    """Returns each rank's outcome, None for those that died or did not end in time; and which ranks the latter are."""
    outcomes: list[Any] = [None] * len(receivers)
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    deadline = time.monotonic() + max(timeout_s, _INIT_S)
    begun, has_failed = 0, False
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), left_s):
            try:
                message = receiver.recv_bytes()
            except EOFError:  # it died: None
                message = b""
            if message == _BEGUN:
                begun += 1
                if begun == len(receivers) and not has_failed:
                    deadline = time.monotonic() + timeout_s
                continue
            rank = waiting.pop(receiver)
            outcomes[rank] = pickle.loads(message) if message else None
            if outcomes[rank] is None or not outcomes[rank][0]:
                has_failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
    for receiver in receivers:
        receiver.close()
    return outcomes, set(waiting.values())


def _process_main(
    rank: int,
    world_size: int,
    transport: str,
    port: int,
    timeout_s: float,
    payload: bytes,
    sender: Connection,
    dump: str,
) -> None:
    """The body of one rank's process."""
    dump_file = open(dump, "w")  # noqa: SIM115  faulthandler needs it for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=dump_file, all_threads=True)
    torch.set_num_threads(1)  # the ranks share the cores

    if transport == "mixed":
        pretend_hosts(rank)

    def join_and_run() -> Any:
        fn, args = pickle.loads(payload)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with pycomm.init(transport, rank=rank, world_size=world_size, store=store, timeout=max(timeout_s, _INIT_S)):
            sender.send_bytes(_BEGUN)
            # One may die at once, and another one may not be out of init by then, which would fail there.
            if store.add("begun", 1) == world_size:
                store.set("all have begun", "")
            store.wait(["all have begun"], timedelta(seconds=_INIT_S))
            return fn(rank, *args)

    sender.send_bytes(outcome_of(join_and_run))


def pretend_hosts(rank: int) -> None:
    """Lets ranks 0 and 1 believe that they share a host, 2 and 3 another one, and so on; the last may be alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for module in ("agreement", "exchange"):
        vars(importlib.import_module(f"pycomm.collectives.{module}"))["host_id"] = lambda: f"host{rank // 2}"


def _stack_of(pid: int | None, dump: Path) -> str:
    """Returns the stacks of the threads of a rank, which writes them when it is asked by a signal."""
    seen = ""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while not seen.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.1)
            seen = dump.read_text() if dump.exists() else ""
    return seen or "no stack"


def check_sum(group: Any = None, numel: int = 5) -> None:
    """Holds an all_reduce of ``group`` to the right sum, whose terms differ between ranks and elements."""
    ranks = pycomm.world_size(group)
    tensor = torch.arange(numel) % 1000 + pycomm.rank(group)
    pycomm.all_reduce(tensor, group=group)
    expected = ranks * (torch.arange(numel) % 1000) + ranks * (ranks - 1) // 2
    assert torch.equal(tensor, expected)


# -- mpirun ------------------------------------------------------------------------------------------------------------


def _run_mpi(
    world_size: int, fn: Any, args: Any, timeout_s: float, casualties: Collection[int]
) -> list[tuple[bool, Any]]:
    if not casualties:
        return run_in_world(world_size, fn, args, timeout_s)
    # MPICH's launcher lets the other ranks live when one has *exited*; when one was killed it ends them all.
    outcomes = run_once(world_size, fn, args, timeout_s, ["-disable-auto-cleanup"])
    return [(is_ok, each if is_ok else each.replace("no result", _DIED)) for is_ok, each in outcomes]
