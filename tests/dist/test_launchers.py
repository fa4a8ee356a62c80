"""Real jobs under each launcher: the ranks find each other, reduce, and the job's end is told by its exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import descendants, wait_until
from pycomm.launch.ports import free_port
from warm_python import warm_python

JOBS = Path(__file__).parent / "jobs"
BIN = Path(sys.executable).parent
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_", "OMP_")
MPIRUN = str(BIN / "mpirun") if (BIN / "mpirun").exists() else shutil.which("mpirun")
HAS_MPI = MPIRUN is not None and importlib.util.find_spec("mpi4py") is not None
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="mpirun or mpi4py is not installed: pip install 'pycomm[mpich]'")


def pycomm_run(ranks: int) -> list[str]:
    """A launcher and ranks that need not import torch first; what tests how they start has Python's own."""
    return [warm_python(), "-m", "pycomm", "run", "-n", str(ranks)]


def start(command: list[str], timeout_s: float = 900, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` with no launcher's variables but ``environ``. What hangs tells where: the stack of each rank."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    clean["PYTHONFAULTHANDLER"] = "1"
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=clean | environ, text=True, **pipes) as process:
        try:
            printed = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            found = [f"still running after {timeout_s} s: {command}", *map(end_and_describe, descendants(process.pid))]
            try:
                printed = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                printed = process.communicate()
            raise AssertionError("\n".join([*found, *printed])) from None
    return subprocess.CompletedProcess(command, process.returncode, *printed)


def end_and_describe(pid: int) -> str:
    """Returns what a process is and waits for. Ends it by SIGABRT, at which Python prints the stack of each thread,
    unless it has children, whose words it may pass on.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        told = f"pid {pid}: {command[-120:]}; in {Path(f'/proc/{pid}/wchan').read_text()}"
        if not descendants(pid):
            os.kill(pid, signal.SIGABRT)
    except OSError:
        told = f"pid {pid}: has ended"
    return told


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Returns what the ranks of jobs/reduce.py printed, by rank."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    decoder, text, found = json.JSONDecoder(), done.stdout, []
    while (begin := text.find("{")) >= 0:  # lines of several ranks may run together
        report, end = decoder.raw_decode(text[begin:])
        found.append(report)
        text = text[begin + end :]
    return sorted(found, key=lambda report: int(report["rank"]))


def check(found: list[dict[str, Any]], world_size: int, transports: list[str]) -> None:
    """Every rank is there and has the right sum of every transport, in float32 and bfloat16."""
    assert [report["rank"] for report in found] == list(range(world_size))
    total = world_size * (world_size + 1) / 2
    for report in found:
        assert (report["world_size"], report["local_rank"]) == (world_size, report["rank"])
        expected = [[name, world_size, total, total] for name in transports for _ in range(2)]
        assert report["sums"] == expected


@needs_mpi
@pytest.mark.mpi
def test_mpi_between_hosts() -> None:
    """mpirun's ranks, on two hosts as they believe: shared memory inside, MPI between."""
    done = start([str(MPIRUN), "-n", "4", warm_python(), str(JOBS / "mixed_mpi.py")])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    expected = [f"rank {rank}: mixed/shm/mpi {'-' if rank % 2 else 'mpi'}" for rank in range(4)]
    found = re.findall(r"rank \d: \S+ (?:mpi|-)", done.stdout)  # lines of several ranks may run together
    assert sorted(found) == expected, done.stdout


def test_plain_python_is_a_world_of_one() -> None:
    done = start([sys.executable, str(JOBS / "reduce.py"), "auto", "torch", "auto"])
    check(reports(done), 1, ["shm", "torch", "shm"])


def test_pycomm_run(tmp_path: Path) -> None:
    """Two ranks; init, finalize and init again, on other transports. No file is left behind."""
    done = start(
        [str(BIN / "pycomm"), "run", "-n", "2", str(JOBS / "reduce.py"), "auto", "torch", "torch", "shm"],
        PYCOMM_LOG="info",
        TMPDIR=str(tmp_path),
    )
    found = reports(done)
    check(found, 2, ["shm", "torch", "torch", "shm"])
    assert list(tmp_path.iterdir()) == []
    from pycomm.topology import available_cores

    assert [report["threads"] for report in found] == [str(max(1, available_cores() // 2))] * 2
    assert "launcher torchrun: rank 1 of 2" in done.stderr
    assert "rank 1 of 2 meets the others at the store of `pycomm run`" in done.stderr


def test_pycomm_run_of_a_module_with_three_ranks_beside_torch_distributed() -> None:
    path = os.pathsep.join([str(JOBS.parent), os.environ.get("PYTHONPATH", "")])
    command = [*pycomm_run(3), "-m", "jobs.torch_groups"]
    done = start(command, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 3


def test_ranks_that_outnumber_the_cores_share_a_session() -> None:
    """On a terminal, as users start them: a rank in the background that reads from it is told so, and does not stop."""
    from pycomm.topology import available_cores

    world_size = available_cores() + 1
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "pycomm", "run", "-n", str(world_size), str(JOBS / "terminal.py")]
    takes = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ends: dict[str, Any] = {"stdin": its_end, "stdout": its_end, "stderr": its_end}
    with subprocess.Popen(
        [sys.executable, "-c", takes, *command], start_new_session=True, env=environ, **ends
    ) as launcher:
        os.close(its_end)
        printed = b""
        with contextlib.suppress(OSError):  # of a terminal that nobody has any more
            while select.select([terminal], [], [], 60)[0] and (read := os.read(terminal, 4096)):
                printed += read
        os.close(terminal)  # which ends what may still be there
    assert launcher.returncode == 0, printed.decode()
    found = re.findall(r"pid (\d+) group (\d+) session (\d+): ([^.]*)\.", printed.decode())
    assert len(found) == world_size, printed.decode()
    assert {(group == pid, int(its)) for pid, group, its, _ in found} == {(True, launcher.pid)}
    assert {told for *_, told in found} == {"Input/output error"}


def test_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    check(reports(start([*launcher, str(JOBS / "reduce.py"), "auto", "torch"])), 2, ["shm", "torch"])


@needs_mpi
@pytest.mark.mpi
def test_mpirun() -> None:
    """Without MASTER_ADDR the ranks find each other by MPI, whatever transport they use then."""
    command = [str(MPIRUN), "-n", "2", sys.executable, str(JOBS / "reduce.py"), "mpi", "shm", "torch", "mpi"]
    done = start(command, PYCOMM_LOG="info")
    check(reports(done), 2, ["mpi", "shm", "torch", "mpi"])
    assert "a store that rank 0 told of by MPI" in done.stderr


@needs_mpi
@pytest.mark.mpi
def test_mpirun_with_master_addr() -> None:
    """With it no MPI is needed: the ranks of an MPI launcher meet at a store as any others do."""
    command = [str(MPIRUN), "-n", "3", warm_python(), str(JOBS / "reduce.py"), "auto"]
    check(reports(start(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))), 3, ["shm"])


@needs_mpi
@pytest.mark.mpi
def test_a_rank_that_raises_ends_an_mpi_job() -> None:
    """Under plain python the others would wait for it in MPI_Finalize for ever."""
    done = start([str(MPIRUN), "-n", "2", warm_python(), str(JOBS / "fail.py"), "raise", "mpi"])
    assert done.returncode != 0
    assert "ValueError: rank with a bug" in done.stderr


@pytest.mark.parametrize(("how", "exit_code", "words"), [("exit", 7, "exit code 7"), ("kill", 137, "SIGKILL")])
def test_exit_code_is_that_of_the_rank_that_failed(how: str, exit_code: int, words: str) -> None:
    done = start([*pycomm_run(2), str(JOBS / "fail.py"), how, "torch"])
    assert done.returncode == exit_code, done.stderr
    assert re.search(rf"pycomm run: rank 1 \(pid \d+\) .*{words}", done.stderr)


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_who_lost_a_rank_is_not_taken_for_the_first_to_fail(transport: str) -> None:
    done = start([*pycomm_run(2), str(JOBS / "fail.py"), "lost", transport])
    assert "PeerLostError" in done.stderr and done.returncode == 7, done.stderr
    assert re.search(r"pycomm run: rank 1 \(pid \d+\) failed first, with exit code 7", done.stderr), done.stderr


def test_a_probe_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pycomm", "probe", "-n", "2", "--seconds", "500"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(descendants(process.pid)) == 2)
        ranks = descendants(process.pid)
        # The launcher knows its ranks a moment after it has started them.
        wait_until(lambda: all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in ranks))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=900)
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))  # the kernel takes their memory apart


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ({0: (1, True), 1: (7, False)}, 7, "rank 1 (pid 101) failed first, with exit code 7"),
        ({0: (3, False), 1: (-9, False)}, 137, "rank 1 (pid 101) was the first to end, by SIGKILL"),
        ({1: (3, False), 0: (-15, False)}, 3, "rank 1 (pid 101) failed first, with exit code 3"),
        ({1: (-15, False), 0: (1, True)}, 143, "rank 1 (pid 101) was the first to end, by SIGTERM"),
        (
            {0: (2, False), 2: (3, False)},
            2,
            "which rank failed first cannot be told: rank 0 (pid 100) by exit code 2, rank 2 (pid 102) by exit code 3",
        ),
        (
            {0: (1, True), 1: (-15, False)},
            1,
            "which rank failed first cannot be told: "
            "rank 0 (pid 100) by exit code 1 as it had lost another rank, rank 1 (pid 101) by SIGTERM",
        ),
    ],
)
def test_the_first_to_fail_is_named_only_where_it_can_be_told(
    ends: dict[int, tuple[int, bool]], code: int, said: str, tmp_path: Path
) -> None:
    """``ends`` has the exit code of each rank in the order in which it was seen, and whether it lost another rank."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from pycomm.launch.run import _describe

    lost = {"message": {"message": "PeerLostError: rank 1 is gone", "extraInfo": {"timestamp": "1"}}}
    (tmp_path / "lost.json").write_text(json.dumps(lost), encoding="utf-8")
    failures = {
        rank: ProcessFailure(rank, 100 + rank, exit_code, str(tmp_path / ("lost.json" if is_lost else "none")))
        for rank, (exit_code, is_lost) in ends.items()
    }
    assert _describe(failures) == (said, code)


def test_pycomm_run_restarts_the_ranks() -> None:
    """Two attempts lose a rank by SIGKILL; the third reduces, at a store that knows nothing of them."""
    command = [*pycomm_run(2), "--max-restarts=2", "--monitor-interval=0.05"]
    done = start([*command, str(JOBS / "fail.py"), "twice", "torch"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 2: right") == 2, done.stdout


@needs_mpi
@pytest.mark.mpi
def test_transport_mpi_without_mpirun_says_how_to_start_it() -> None:
    code = (
        "import torch, torch.distributed as dist; from pycomm.transport import ConnectSpec, connect;"
        "connect('mpi', ConnectSpec(rank=1, world_size=2, store=dist.HashStore(), host_ids=('a', 'a'), timeout_s=5))"
    )
    done = start([warm_python(), "-c", code])
    assert done.returncode == 1
    assert "expected an MPI world of 2 ranks, got 1" in done.stderr
    assert "mpirun -n 2 python" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["-n", "2", "missing.py"], 1, "no such script: 'missing.py'"),
        (["-n", "many", __file__], 1, "-n: expected a number of ranks, cpu, gpu or auto"),
        (["-n", "0", __file__], 1, "-n: expected at least 1 rank, got 0"),
        (["--nnodes", "x", __file__], 1, "--nnodes: expected N or MIN:MAX, got 'x'"),
        (["-n", "2"], 2, "usage: pycomm run"),
    ],
)
def test_wrong_usage_of_pycomm_run(
    arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from pycomm.cli.__main__ import main

    try:
        code: object = main(["run", *arguments])
    except SystemExit as error:  # argparse
        code = error.code
    assert code == exit_code
    assert words in capfd.readouterr().err


@pytest.mark.slow
def test_the_examples_run_alike_under_every_launcher() -> None:
    """The same seeds, the same ranks, the same figures to the last digit."""
    job = str(JOBS / "examples.py")
    commands = [
        [*pycomm_run(2), job],
        [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node=2", job],
    ]
    if HAS_MPI:
        commands.append([str(MPIRUN), "-n", "2", warm_python(), job])
    found = []
    for command in commands:
        done = start(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        found.append(re.findall(r"accuracy: [0-9.]+%|identical on all ranks: yes|held-out loss: [0-9.]+", done.stdout))
    assert len(found[0]) == 4, found
    assert all(each == found[0] for each in found), found


@pytest.mark.slow
def test_the_main_job_learns_the_digits() -> None:
    """The example that ``make run`` runs ends with its accuracy, equal ranks and a bandwidth table, and exit code 0."""
    example = Path(__file__).parents[2] / "examples" / "train_digits.py"
    done = start([*pycomm_run(2), str(example)])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    accuracy = re.search(r"accuracy\D*([0-9.]+) ?%", done.stdout)
    assert accuracy is not None and float(accuracy[1]) >= 97, done.stdout
    assert "all_reduce" in done.stdout and "GB/s" in done.stdout


@pytest.mark.slow
def test_a_sharded_gpt_learns() -> None:
    """Its held-out loss is below what the bytes' frequencies alone give, the example's condition for exit code 0."""
    example = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    done = start([*pycomm_run(2), str(example), "--steps", "40"], COLUMNS="160")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (
        "full_shard over 2 ranks" in done.stdout and "reduce_scatter" in done.stdout and "held-out loss" in done.stdout
    )
