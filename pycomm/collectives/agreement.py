"""The ranks of a group find out that they go by the same table of algorithms, and which of them share a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch

from ..algorithms.engine import Engine
from ..algorithms.executor import Collective
from ..algorithms.selection import DEFAULT_RULES, Selector, load_table
from ..algorithms.tables import Table
from ..errors import CollectiveMismatchError
from ..topology import Topology, host_id
from ..transport.base import Transport

__all__ = ["agree_on_selector", "check_digests"]


def agree_on_selector(transport: Transport, table: Table | None = None) -> Selector:
    """Returns the selector of the ranks that ``transport`` joins, all of which call this.

    Raises CollectiveMismatchError on every rank if their tables differ.
    """
    table = load_table() if table is None else table
    if transport.name == "local" or transport.world_size == 1:  # one process: one table, one host
        return Selector(transport, Topology.flat(transport.world_size), table)
    host = int.from_bytes(blake2b(host_id().encode(), digest_size=7).digest(), "little")
    device = "cpu" if "cpu" in transport.devices else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor([host, int(table.digest, 16)], dtype=torch.int64, device=device)
    told = torch.empty(2 * transport.world_size, dtype=torch.int64, device=device)
    gather = Collective(verb="all_gather_single", input=mine, output=told)
    Engine(transport, Selector(transport, Topology.flat(transport.world_size), Table.of(DEFAULT_RULES))).execute(
        gather, None, None
    )
    hosts, digests = told.view(-1, 2).T.tolist()
    check_digests([f"{digest:014x}" for digest in digests], table, transport.rank)
    return Selector(transport, Topology.of_hosts(hosts), table)


def check_digests(digests: Sequence[object], table: Table, rank: int) -> None:
    """Raises CollectiveMismatchError unless all ranks, whose tables' ``digests`` these are, have ``table``."""
    if all(digest == table.digest for digest in digests):
        return
    common = Counter(digests).most_common(1)[0][0]
    others = [member for member, digest in enumerate(digests) if digest != common]
    sources = ", ".join(dict.fromkeys(rule.source for rule in table.rules))
    raise CollectiveMismatchError(
        f"rank {rank} of {len(digests)}: the ranks go by different tables of algorithms: expected one, got "
        f"{len(set(digests))}; ranks {others} differ from the others. This rank's is from {sources}. Compare "
        f"`pycomm tune --show` on the hosts, and make PYCOMM_ALGORITHMS and the tuned tables equal, or remove them"
    )
