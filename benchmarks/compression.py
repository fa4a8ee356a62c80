"""How much faster an all_reduce is with compression: every compressor beside none, in turns, in one run.

A job that any launcher starts. Between two hosts on this machine (as root), and on shared memory:

    python benchmarks/two_hosts.py --rate 1gbit -- python benchmarks/compression.py --rate 1gbit
    python benchmarks/two_hosts.py --rate 100mbit -- python benchmarks/compression.py --rate 100mbit --rounds 1
    pycomm run -n 2 benchmarks/compression.py --compressions none auto

``x none`` is the median over rounds of none's time over the compressor's, both of the slowest rank. The input is normal
noise; error feedback has the tensor's name.

Between hosts the row ``inside`` is an all_reduce of the same tensor inside each host, all hosts at once: every rank
reads its input, writes its result, and a host adds up and hands out, with no codec and nothing on the wire. No
compressor does without that. With ``--rate``, that of the cable, each row also says what the wire takes for the bytes
that a host sends (with the headers of TCP and Ethernet, 1.046), and how much faster than none that and ``inside`` would
be, one after the other: what is left for the codec to lose. A codec whose bytes travel while the hosts add up can be
above it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch

import pycomm
from pycomm.collectives.auto_compression import TRIAL_CALLS, WARM_UP_CALLS

INSIDE = "inside"  # in place of a compression: all_reduce inside the hosts
HEADERS = 1514 / 1448  # TCP's and Ethernet's
UNITS = {"gbit": 1e9, "mbit": 1e6}
COMPRESSIONS = ("none", "bf16", "int8", "int4+ef", "topk:0.01+ef", "sign+ef", "auto")


def timed(
    compression: str, flat: torch.Tensor, given: torch.Tensor, world: pycomm.Group, host: pycomm.Group | None
) -> float:
    """Returns the seconds of one call on the slowest rank; ``host``: the group of this host's ranks."""
    flat.copy_(given)
    pycomm.barrier(world)
    start_s = time.perf_counter()
    if compression == INSIDE:
        pycomm.all_reduce(flat, group=host)
    else:
        pycomm.all_reduce(flat, group=world, compression=compression, name="bucket")
    taken = torch.tensor([time.perf_counter() - start_s])
    pycomm.all_reduce(taken, pycomm.ReduceOp.MAX, world)
    return float(taken)


def host_group(world: pycomm.Group) -> pycomm.Group | None:
    """Returns the group of the ranks of this host, if there are several hosts, each with several ranks."""
    hosts = world.engine.selector.topology.hosts
    if len(hosts) == 1 or min(map(len, hosts)) == 1:
        return None
    return world.subgroup(next(ranks for ranks in hosts if world.rank in ranks), "host")


def bits_of(rate: str) -> float:
    """Returns bits a second of a rate such as 100mbit, as benchmarks/two_hosts.py takes it."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise argparse.ArgumentTypeError(f"expected a number and one of {', '.join(UNITS)}, such as 100mbit, got {rate}")


class Times:
    """What was measured, in seconds by round, and what rank 0 sent in a call, in bytes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.sent = dict.fromkeys(names, 0)

    def ratio(self, name: str, added_s: float = 0.0) -> float:
        """Returns the median over rounds of none's time over that of ``name`` and ``added_s``."""
        both = zip(self.seconds["none"], self.seconds[name], strict=True)
        return median(none / (own + added_s) for none, own in both)

    def print(self, rate: float | None, local: int) -> None:
        """Prints the table; ``local`` ranks of a host send at ``rate`` bits a second together."""
        has_limit = rate is not None and INSIDE in self.seconds
        limit = f" {'the wire, ms':>13} {'inside + wire, x none':>22}" if has_limit else ""
        print(f"{'compression':16} {'ms':>9} {'x none':>7} {'MiB sent by rank 0':>19}{limit}")
        for name, times in self.seconds.items():
            sent = self.sent[name]
            line = f"{name:16} {median(times) * 1e3:9.1f} {self.ratio(name):7.2f} "
            line += f"{sent / 2**20:19.2f}" if sent else f"{'-':>19}"
            if sent and rate is not None and has_limit:
                wire_s = sent * local * 8 * HEADERS / rate
                line += f" {wire_s * 1e3:13.1f} {self.ratio(INSIDE, wire_s):22.2f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressions", nargs="+", default=list(COMPRESSIONS), help="none must be among them")
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=bits_of, help="of the cable between the hosts, such as 1gbit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with pycomm.init() as world:
        generator = torch.Generator().manual_seed(pycomm.rank())
        given = torch.randn(int(arguments.mib * 2**20) // 4, generator=generator)
        flat = torch.empty_like(given)
        host = host_group(world)
        names = [*arguments.compressions, *([INSIDE] if host else [])]
        for name in names:
            for _ in range(WARM_UP_CALLS + TRIAL_CALLS if name == "auto" else 1):
                timed(name, flat, given, world, host)
        times = Times(names)
        for _ in range(arguments.rounds):
            for name in names:
                before = world.compression.total.wire_bytes
                times.seconds[name].append(timed(name, flat, given, world, host))
                times.sent[name] = world.compression.total.wire_bytes - before
        if pycomm.rank() == 0:
            print(f"{world!r}, {arguments.mib:g} MiB of float32, {arguments.rounds} rounds")
            times.print(arguments.rate, host.world_size if host else 1)
            for decision in world.compression.decisions:
                print(decision)


if __name__ == "__main__":
    main()
