"""The mpirun side of harness.py: worlds of ranks that stay, since starting one costs seconds of every rank.

A world waits, blocked, for the next function; the harness writes a line into each rank's pipe, a rank a line into the
common one once its outcome is written. A world in which anything went wrong is ended and not used again.

What mpirun starts is a warm Python (warm_python.py), which has torch and pycomm loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from warm_python import warm_python

Outcome = tuple[bool, Any]  # a result, or the text of what went wrong

_GRACE_S = 300.0  # for the other ranks, once one has died or failed, and for all of them to end
_START_S = 600.0
_worlds: dict[int, MpiWorld] = {}


def mpirun() -> str | None:
    """Returns the mpirun beside this Python, else that of PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def run_in_world(world_size: int, fn: Any, args: Any, timeout_s: float) -> list[Outcome]:
    """Runs ``fn`` on every rank of a world that stays, started if there is none."""
    world = _worlds.pop(world_size, None) or MpiWorld(world_size, stays=True)
    outcomes = world.run(fn, args, timeout_s)
    if all(is_ok for is_ok, _ in outcomes):
        _worlds[world_size] = world
    else:
        world.end()
    return outcomes


def run_once(world_size: int, fn: Any, args: Any, timeout_s: float, options: Collection[str]) -> list[Outcome]:
    """The same in a world of its own, whose ranks end by themselves."""
    world = MpiWorld(world_size, options=options)
    try:
        return world.run(fn, args, timeout_s)
    finally:
        world.end()


@atexit.register
def _end_all() -> None:
    while _worlds:
        _worlds.popitem()[1].end()


class MpiWorld:
    """An mpirun whose ranks run one function after the other (``stays``), or one only."""

    def __init__(self, world_size: int, stays: bool = False, options: Collection[str] = ()) -> None:
        command = mpirun()
        assert command is not None, "mpirun is not installed: pip install 'pycomm[mpich]'"
        self._size, self._stays, self._number, self._is_well = world_size, stays, 0, True
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self._folder = Path(self._temporary.name)
        for name in ["done", *(f"calls{rank}" for rank in range(world_size))]:
            os.mkfifo(self._folder / name)
        # Open for both, so that neither opening nor writing waits for a rank that may never come.
        self._done = os.open(self._folder / "done", os.O_RDWR)
        self._calls = [os.open(self._folder / f"calls{rank}", os.O_RDWR) for rank in range(world_size)]
        ranks = [warm_python(), __file__, str(self._folder)]
        with (self._folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [command, *options, "-n", str(world_size), *ranks],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._ended = os.pidfd_open(self._process.pid)

    def run(self, fn: Any, args: Any, timeout_s: float) -> list[Outcome]:
        """Returns every rank's outcome. Does not raise."""
        self._number += 1
        printed_before = (self._folder / "output").stat().st_size
        settings = {name: value for name, value in os.environ.items() if name.startswith("PYCOMM_")}
        call = (sys.path, fn.__module__, timeout_s, settings, self._stays, pickle.dumps((fn, args)))
        (self._folder / f"call{self._number}").write_bytes(pickle.dumps(call))
        for pipe in self._calls:
            os.write(pipe, f"{self._number}\n".encode())
        self._await_ranks()
        outcomes = self._collect(timeout_s)
        self._is_well = all(outcomes)
        if not self._is_well and self._process.poll() is None:
            self._show_stacks()
        printed = (self._folder / "output").read_bytes()[printed_before:].decode(errors="replace")
        text = f"no result, mpirun returned {self._process.poll()}; output:\n{printed}"
        return [outcome or (False, text) for outcome in outcomes]

    def _collect(self, timeout_s: float) -> list[Outcome | None]:
        """Waits until every rank has an outcome, mpirun has ended or the time is over."""
        outcomes: list[Outcome | None] = [None] * self._size
        deadline = time.monotonic() + timeout_s
        told = 0
        while told < self._size and (left_s := deadline - time.monotonic()) > 0:
            ready = wait([self._done, self._ended], left_s)
            if self._done in ready:
                told += os.read(self._done, 1 << 12).count(b"\n")
                self._read_outcomes(outcomes)
                if any(outcome and not outcome[0] for outcome in outcomes):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            elif ready:
                break
        self._read_outcomes(outcomes)
        if not self._stays:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(deadline - time.monotonic(), 0.1))
        return outcomes

    def _await_ranks(self) -> None:
        """Returns once every rank runs: the deadline is for what it does, and starting takes many seconds at times."""
        deadline = time.monotonic() + _START_S
        while len(self._pids()) < self._size and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _show_stacks(self) -> None:
        """Lets every rank print its stacks."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        output, length = self._folder / "output", -1
        while output.stat().st_size != length:
            length = output.stat().st_size
            time.sleep(1.0)

    def _pids(self) -> list[int]:
        return [int(text) for path in self._folder.glob("pid*") if (text := path.read_text())]

    def _read_outcomes(self, outcomes: list[Outcome | None]) -> None:
        for rank in range(self._size):
            path = self._folder / f"outcome{self._number}-{rank}"
            if outcomes[rank] is None and path.exists():
                outcomes[rank] = pickle.loads(path.read_bytes())

    def end(self) -> None:
        """Ends mpirun and all ranks, if they have not ended by themselves."""
        for pipe in self._calls:
            os.close(pipe)  # for the ranks: no call comes any more
        if self._is_well:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the session made above: mpirun and its proxies
            self._process.wait()
            for pid in self._pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.close(self._done)
        os.close(self._ended)
        self._temporary.cleanup()


# -- a rank ------------------------------------------------------------------------------------------------------------


def outcome_of(body: Callable[[], Any]) -> bytes:
    """Returns, pickled, (True, result of body) or (False, traceback)."""
    try:
        return pickle.dumps((True, body()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _rank_main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)  # the ranks share the cores
    rank = next(int(os.environ[key]) for key in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if key in os.environ)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with open(folder / f"calls{rank}") as calls, open(folder / "done", "w") as done:
        for line in calls:
            number = int(line)
            call = pickle.loads((folder / f"call{number}").read_bytes())
            partial = folder / f"partial{rank}"
            partial.write_bytes(outcome_of(lambda: _run_call(rank, *call)))  # noqa: B023  called at once
            partial.rename(folder / f"outcome{number}-{rank}")
            print(rank, file=done, flush=True)
            if not call[4]:
                return


def _run_call(
    rank: int, path: list[str], module: str, timeout_s: float, settings: dict[str, str], _: bool, payload: bytes
) -> Any:
    import pycomm

    sys.path[:] = path
    for name in [name for name in os.environ if name.startswith("PYCOMM_")]:
        del os.environ[name]
    os.environ.update(settings)
    importlib.import_module(module)
    fn, args = pickle.loads(payload)
    with pycomm.init("mpi", timeout=timeout_s):
        return fn(rank, *args)


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
