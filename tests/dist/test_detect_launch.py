"""What the environment says under each launcher.

MPICH's environment was recorded and shortened; the others' are written from the launchers' documentation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm import ConfigError, topology
from pycomm.topology import LaunchInfo, available_cores, detect_launch, first_host, host_id, local_address

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = {**MPICH, "I_MPI_HYDRA_HOST_FILE": "hosts", "MPIR_CVAR_CH4_OFI_ENABLE_INJECT": "0"}
SALLOC = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_JOB_NODELIST": "gpu[08-09]",
    "SLURM_NODELIST": "gpu[08-09]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SRUN = {
    **SALLOC,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
# Where salloc itself starts a shell on a node of the job, that shell is a step, of one task.
SALLOC_INTERACTIVE = {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
SBATCH_SCRIPT = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def members(info: LaunchInfo) -> tuple[object, ...]:
    return info.launcher, info.rank, info.world_size, info.local_rank, info.local_world_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        ({"PATH": "/bin", "MASTER_PORT": "1", "LOCAL_RANK": "7"}, ("none", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("env", 1, 2, 0, 1)),
        (OPEN_MPI, ("openmpi", 3, 4, 1, 2)),
        (MPICH, ("mpich", 1, 2, 1, 2)),
        (INTEL, ("mpich", 1, 2, 1, 2)),
        (SRUN, ("slurm", 6, 8, 2, 4)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_LOCALID": "0"}, ("slurm", 6, 8, 0, 3)),
        (SALLOC, ("none", 0, 1, 0, 1)),
        (SALLOC_INTERACTIVE, ("none", 0, 1, 0, 1)),
        (SBATCH_SCRIPT, ("none", 0, 1, 0, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1)),
        ({**SRUN, **OPEN_MPI}, ("openmpi", 3, 4, 1, 2)),
        ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 5, 8, 1, 4)),
        ({**MPICH, "RANK": ""}, ("mpich", 1, 2, 1, 2)),
    ],
)
def test_launcher_is_found(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    assert members(detect_launch(environ)) == expected


def test_meeting_point_and_attempt() -> None:
    info = detect_launch(TORCHRUN)
    assert (info.master_addr, info.master_port, info.attempt) == ("10.0.0.7", 29500, 2)
    assert "RANK" in info.sources and "MASTER_ADDR" in info.sources
    assert (detect_launch(MPICH).master_addr, detect_launch(MPICH).attempt) == ("", 0)
    with_address = detect_launch({**MPICH, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"})
    assert (with_address.launcher, with_address.master_addr, with_address.master_port) == ("mpich", "127.0.0.1", 4000)


def test_slurm_names_a_meeting_point() -> None:
    info = detect_launch(SRUN)
    assert info.master_addr == "gpu08"
    assert 20_000 <= info.master_port < 30_000
    assert detect_launch({**SRUN, "SLURM_PROCID": "0"}).master_port == info.master_port
    assert detect_launch({**SRUN, "SLURM_STEP_ID": "4"}).master_port != info.master_port
    assert detect_launch({**SRUN, "SLURM_STEP_NUM_NODES": "1"}).master_addr == "127.0.0.1"
    assert detect_launch({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "7"}).master_addr == "x"
    # srun --mpi=pmi2 sets PMI_* too: MPI's ranks, Slurm's meeting point
    both = detect_launch({**SRUN, **MPICH})
    assert (both.launcher, both.master_addr) == ("mpich", "gpu08")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[08-11,20],login1", "gpu08"),
        ("gpu[3],x", "gpu3"),
        ("rack-2-n[1-2].example", "rack-2-n1.example"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"expected RANK and WORLD_SIZE, got RANK \('0'\) alone; set WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "set RANK too"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected 0 <= rank < world_size, got rank 2 and world_size 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: expected an integer of at least 0, got '-1'"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: expected an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "expected 0 <= local_rank < local_world_size"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "at most 8 ranks on a host, the whole world, got 9"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "expected MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "set MASTER_ADDR too"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE: expected a list"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


def test_detection_starts_nothing() -> None:
    """Neither torch nor MPI is imported, under mpirun's own variables too."""
    code = (
        "import sys; from pycomm.topology import detect_launch, host_id; info = detect_launch(); host_id();"
        "assert info.rank == 1, info; assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **MPICH}, check=True, timeout=900)


def test_host_id_is_of_host_and_user() -> None:
    code = "from pycomm.topology import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    assert other.stdout.strip() == host_id()
    assert host_id().endswith(f"/{os.getuid()}")


def test_local_address_is_not_loopback() -> None:
    try:
        address = local_address("127.0.0.1")
    except ConfigError as error:  # a host without a network
        assert "MASTER_ADDR" in str(error)
    else:
        assert not address.startswith("127.")


def test_cores_respect_affinity_and_quota(tmp_path: Path) -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
    membership = tmp_path / "cgroup"
    inner = tmp_path / "fs" / "job" / "step"
    inner.mkdir(parents=True)
    membership.write_text("0::/job/step\n")
    assert topology._cgroup_quota_cores(tmp_path / "fs", membership) == float("inf")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert topology._cgroup_quota_cores(tmp_path / "fs", membership) == 1.5
    membership.write_text("4:cpu,cpuacct:/job\n")
    old = tmp_path / "fs" / "cpu" / "job"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("200000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert topology._cgroup_quota_cores(tmp_path / "fs", membership) == 2.0
    assert topology._cgroup_quota_cores(tmp_path / "fs", tmp_path / "missing") == float("inf")
