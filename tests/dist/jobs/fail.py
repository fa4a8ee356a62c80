"""A job whose last rank ends early by ``raise``, ``exit`` (code 7) or ``kill``, while the others wait.

With ``lost`` rank 1 ends with code 7, and the others, which lose it in an all_reduce, right afterwards.
With ``twice`` it is killed in the first two attempts, and in the third all end well. To ``exit`` and to be killed takes
no pycomm, nor torch, which is seconds to import.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def main() -> None:
    how, transport = sys.argv[1:]
    if how in ("exit", "kill"):
        if os.environ["RANK"] == "1":
            end(how)
        time.sleep(1000)
    import torch

    import pycomm

    group = pycomm.init(transport)
    pycomm.barrier()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if how == "twice" and attempt == 2:
        tensor = torch.ones(3)
        pycomm.all_reduce(tensor)
        assert tensor.eq(group.world_size).all()
        print(f"attempt {attempt}: right", flush=True)
        return
    if how == "lost":
        pycomm.all_reduce(torch.ones(3))
        if group.rank == 1:
            sys.exit(7)
        pycomm.all_reduce(torch.ones(3))  # of which rank 0 ends as well, before the launcher looks
    if group.rank == group.world_size - 1:
        if how == "raise":
            raise ValueError("rank with a bug")
        end(how)
    if how == "raise":
        pycomm.all_reduce(torch.ones(3))
    time.sleep(1000)  # not in a collective, so that the others do not fail as well


def end(how: str) -> None:
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
