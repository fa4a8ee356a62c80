"""Trainings in which a rank is lost: whatever each of the others waits for ends, and they make a group without it.

    python tests/engines/losses.py --kind trainings --transport shm --ranks 4 --seed 4711 --number 20

Engines have groups that the lost rank is not in (``hybrid_shard``, meshes, shares of a pipeline): who waits there for
one that has been told of the loss, and goes on, is told as well.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pycomm
from engines import pipelines, tensor_trainings, trainings
from harness import check_sum
from losing import HOW, lose, run_losing_one, victim_of

KINDS = {"trainings": trainings.trainings, "pipelines": pipelines.pipelines, "tensor": tensor_trainings.trainings}


def bereaved(rank: int, kind: str, seed: int, how: str) -> str:
    """One rank's part of trainings that go on until the rank is lost; returns what it was told."""
    ranks = pycomm.world_size()
    lost = victim_of(seed, ranks)
    told = ""
    train = partial(KINDS[kind], rank, itertools.count(1000 * seed))
    if rank == lost and how == "leaves":
        KINDS[kind](rank, range(1000 * seed, 1000 * seed + 1 + seed % 3))
    elif rank == lost:
        lose(train, seed, how)
    else:
        try:
            train()
        except pycomm.PeerLostError as error:
            told = str(error)
        check_sum(pycomm.new_group([member for member in range(ranks) if member != lost]))
    return told


def run(ranks: int, kind: str, seed: int, transport: str, how: str, timeout_s: float = 600.0) -> None:
    """Trains models of a ``kind`` until a rank is lost."""
    run_losing_one(ranks, seed, how, bereaved, kind, seed, how, transport=transport, timeout_s=timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="trainings")
    parser.add_argument("--how", choices=HOW, help="by default by turns")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 24))
    parser.add_argument("--number", type=int, default=10)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.number):
        begin, how = time.monotonic(), options.how or HOW[seed % len(HOW)]
        print(f"seed {seed}, {how}", end=" ", flush=True)
        losses.run(options.ranks, options.kind, seed, options.transport, how, timeout_s=100.0)
        print(f"{time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    from engines import losses  # so that the ranks find this module by its name

    main()
