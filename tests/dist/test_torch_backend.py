"""The torch.distributed backend: the cases of tests/dist/backend, many in one job, under torchrun and mpirun.

A test here is one case of one job; the job is started by the first of its tests.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_launchers import LAUNCHER_VARIABLES, MPIRUN, needs_mpi

from pycomm.launch.ports import free_port
from warm_python import warm_python

HERE = Path(__file__).parent
SCRIPT = HERE / "jobs" / "torch_backend.py"


class Job(NamedTuple):
    """One start of ranks: how many, by which launcher, which cases, in which environment."""

    name: str
    ranks: int
    modules: tuple[str, ...]
    cases: tuple[str, ...] = ()  # all of the modules if empty
    environ: tuple[tuple[str, str], ...] = ()
    launcher: str = "torchrun"


_MESHES = ("ddp", "dtensor", "hsdp", "tensor_parallel", "pipeline", "device_mesh")
_DETAIL = ("all_reduce", "all_gather", "messages", "groups", "sequence_numbers", "ddp", "fsdp2", "pipeline")
JOBS = (
    Job("two", 2, ("verbs", "training", "errors", "compressed")),
    Job("three", 3, ("verbs", "errors"), launcher="mpirun"),
    Job("four", 4, ("training",), _MESHES),
    Job("detail", 2, ("verbs", "training"), _DETAIL, (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)),
)
COMPILED = Job("compiled", 2, ("compiled",))


def cases_of(job: Job) -> list[str]:
    """The names of its cases."""
    sys.path.insert(0, str(HERE))
    found = [name for module in job.modules for name in vars(importlib.import_module(f"backend.{module}"))]
    names = dict.fromkeys(name.removeprefix("case_") for name in found if name.startswith("case_"))
    return [name for name in names if not job.cases or name in job.cases]


def params() -> list[Any]:
    marks = {"mpirun": [needs_mpi, pytest.mark.mpi]}
    return [
        pytest.param(job, case, id=f"{job.name}-{case}", marks=marks.get(job.launcher, []))
        for job in JOBS
        for case in cases_of(job)
    ]


@functools.cache
def reports(job: Job) -> tuple[dict[tuple[str, int], str | None], str]:
    """Runs ``job`` and returns what went wrong in each case on each rank, and what was printed besides."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environ |= {"OMP_NUM_THREADS": "1", "CASES": " ".join(job.cases)} | dict(job.environ)
    command = [warm_python(), str(SCRIPT), *job.modules]
    if job.launcher == "mpirun":
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [str(MPIRUN), "-n", str(job.ranks), *command]
    else:
        launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        command = [*launcher, *command[1:]]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )  # it ends itself at its deadline
    found = {}
    decoder, text = json.JSONDecoder(), done.stdout
    while (begin := text.find('{"case"')) >= 0:  # lines of several ranks may run together
        report, end = decoder.raw_decode(text[begin:])
        found[report["case"], report["rank"]] = report["error"]
        text = text[begin + end :]
    return found, f"exit code {done.returncode}\n{done.stderr[-3000:]}"


def check(job: Job, case: str) -> None:
    found, printed = reports(job)
    for rank in range(job.ranks):
        assert (case, rank) in found, f"rank {rank} did not end the case; {printed}"
        assert found[case, rank] is None, f"[rank {rank}] {found[case, rank]}"


@pytest.mark.parametrize(("job", "case"), params())
def test_case(job: Job, case: str) -> None:
    check(job, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of(COMPILED))
def test_compiled(case: str) -> None:
    check(COMPILED, case)
