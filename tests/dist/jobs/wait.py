"""Ranks that say in a folder that they have begun, and go on making groups and reducing in them until a file ``go`` is
there. Each sum must be right: of what this job's ranks hold, times its own ``factor``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import pycomm


def main() -> None:
    transport, folder = sys.argv[1], Path(sys.argv[2])
    factor = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
    world = pycomm.init(transport, timeout=600)
    ready, partial = folder / f"ready{world.rank}", folder / f"partial{world.rank}"
    is_last = False
    while not is_last:
        group = pycomm.new_group(list(range(world.world_size)))  # its ranks meet at the store
        tensor = torch.full((1000,), factor * (world.rank + 1))
        pycomm.all_reduce(tensor, group=group)
        assert tensor.eq(factor * world.world_size * (world.world_size + 1) / 2).all(), "wrong sum"
        if not ready.exists():
            partial.write_text(str(os.getpid()))
            partial.rename(ready)  # whoever sees it sees the pid in it
        seen = torch.tensor([float((folder / "go").exists())])
        pycomm.all_reduce(seen, group=group)  # so that all of them stop at the same turn
        is_last = bool(seen)
        group.close()
        time.sleep(0.02)
    pycomm.finalize()


if __name__ == "__main__":
    main()
