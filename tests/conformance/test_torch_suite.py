"""A small part of PyTorch's own suite over the backend; ``torch_suite.py`` runs all of it and compares with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PART = (
    "test_DistributedDataParallelCPU$|test_all_gather_coalesced_simple|test_all_reduce_sum_complex|test_all_to_all_single"
    "_unequal_split$|test_broadcast$|test_ddp_uneven_inputs$|test_gather_object_cpu|test_new_subgroups$"
    "|test_send_recv_any_source$|test_undefined_grad_parity_unused_parameters"
)


def test_part_of_torchs_own_suite() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own suite needs it: pip install expecttest")
    script = Path(__file__).parent / "torch_suite.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "-n", "2", "--only", PART, "--limit", "600", "--verbose"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed over pycomm" in done.stdout
