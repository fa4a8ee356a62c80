"""Runs the cases of modules of tests/dist/backend on every rank: ``torch_backend.py verbs training``.

Each rank prints a line of JSON for each case: its name, and what went wrong or None. BACKEND says over what. A case
that fails on one rank leaves the others waiting at most the group's timeout.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm.torch_backend  # registers the backend where pycomm is not installed
from pycomm.topology import detect_launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
TIMEOUT = timedelta(seconds=500)
DEADLINE_S = 600  # of one case


def main(modules: list[str]) -> None:
    torch.set_num_threads(1)
    backend = os.environ.get("BACKEND", "pycomm")
    launch = detect_launch()  # also under mpirun, which torch knows nothing of
    dist.init_process_group(backend, timeout=TIMEOUT, rank=launch.rank, world_size=launch.world_size)
    only = os.environ.get("CASES", "").split()
    for name in modules:
        module = importlib.import_module(f"backend.{name}")
        for case in [each for each in vars(module) if each.startswith("case_")]:
            if only and case.removeprefix("case_") not in only:
                continue
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)  # so that a hang shows where it hangs
            torch.manual_seed(0)
            error, start = None, time.perf_counter()
            try:
                getattr(module, case)()
            except BaseException:
                error = traceback.format_exc()
            report = {
                "case": case.removeprefix("case_"),
                "rank": dist.get_rank(),
                "error": error,
                "s": round(time.perf_counter() - start, 2),
            }
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert pycomm.torch_backend
    main(sys.argv[1:])
