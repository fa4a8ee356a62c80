"""Programs of calls of ``torch.distributed`` (``dist_programs.py``) on pycomm's groups alone, in which a rank is lost.

    python tests/conformance/dist_losses.py --transport shm --ranks 4 --how killed --programs 20

Whoever waits, by whichever way torch has, gets an error; then it destroys its groups and goes, as programs do that
torchrun starts again, and so all end. No result is compared: ``dist_programs.py`` does that.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from dist_programs import Call, Pair, Program

import pycomm
from losing import HOW, lose, run_losing_one, victim_of
from pycomm.torch_backend import Options

__all__ = ["bereaved", "run"]

MESH = 3  # groups besides the whole


class Alone(Program):
    """A program without gloo, on groups that are there from its beginning."""

    def both(self, pair: Pair, call: Call) -> None:
        work, got = call(pair.pycomm, self.place)
        self.under_way.append((work, got, got, self.log[-1]))
        if work is None:
            self.end_one(-1)

    def new_pair(self) -> None:
        """Torch's ``new_group`` waits for all ranks, the lost one too, in the store."""


def own_group(ranks: list[int], rank: int, options: Any) -> Pair:
    group = dist.new_group(ranks, pg_options=options)
    return Pair(group if rank in ranks else None, None, tuple(ranks))


def bereaved(rank: int, seed: int, transport: str, how: str, folder: str) -> list[str]:
    """One rank's part of the program ``seed``; returns what it was told."""
    n, dice = pycomm.world_size(), random.Random(seed)
    store = dist.FileStore(f"{folder}/{seed}", n)
    options: Any = Options(transport=transport)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=n, pg_options=options)
    pairs = [Pair(dist.group.WORLD, None, tuple(range(n)))]
    pairs += [own_group(sorted(dice.sample(range(n), dice.randrange(1, n + 1))), rank, options) for _ in range(MESH)]
    program = Alone(rank, seed, pairs[0], transport)
    program.pairs = pairs
    told: list[str] = []
    try:
        if rank != victim_of(seed, n):
            told = _be_told(program)
        elif how == "leaves":
            program.run(dice.randrange(200))
        else:
            lose(partial(program.run, 1_000_000), seed, how)
    except RuntimeError as error:
        if "KeyboardInterrupt" not in str(error):  # what torch makes of one that comes in a callback
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return told


def _be_told(program: Alone) -> list[str]:
    told = []
    try:
        program.run(1_000_000)
    except Exception as error:
        told.append(_loss_in(error, program.transport))
    if program.own.random() < 0.5:
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()
    for work, _, _, what in program.under_way:
        try:
            if work is not None:
                work.wait()
            told.append(f"done: {what}")
        except Exception as error:
            told.append(_loss_in(error, program.transport))
    return told


def _loss_in(error: Exception, transport: str) -> str:
    """Returns what ``error`` says of a loss, which torch may have made a RuntimeError of; raises any other."""
    text = f"{type(error).__name__}: {error}"
    signs = ["PeerLostError", "has closed", "is closed"]
    if transport != "shm":  # there it is looked for first: a call that the lost rank had begun and the others come to
        signs.append("CollectiveMismatchError")
    if not any(sign in text for sign in signs) or "CollectiveTimeoutError" in text:
        raise error
    return text


def run(ranks: int, seed: int, transport: str, how: str, timeout_s: float = 600.0) -> list[Any]:
    """Runs the program ``seed``; returns what each rank was told."""
    with tempfile.TemporaryDirectory() as folder:
        job = (bereaved, seed, transport, how, folder)
        return run_losing_one(ranks, seed, how, *job, transport=transport, timeout_s=timeout_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--how", choices=HOW, default="killed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--programs", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for seed in range(options.seed, options.seed + options.programs):
        begin = time.monotonic()
        print(f"seed {seed}", end=" ", flush=True)
        told = run(options.ranks, seed, options.transport, options.how, timeout_s=90)
        print(f"{time.monotonic() - begin:.1f} s; ranks were told {[len(each or ()) for each in told]}", flush=True)


if __name__ == "__main__":
    import dist_losses  # so that the ranks find this module by its name

    dist_losses.main()
