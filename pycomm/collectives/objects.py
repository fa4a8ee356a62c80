"""The verbs for Python objects, pickled on one side and unpickled on the other.

Unpickling runs code that the sender chose: use these verbs among ranks that you trust, or pass your own ``loads``
(bytes -> object) and ``dumps`` (object -> bytes), for example those of ``json`` with an encode and a decode. All ranks
pass the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from ..errors import CollectiveMismatchError, ConfigError
from .context import resolve, root_rank
from .group import Group
from .lists import all_gather
from .p2p import recv, send
from .verbs import all_gather_single, all_to_all_single, broadcast

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

Dumps = Callable[[Any], bytes]
Loads = Callable[[bytes], Any]

_MAX_BYTES = 1 << 40  # a length beyond this is a broken message, not an object


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, *, dumps: Dumps = pickle.dumps, loads: Loads = pickle.loads
) -> None:
    """Fills ``object_list (world_size)`` with the ranks' ``obj`` in rank order.

    Unpickling runs code that the sender chose: among ranks that are not trusted pass ``dumps`` (object -> bytes) and
    ``loads`` (bytes -> object) of your own, the same on all ranks, as to the other verbs for objects.
    """
    g = resolve(group)
    _check_list(g, object_list, "object_list")
    payload = _encode(g, [obj], dumps)[0]
    sizes = _all_gather_sizes(g, payload.numel())
    payloads = [torch.empty(size, dtype=torch.uint8, device=payload.device) for size in sizes]
    all_gather(payloads, payload, g)
    object_list[:] = [_decode(each, loads) for each in payloads]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    *,
    dumps: Dumps = pickle.dumps,
    loads: Loads = pickle.loads,
) -> None:
    """Fills ``object_gather_list`` on the root (default: global rank 0) with the ranks' ``obj``. Unpickles there."""
    g = resolve(group)
    root = root_rank(g, dst, group_dst, "dst", default=0)
    if g.rank == root:
        _check_list(g, object_gather_list, "object_gather_list")
    payload = _encode(g, [obj], dumps)[0]
    sizes = _all_gather_sizes(g, payload.numel())
    received = sizes if g.rank == root else [0] * g.world_size
    sent = [payload.numel() if rank == root else 0 for rank in range(g.world_size)]
    output = torch.empty(sum(received), dtype=torch.uint8, device=payload.device)
    all_to_all_single(output, payload, received, sent, g)
    if g.rank == root and object_gather_list is not None:
        object_gather_list[:] = [_decode(part, loads) for part in torch.split(output, sizes)]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    dumps: Dumps = pickle.dumps,
    loads: Loads = pickle.loads,
) -> None:
    """Replaces the entries of ``object_list`` by the root's (default: global rank 0). Unpickles on the other ranks.

    ``device`` is taken for torch's sake and not used.
    """
    g = resolve(group)
    root = root_rank(g, src, group_src, "src", default=0)
    is_root = g.rank == root
    payloads = _encode(g, object_list, dumps) if is_root else []
    sizes = torch.tensor(
        [each.numel() for each in payloads] if is_root else [0] * len(object_list),
        dtype=torch.int64,
        device=g.control_device,
    )
    broadcast(sizes, group=g, group_src=root)
    lengths = _checked_sizes(g, sizes)
    data = torch.cat(payloads) if payloads else torch.empty(sum(lengths), dtype=torch.uint8, device=g.control_device)
    broadcast(data, group=g, group_src=root)
    if not is_root:
        object_list[:] = [_decode(part, loads) for part in torch.split(data, lengths)] if lengths else []


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    *,
    dumps: Dumps = pickle.dumps,
    loads: Loads = pickle.loads,
) -> None:
    """Puts entry r of the root's input list (default root: global rank 0) first in rank r's output list. Unpickles."""
    g = resolve(group)
    root = root_rank(g, src, group_src, "src", default=0)
    if not scatter_object_output_list:
        raise ConfigError("scatter_object_output_list: expected a list with at least one entry, got none")
    payloads: list[torch.Tensor] = []
    if g.rank == root:
        _check_list(g, scatter_object_input_list, "scatter_object_input_list")
        payloads = _encode(g, scatter_object_input_list or [], dumps)
    sent = [payload.numel() for payload in payloads] or [0] * g.world_size
    sizes = torch.empty(g.world_size, dtype=torch.int64, device=g.control_device)
    all_to_all_single(sizes, torch.tensor(sent, dtype=torch.int64, device=g.control_device), group=g)
    received = _checked_sizes(g, sizes)
    data = torch.cat(payloads) if payloads else torch.empty(0, dtype=torch.uint8, device=g.control_device)
    output = torch.empty(sum(received), dtype=torch.uint8, device=g.control_device)
    all_to_all_single(output, data, received, sent, g)
    scatter_object_output_list[0] = _decode(output, loads)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    dumps: Dumps = pickle.dumps,
) -> None:
    """Sends the objects of ``object_list``; the receiver's list has as many entries.

    ``device`` and ``use_batch`` are taken for torch's sake and not used.
    """
    g = resolve(group)
    peer = root_rank(g, dst, group_dst, "dst")
    payloads = _encode(g, object_list, dumps)
    send(
        torch.tensor([each.numel() for each in payloads], dtype=torch.int64, device=g.control_device),
        group=g,
        group_dst=peer,
    )
    if payloads:
        send(torch.cat(payloads), group=g, group_dst=peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    loads: Loads = pickle.loads,
) -> int:
    """Fills ``object_list`` from a rank, or from any if no source is given; returns its global rank. Unpickles."""
    g = resolve(group)
    peer = None if src is None and group_src is None else root_rank(g, src, group_src, "src")
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=g.control_device)
    source = recv(sizes, group=g, group_src=peer)
    lengths = _checked_sizes(g, sizes)
    if lengths:
        data = torch.empty(sum(lengths), dtype=torch.uint8, device=g.control_device)
        recv(data, source, g)
        object_list[:] = [_decode(part, loads) for part in torch.split(data, lengths)]
    return source


def _encode(g: Group, objects: list[Any], dumps: Dumps) -> list[torch.Tensor]:
    encoded = [bytearray(dumps(obj)) for obj in objects]
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    tensors = [torch.frombuffer(data, dtype=torch.uint8) if data else empty for data in encoded]
    return [tensor.to(g.control_device) for tensor in tensors]


def _decode(payload: torch.Tensor, loads: Loads) -> Any:
    return loads(payload.cpu().numpy().tobytes())


def _all_gather_sizes(g: Group, num_bytes: int) -> list[int]:
    sizes = torch.empty(g.world_size, dtype=torch.int64, device=g.control_device)
    all_gather_single(sizes, torch.tensor([num_bytes], dtype=torch.int64, device=g.control_device), g)
    return _checked_sizes(g, sizes)


def _checked_sizes(g: Group, sizes: torch.Tensor) -> list[int]:
    """Returns lengths that came from peers, none of them negative or absurd."""
    lengths: list[int] = sizes.tolist()
    if any(not 0 <= length <= _MAX_BYTES for length in lengths):
        raise CollectiveMismatchError(
            f"object verb on group {g.name!r}, {g.member}: expected lengths of 0 to "
            f"{_MAX_BYTES} bytes, got {lengths}; make all ranks call the same object verb in the same order"
        )
    return lengths


def _check_list(g: Group, values: list[Any] | None, name: str) -> None:
    if not isinstance(values, list) or len(values) != g.world_size:
        got = f"{len(values)} entries" if isinstance(values, list) else type(values).__name__
        raise ConfigError(f"{name}: expected a list of {g.world_size} entries, one a rank, got {got}")
