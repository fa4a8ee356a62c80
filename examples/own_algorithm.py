"""An algorithm of your own, in one file: proven, then run.

Start it with: pycomm run -n 4 examples/own_algorithm.py

`star`: everybody sends to rank 0, which adds and sends the sum back.

======================  ======  ===================
verb                    Rounds  Bytes sent per rank
======================  ======  ===================
all_reduce              2       (n-1) * S
======================  ======  ===================

A package offers such a file to all its users by an entry point, and then `pycomm plan star 4` draws it too:

    [project.entry-points."pycomm.algorithms"]
    star = "my_package.star"
"""

from __future__ import annotations

import sys

from pycomm.algorithms import ALGORITHMS, find_algorithm
from pycomm.algorithms.plan import Chunk, Plan, Recv, Reduce, Round, Send, Space
from pycomm.algorithms.simulator import declared, prove
from pycomm.topology import Topology

VERBS = ("all_reduce",)


def plan(verb: str, rank: int, topology: Topology, root: int = 0) -> Plan:
    """Returns what ``rank`` does: two rounds over one chunk, the whole buffer."""
    n = topology.world_size
    mine, total = Chunk(Space.INPUT, 0), Chunk(Space.OUTPUT, 0)
    if rank == 0:
        coming = [Chunk(Space.SCRATCH, 0, lane) for lane in range(n - 1)]
        recvs = tuple(Recv(peer, chunk) for peer, chunk in enumerate(coming, 1))
        rounds = (
            Round(recvs, (Reduce(total, (mine, *coming)),)),
            Round(tuple(Send(peer, total) for peer in range(1, n))),
        )
    else:
        rounds = (Round((Send(0, mine),)), Round((Recv(0, total),)))
    return Plan(verb=verb, rank=rank, world_size=n, input_chunks=1, output_chunks=1, rounds=rounds)


def main() -> None:
    import torch

    import pycomm

    ALGORITHMS.register("star", sys.modules[__name__])
    pycomm.init()
    if pycomm.rank() == 0:
        for n in range(2, 17):
            topology = Topology.flat(n)
            assert prove(find_algorithm("star"), "all_reduce", topology).counts == declared(
                "star", "all_reduce", topology
            )
        print("proven for 2 to 16 ranks")
    x = torch.full((5,), float(pycomm.rank() + 1))
    pycomm.all_reduce(x, algorithm="star")
    print(f"rank {pycomm.rank()}: {x.tolist()}")
    pycomm.finalize()


if __name__ == "__main__":
    main()
