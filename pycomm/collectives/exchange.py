"""What the ranks tell each other before a transport joins them, through the store alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..algorithms.tables import Table
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, PycommError, TransportError
from ..topology import host_id
from ..transport import Patience
from .agreement import check_digests

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Ranks", "exchange_hosts"]


class Ranks(NamedTuple):
    """What every rank said of itself: its host's id, and where its board is (None where it has none)."""

    host_ids: tuple[str, ...]
    boards: tuple[Any, ...]


def exchange_hosts(
    store: Store,
    rank: int,
    world_size: int,
    transport: str,
    table: Table,
    patience: Patience,
    board: Sequence[int] | None = None,
) -> Ranks:
    """Returns what every rank says of itself; ``board`` is where this one's board is.

    Raises CollectiveTimeoutError, naming who is missing, if a rank does not come within ``patience``, and
    CollectiveMismatchError if the ranks ask for different transports or world sizes, or go by different tables of
    algorithms.
    """
    keys = [f"rank{member}" for member in range(world_size)]
    mine = {"host": host_id(), "transport": transport, "world_size": world_size, "algorithms": table.digest}
    mine["board"] = board
    store.set(keys[rank], json.dumps(mine))
    try:
        patience.wait(store, keys)
        # All at once where the store can: a world of 64 would ask 4,096 times.
        can_multi_get = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
        raw = store.multi_get(keys) if can_multi_get else [store.get(key) for key in keys]
    except PycommError:  # somebody is lost
        raise
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
        raise _missing(store, keys, rank, world_size, patience.timeout_s) from error
    told = [_parse(value, member) for member, value in enumerate(raw)]
    for name in ("transport", "world_size"):
        values = {entry.get(name) for entry in told}
        if values != {mine[name]}:
            listed = ", ".join(f"rank {member}: {entry.get(name)!r}" for member, entry in enumerate(told))
            raise CollectiveMismatchError(
                f"init on rank {rank} of {world_size}: ranks differ in {name}: {listed}; make them equal"
            )
    check_digests([entry.get("algorithms") for entry in told], table, rank)
    return Ranks(tuple(str(entry.get("host")) for entry in told), tuple(entry.get("board") for entry in told))


def _parse(value: bytes, member: int) -> dict[str, object]:
    try:
        entry = json.loads(value)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise TransportError(
            f"init: what rank {member} left in the store cannot be read ({value[:40]!r}); is the store shared?"
        )
    return entry


def _missing(store: Store, keys: list[str], rank: int, world_size: int, timeout_s: float) -> Exception:
    try:
        absent = [member for member, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as error:
        return TransportError(
            f"init on rank {rank} of {world_size}: the store is gone ({error}); see whether rank 0 still runs"
        )
    return CollectiveTimeoutError(
        f"init on rank {rank} of {world_size}: ranks {absent} did not come within {timeout_s:g} s; "
        f"see whether they were started and call pycomm.init() too, or raise the timeout"
    )
