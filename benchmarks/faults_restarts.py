"""The part of benchmarks/faults.py that needs torchrun: a worker is killed, torchrun restarts all of them.

Run by torchrun, this file is the job: each attempt reduces, says when, and then the last rank of all but the last
attempt kills itself.
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


def measure_restarts(restarts: int) -> list[tuple[str, str, str, str]]:
    """Kills one of four workers of ``torchrun --max-restarts``, ``restarts`` times in one job."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={_RANKS}",
            "--monitor-interval=0.1",
        ]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += [f"--max-restarts={restarts}", __file__, folder, str(restarts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + 20 * restarts)
        if done.returncode != 0:
            raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-3000:]}")
        reduced_ns, killed_ns = {}, {}
        for path in Path(folder).iterdir():
            kind, attempt = path.name.split("-")[:2]
            at_ns = int(path.read_text())
            if kind == "reduced":
                reduced_ns[int(attempt)] = max(at_ns, reduced_ns.get(int(attempt), 0))
            else:
                killed_ns[int(attempt)] = at_ns
    spent_s = [
        (reduced_ns[attempt + 1] - at_ns) / 1e9 for attempt, at_ns in killed_ns.items() if attempt + 1 in reduced_ns
    ]
    result = f"{len(spent_s)} of {restarts}, median {median(spent_s):.1f} s, worst {max(spent_s):.1f} s"
    imports = f"median {median(_import_torch_s() for _ in range(5)):.1f} s"
    return [
        ("torchrun --max-restarts: SIGKILL of a worker to the next right sum", "pycomm", result, "all, 3.5 s"),
        (f"of that, {_RANKS} processes that import torch, at once", "torch", imports, "-"),
    ]


def _import_torch_s() -> float:
    """What restarted workers cannot do without."""
    start = time.monotonic()
    workers = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(_RANKS)]
    for worker in workers:
        worker.wait()
    return time.monotonic() - start


def main() -> None:
    """One worker of one attempt."""
    import torch

    import pycomm

    folder, restarts = Path(sys.argv[1]), int(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    group = pycomm.init()
    tensor = torch.full((1000,), float(group.rank))
    pycomm.all_reduce(tensor)
    assert (tensor == sum(range(_RANKS))).all(), "wrong sum"
    (folder / f"reduced-{attempt}-{group.rank}").write_text(str(time.monotonic_ns()))
    pycomm.barrier()
    if attempt < restarts and group.rank == attempt % _RANKS:
        (folder / f"killed-{attempt}").write_text(str(time.monotonic_ns()))
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < restarts:
        while True:  # as a job does: it reduces until somebody is lost
            pycomm.all_reduce(tensor.fill_(1.0))
    pycomm.finalize()


if __name__ == "__main__":
    main()
