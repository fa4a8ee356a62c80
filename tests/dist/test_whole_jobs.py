"""Jobs as a whole: with next to no /dev/shm, with torch's defaults set to others, and two on one host at once."""

from __future__ import annotations

import time
from pathlib import Path

from test_launchers import JOBS, check, pycomm_run, reports, start
from test_listening import running

from harness import with_small_shm


def test_a_job_with_256_kib_of_dev_shm() -> None:
    done = start(with_small_shm([*pycomm_run(2), str(JOBS / "reduce.py"), "auto", "torch"]))
    check(reports(done), 2, ["shm", "torch"])


def test_a_job_with_other_defaults_of_torch() -> None:
    """A default device and dtype are for the job's own tensors, from init on, also under torch.distributed."""
    done = start([*pycomm_run(2), str(JOBS / "torch_defaults.py"), "shm", "torch"])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("right") == 2


def test_two_jobs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    """Both run at once, from one folder, and add up numbers of their own; a sum with the other's is an error."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with running(pycomm_run(2), "auto", folders[0]), running(pycomm_run(2), "auto", folders[1], factor=100):
        time.sleep(0.3)  # some turns side by side
