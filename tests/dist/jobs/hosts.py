"""Run by every rank of test_two_hosts.py: collectives, messages and groups across hosts; prints what it found."""

from __future__ import annotations

import json
import os
import sys
import zlib
from typing import Any

import torch

import pycomm
from pycomm.collectives import compression_hosts

SIZES = (0, 1, 1009, 65_537, 262_147)


def checksums() -> list[int]:
    """all_reduce of values whose sum depends on the order: the same bits on all ranks, if the order is the same."""
    found = []
    for numel in SIZES:
        values = torch.rand(numel, generator=torch.Generator().manual_seed(pycomm.rank()))
        exact = torch.full((numel,), float(pycomm.rank() + 1))
        pycomm.all_reduce(values)
        pycomm.all_reduce(exact)
        world_size = pycomm.world_size()
        assert torch.equal(exact, torch.full((numel,), world_size * (world_size + 1) / 2)), "wrong sum"
        found.append(zlib.crc32(values.numpy().tobytes()))
    return found


def compressed() -> list[int]:
    """As ``checksums``, with compression, in segments so short that the memory of each is used again and again."""
    compression_hosts._PAYLOAD_BYTES = 1, 4096
    found = []
    for spec, slack in (("bf16", 0.05), ("int8", 0.05), ("int4", 0.6), ("topk:1.0", 1e-5), ("sign+ef", 4.0)):
        for numel in (1, 1009, 262_147):
            inputs = [torch.rand(numel, generator=torch.Generator().manual_seed(r)) for r in range(pycomm.world_size())]
            values = inputs[pycomm.rank()]
            exact = sum(inputs)
            pycomm.all_reduce(values, compression=spec, name=f"w{numel}")
            assert (values - exact).abs().max() <= slack, f"{spec} of {numel}: wrong sum"
            found.append(zlib.crc32(values.numpy().tobytes()))
    return found


def disagreements() -> None:
    """Ranks of the hosts, or of one, that call different things: an error on every rank, nothing written, no harm."""
    rank, last = pycomm.rank(), pycomm.world_size() - 1
    for others in ([last], [0], list(range(1, last + 1))):  # they call something else
        for is_longer in (True, False):
            numel = 200_000 if is_longer and rank in others else 100_000
            tensor = torch.full((numel,), float(rank))
            try:
                if rank in others and not is_longer:
                    pycomm.broadcast(tensor, 0)
                else:
                    pycomm.all_reduce(tensor)
            except pycomm.CollectiveMismatchError as error:
                assert all(f"rank {each}: " in str(error) for each in range(last + 1)), error
            else:
                raise AssertionError("nothing was raised")
            assert torch.equal(tensor, torch.full((numel,), float(rank))), "was written"
    checksums()


def messages() -> list[int]:
    """Rank 0 receives one message from each of the others, with the same tag, from whoever comes first."""
    if pycomm.rank() != 0:
        pycomm.send(torch.full((300,), float(pycomm.rank())), 0, tag=5)
        return []
    sources = []
    for _ in range(pycomm.world_size() - 1):
        received = torch.empty(300)
        source = pycomm.recv(received, tag=5)
        assert torch.equal(received, torch.full((300,), float(source)))
        sources.append(source)
    return sorted(sources)


def groups(ranks: list[int], first_size: int) -> dict[str, Any]:
    """A group of one host, one with a rank a host, one of both kinds: their transports, and sums over them."""
    found = {}
    named = {"host": ranks[:first_size], "column": [0, ranks[-1]], "all": ranks[::-1]}
    for name, members in named.items():
        group = pycomm.new_group(members)
        if group is not pycomm.NON_MEMBER:
            one = torch.ones(4096)
            pycomm.all_reduce(one, group=group)
            assert torch.equal(one, torch.full((4096,), float(len(members)))), name
            found[name] = group.transport.name
    return found


def main() -> None:
    group = pycomm.init(timeout=600)
    disagreements()
    report = {
        "rank": group.rank,
        "local_rank": pycomm.local_rank(),
        "transport": group.transport.name,
        "hosts": group.transport.topology.hosts,
        "checksums": checksums() + compressed(),
        "sources": messages(),
        "groups": groups(list(group.ranks), len(group.transport.topology.hosts[0])),
    }
    pycomm.finalize()
    print(json.dumps(report), flush=True)


def die() -> None:
    """The last rank ends in the middle; the others must learn of it. Their exit code says that they did."""
    group = pycomm.init(timeout=600)
    pycomm.barrier()
    if group.rank == group.world_size - 1:
        os._exit(9)
    tensor = torch.ones(1 << 20)
    try:
        for _ in range(1000):
            pycomm.all_reduce(tensor)
    except pycomm.TransportError as error:
        print(json.dumps({"rank": group.rank, "error": type(error).__name__}), flush=True)
        sys.exit(0)
    sys.exit("nothing was raised")


if __name__ == "__main__":
    die() if sys.argv[1:] == ["die"] else main()
