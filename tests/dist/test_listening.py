"""What listens while a job runs: nothing beyond loopback, unless a launcher was asked for it or is not ours."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launchers import JOBS, LAUNCHER_VARIABLES, MPIRUN, needs_mpi

from harness import descendants, descriptors
from pycomm.launch.ports import free_port

PYCOMM_RUN = [sys.executable, "-m", "pycomm", "run", "-n", "2"]
NOBODY = 65534
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}  # as the kernel writes it


def listening(pid: int) -> dict[tuple[str, str], set[int]]:
    """Returns the sockets at which a process tree listens, as (address, name), with the processes that hold them."""
    at_inode = {}
    for name in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if fields[3] == "0A":
                at_inode[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    found: dict[tuple[str, str], set[int]] = {}
    for each in (pid, *descendants(pid)):
        for _, name in descriptors(each):
            if name in at_inode:
                found.setdefault((at_inode[name], name), set()).add(each)
    return found


@contextlib.contextmanager
def running(launcher: list[str], transport: str, folder: Path, *, factor: int = 1, **environ: str) -> Iterator[int]:
    """A job of two ranks that make groups and reduce numbers of their own meanwhile; it must end well."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    command = [*launcher, str(JOBS / "wait.py"), transport, str(folder), str(factor)]
    process = subprocess.Popen(
        command, env=clean | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 600
        while not all((folder / f"ready{rank}").exists() for rank in range(2)):
            assert process.poll() is None and time.monotonic() < deadline, "the job did not start"
            time.sleep(0.02)
        yield process.pid
        (folder / "go").touch()
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
    finally:
        process.terminate()
        process.communicate()


def test_pycomm_run_listens_nowhere(tmp_path: Path) -> None:
    with running([*PYCOMM_RUN, "--standalone", "--max-restarts=3"], "auto", tmp_path) as pid:
        found = listening(pid)
    assert not found


def test_gloo_listens_on_loopback_alone(tmp_path: Path) -> None:
    with running(PYCOMM_RUN, "torch", tmp_path) as pid:
        found = listening(pid)
    assert found, "gloo's sockets must have been seen, else this looks in the wrong place"
    assert {address for address, _ in found} <= LOOPBACK


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_store_and_it_listens_nowhere(tmp_path: Path) -> None:
    with running(PYCOMM_RUN, "shm", tmp_path) as pid:
        assert not listening(pid)
        (store,) = (path for path, name in descriptors(pid) if name.startswith("/memfd:pycomm-store"))
        child = os.fork()
        if child == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                os.open(store, os.O_RDWR)
            except PermissionError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torchrun_itself_listens_everywhere_and_its_ranks_do_not(tmp_path: Path) -> None:
    """docs/security.md says so; when torch changes that, this fails and the page can promise more."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    with running(launcher, "shm", tmp_path) as pid:
        found = listening(pid)
    beyond = {process for (address, _), processes in found.items() if address not in LOOPBACK for process in processes}
    assert beyond == {pid}, "the agent's own store, and nothing of pycomm's"


@needs_mpi
@pytest.mark.mpi
def test_under_mpirun_what_is_ours_listens_on_loopback_alone(tmp_path: Path) -> None:
    """MASTER_ADDR keeps MPI out of the ranks; where it is in them, it listens on all interfaces. See the same page."""
    launcher = [str(MPIRUN), "-n", "2", sys.executable]
    with running(launcher, "shm", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())) as pid:
        ranks = {int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)}
        found = listening(pid)
    # The proxy's sockets are in its children too.
    ours = {address for (address, _), processes in found.items() if processes <= ranks}
    assert ours and ours <= LOOPBACK
