"""A job: for each transport on the command line init, all_reduce, finalize. Each rank prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys

import torch

import pycomm


def main() -> None:
    sums = []
    for name in sys.argv[1:]:
        with pycomm.init(name) as group:
            for dtype in (torch.float32, torch.bfloat16):
                tensor = torch.full((1000,), group.rank + 1, dtype=dtype)
                pycomm.all_reduce(tensor)
                sums.append([group.transport.name, group.world_size, float(tensor[0]), float(tensor[-1])])
            facts = {"rank": group.rank, "world_size": group.world_size, "local_rank": pycomm.local_rank()}
        assert not pycomm.is_initialized()
    print(json.dumps({**facts, "sums": sums, "threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)


if __name__ == "__main__":
    main()
