"""Jobs as a whole: with next to no /dev/shm, and two on one host at once."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from test_launchers import JOBS, check, reports, start
from test_listening import PYCOMM_RUN, running


def test_a_job_with_256_kib_of_dev_shm() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs a mount namespace, which this system does not give")
    script = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$@"'
    done = start(["unshare", "-Urm", "sh", "-c", script, "sh", *PYCOMM_RUN, str(JOBS / "reduce.py"), "auto", "torch"])
    check(reports(done), 2, ["shm", "torch"])


def test_two_jobs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    """Both run at once, from one folder, and add up numbers of their own; a sum with the other's is an error."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with running(PYCOMM_RUN, "auto", folders[0]), running(PYCOMM_RUN, "auto", folders[1], factor=100):
        time.sleep(0.3)  # some turns side by side
