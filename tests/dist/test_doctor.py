"""The board from outside: a hung job is diagnosed from another process, and boards are closed to strangers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pycomm
from harness import is_in_a_call, run_ranks, transport_params, wait_until
from pycomm.collectives.board import boards
from warm_python import warm_python

PROCESSES = [param for param in transport_params() if param.values[0] not in ("local", "mpi")]


def doctor(python: str) -> str:
    command = [python, "-m", "pycomm", "doctor", "--jobs", "--pid", str(os.getpid())]
    environ = {**os.environ, "COLUMNS": "250"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environ).stdout


def late_in_my_function(folder: Path) -> None:
    (folder / "late").touch()
    wait_until((folder / "go").exists)


def hang(rank: int, path: str, python: str) -> str:
    """Rank 2 does not come; rank 0 asks another process why. Then rank 1 is killed, and it asks again."""
    folder = Path(path)
    pids = torch.zeros(3, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    named = pycomm.new_group(group_desc="é[/x]" + "long" * 20)  # more than a board holds, and markup to rich
    if rank == 2:
        late_in_my_function(folder)
    said = ""
    work = pycomm.all_reduce(torch.ones(5000), group=named, async_op=True)  # too long to be started: a thread waits
    if rank == 1:
        wait_until(is_in_a_call)
        (folder / "waits").touch()
    if rank == 0:
        wait_until(lambda: is_in_a_call() and (folder / "waits").exists() and (folder / "late").exists())
        time.sleep(1.2)  # the doctor takes no notice of calls of less than a second
        said = doctor(python)
        os.kill(int(pids[1]), signal.SIGKILL)
        said += doctor(python)
        (folder / "go").touch()
    try:
        work.wait()
    except pycomm.PeerLostError as error:
        return f"{said}\n{error}"
    return said


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_hung_job_is_diagnosed_from_outside_and_after_a_kill(tmp_path: Path, transport: str) -> None:
    said, _, late = run_ranks(3, hang, str(tmp_path), warm_python(), transport=transport, casualties=[1])
    assert "never entered all_reduce #" in said and "late_in_my_function" in said, said
    assert "test_doctor.py" in said and "rank 2 (pid" in said
    assert "is dead; it ended in all_reduce #" in said
    assert "Verdict: rank 1 (pid" in said.splitlines()[-1]
    assert late.splitlines()[-1] == said.splitlines()[-1], "the survivors' verdicts"


def wait_for_a_message_after_a_disagreement(rank: int, path: str) -> str:
    """Each rank in turn waits in vain for a message of the next one, rank 0 at last, while rank 1 is stopped."""
    folder = Path(path)
    pids = torch.zeros(3, dtype=torch.int64)
    pycomm.all_gather_single(pids, torch.tensor([os.getpid()]))
    with pytest.raises(pycomm.CollectiveMismatchError):
        pycomm.all_reduce(torch.ones(4 + rank))
    said = ""
    for waits in (1, 2, 0):
        if rank == waits:
            if rank == 0:
                os.kill(int(pids[1]), signal.SIGSTOP)
            with pytest.raises(pycomm.CollectiveTimeoutError) as caught:
                pycomm.recv(torch.ones(4), (rank + 1) % 3, timeout=0.5)
            os.kill(int(pids[1]), signal.SIGCONT)
            said = str(caught.value)
            (folder / f"{rank} has waited").touch()
        wait_until((folder / f"{waits} has waited").exists)
    return said


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_disagreement_that_was_handled_is_no_later_verdict(tmp_path: Path, transport: str) -> None:
    last, first, second = run_ranks(3, wait_for_a_message_after_a_disagreement, str(tmp_path), transport=transport)
    assert "Verdict" not in first + second
    assert "Verdict: rank 1 (pid" in last and "is stopped" in last, "and not what the others were told before"


def look_by_top(rank: int, path: str, python: str) -> list[str]:
    """Rank 0 waits in a call for rank 1, and looks at both by a pipe: picture below picture."""
    seen: list[str] = []
    if rank == 1:
        wait_until((Path(path) / "seen").exists)
    work = pycomm.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        command = [python, "-m", "pycomm", "top", "--every", "0.3", "--pid", str(os.getpid())]
        environ = {**os.environ, "COLUMNS": "60", "PYTHONFAULTHANDLER": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as top:
            assert top.stdout is not None
            while sum(line.startswith("0 ") for line in seen) < 3:
                seen.append(top.stdout.readline())
            top.send_signal(signal.SIGINT)
            try:
                assert top.wait(timeout=300) == 0
            except subprocess.TimeoutExpired:
                top.send_signal(signal.SIGABRT)  # says where it is
                raise
        (Path(path) / "seen").touch()
    work.wait()
    return seen


def test_top_prints_into_a_pipe_and_counts_a_call_that_is_under_way(tmp_path: Path) -> None:
    seen, _ = run_ranks(2, look_by_top, str(tmp_path), warm_python())
    rows = [line.split() for line in seen if line.startswith("0 ")]
    assert all("100%" in row for row in rows[1:]) and max(len(line.rstrip()) for line in seen[2:]) <= 60, seen


def look_as_nobody(rank: int) -> bool:
    """Whether a process of another user is kept from this rank's board."""
    held = boards()
    assert held is not None and len(held.peers) == 1
    path = f"/proc/{os.getpid()}/fd/{held.own.fd}"
    assert os.readlink(path).startswith("/memfd:pycomm-board") and not os.get_inheritable(held.own.fd)
    script = "import os, sys; os.setgid(65534); os.setuid(65534); open(sys.argv[1], 'rb')"
    result = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    return "PermissionError" in result.stderr or "FileNotFoundError" in result.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_board_has_no_name_and_is_closed_to_other_users() -> None:
    assert run_ranks(2, look_as_nobody) == [True, True]
