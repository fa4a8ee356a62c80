"""Makes a process group of the backend: what ``init_process_group`` and ``new_group`` call on each member."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.init import connect_group
from ..errors import ConfigError
from ..transport._gloo_group import connection_to
from . import DEVICES
from .members import Members
from .options import Options, checked

__all__ = ["create"]

MINIMUM = (2, 11)
HAS_PYTHON_BACKENDS = (2, 14)
_AWAITED = timedelta(seconds=30)


def create(c10d_options: Any, options: Any) -> Members:
    """Joins the members of a group and returns torch's view of it.

    ``c10d_options`` is c10d's DistributedBackendOptions. Raises ConfigError for a torch that is too old, a mixture of
    backends that this torch would not make, and options of another kind; and what ``pycomm.init`` raises.
    """
    version = torch_version()
    if version < MINIMUM:
        raise ConfigError(f"backend 'pycomm' needs torch 2.11 or later, and this is {torch.__version__}; upgrade torch")
    try:
        check_devices(_asked_devices(), version)
    except ConfigError:
        _await_members(c10d_options)
        raise
    options = Options() if options is None else checked(options)
    # A store of its own: a client of torch's TCPStore that waits for one thread lets no other ask.
    store, monitor_store = (_part(connection_to(c10d_options.store), name) for name in ("pycomm", "pycomm/monitor"))
    config = options.config(c10d_options.timeout)
    ranks = list(c10d_options.global_ranks_in_group) or None
    name = str(c10d_options.group_id or "world")
    is_whole = not dist.is_initialized() or c10d_options.group_size == dist.get_world_size()
    group = connect_group(
        store,
        c10d_options.group_rank,
        c10d_options.group_size,
        config,
        name,
        ranks,
        monitor_store=monitor_store if is_whole else None,
    )
    if version >= HAS_PYTHON_BACKENDS:
        from .backend import PycommBackend

        return PycommBackend(store, group, options)
    from .process_group import PycommProcessGroup

    return PycommProcessGroup(store, group, options)


def _await_members(c10d_options: Any) -> None:
    """Waits for all members to get here, though not for long, before this one leaves ``new_group`` with an error.

    Of several backends torch makes one after the other. gloo's, made before ours, would end with this rank while others
    are still connecting to it, and they would see a broken connection in place of what is wrong.
    """
    store = _part(connection_to(c10d_options.store), "pycomm/refused")
    keys = [str(rank) for rank in range(c10d_options.group_size)]
    store.set(keys[c10d_options.group_rank], "")
    with contextlib.suppress(RuntimeError):
        store.wait(keys, min(c10d_options.timeout, _AWAITED))


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # missing in the stubs


def torch_version() -> tuple[int, int]:
    """Returns torch's version as far as it matters here, such as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def check_devices(backends: dict[str, str], version: tuple[int, int]) -> None:
    """Raises ConfigError for backends by device, such as {"cpu": "gloo", "cuda": "pycomm"}, that cannot be."""
    mine = [device for device, backend in backends.items() if backend == "pycomm"]
    unknown = [device for device in mine if device not in DEVICES]
    if unknown:
        raise ConfigError(
            f"backend 'pycomm' serves {' and '.join(DEVICES)} tensors, not {', '.join(unknown)}; name another backend "
            f"for these, or none"
        )
    others = {device: backend for device, backend in backends.items() if backend != "pycomm"}
    if others and version < HAS_PYTHON_BACKENDS:
        asked = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise ConfigError(
            f"backend {asked!r}: torch {torch.__version__} would leave out {', '.join(sorted(set(others.values())))}, "
            f"as a backend written in Python is the whole group before torch 2.14; use 'pycomm' alone, or torch 2.14"
        )


def _asked_devices() -> dict[str, str]:
    """Returns the backend of each device that the user asked for. Torch does not pass it on, so it is looked up there:
    in the function of torch's that calls the maker of a backend.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = None if frame is None else frame.f_locals.get("backend_config")
    return {} if config is None else dict(config.get_device_backend_map())
