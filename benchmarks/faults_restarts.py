"""The part of benchmarks/faults.py that needs torchrun: a worker is killed, torchrun restarts all of them.

Run by torchrun, this file is the job: each attempt reduces, says when, and then a rank of all but the last attempt
kills itself. Every other attempt only imports torch before it says so: what torchrun and torch alone take, in turns
with the rest, on the same machine in the same minute.

Python compiles pycomm once, as `pip install` does: the job may write bytecode whatever PYTHONDONTWRITEBYTECODE says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

__all__ = ["measure_restarts"]

_RANKS = 4
_LIMIT_S = 3.5
_LONGEST_S = 600.0  # that a worker waits for the agent to end it


def measure_restarts(restarts: int) -> list[tuple[str, str, str, str]]:
    """Kills one of four workers of ``torchrun --max-restarts``, in one job: ``restarts`` times before an attempt that
    reduces, and as often before one that imports torch.
    """
    attempts = 2 * restarts
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={_RANKS}",
            "--monitor-interval=0.1",
        ]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += [f"--max-restarts={attempts}", __file__, folder, str(attempts)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        limit_s = 60 + 20 * attempts
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)
        if done.returncode != 0:
            raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-3000:]}")
        spent_s = _spent_s(Path(folder))
    whole, torch_alone = ([each for attempt, each in spent_s.items() if attempt % 2 == odd] for odd in (0, 1))
    return [
        (
            "torchrun --max-restarts: SIGKILL of a worker to the next right sum",
            "pycomm",
            f"{sum(each <= _LIMIT_S for each in whole)} of {restarts} within {_LIMIT_S} s, {_show(whole)}",
            "all, 3.5 s",
        ),
        (f"... to the next attempt whose {_RANKS} workers have imported torch", "torch", _show(torch_alone), "-"),
        (
            "... what pycomm adds to torchrun and torch: its import, init, all_reduce",
            "pycomm",
            f"median {median(whole) - median(torch_alone):.1f} s",
            "-",
        ),
    ]


def _spent_s(folder: Path) -> dict[int, float]:
    """Returns how long after the kill the last rank of each attempt said that it was there."""
    ready_ns: dict[int, int] = {}
    killed_ns = {}
    for path in folder.iterdir():
        kind, attempt = path.name.split("-")[:2]
        at_ns = int(path.read_text())
        if kind == "ready":
            ready_ns[int(attempt)] = max(at_ns, ready_ns.get(int(attempt), 0))
        else:
            killed_ns[int(attempt)] = at_ns
    return {attempt + 1: (ready_ns[attempt + 1] - at_ns) / 1e9 for attempt, at_ns in killed_ns.items()}


def _show(spent_s: list[float]) -> str:
    return f"median {median(spent_s):.1f} s, worst {max(spent_s):.1f} s"


def main() -> None:
    """One worker of one attempt."""
    folder, attempts = Path(sys.argv[1]), int(sys.argv[2])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    import torch

    def is_ready() -> None:
        (folder / f"ready-{attempt}-{rank}").write_text(str(time.monotonic_ns()))

    def kill_one() -> None:
        if attempt < attempts and rank == attempt % _RANKS:
            (folder / f"killed-{attempt}").write_text(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)

    if attempt % 2 == 1:
        is_ready()
        while len(list(folder.glob(f"ready-{attempt}-*"))) < _RANKS:
            time.sleep(0.01)
        kill_one()
        time.sleep(_LONGEST_S)

    import pycomm

    group = pycomm.init()
    tensor = torch.full((1000,), float(group.rank))
    pycomm.all_reduce(tensor)
    assert (tensor == sum(range(_RANKS))).all(), "wrong sum"
    is_ready()
    pycomm.barrier()
    kill_one()
    if attempt < attempts:
        while True:  # as a job does: it reduces until somebody is lost
            pycomm.all_reduce(tensor.fill_(1.0))
    pycomm.finalize()


if __name__ == "__main__":
    main()
