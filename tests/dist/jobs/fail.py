"""A job whose last rank ends early by ``raise``, ``exit`` (code 7) or ``kill``, while the others wait."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import pycomm


def main() -> None:
    how, transport = sys.argv[1:]
    group = pycomm.init(transport)
    pycomm.barrier()
    if group.rank == group.world_size - 1:
        if how == "raise":
            raise ValueError("rank with a bug")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        pycomm.all_reduce(torch.ones(3))
    time.sleep(60)  # not in a collective, so that the others do not fail as well


if __name__ == "__main__":
    main()
