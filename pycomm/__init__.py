"""pycomm: collective communication for Python and PyTorch, for ranks that are not all joined by NVLink.

    import pycomm

    with pycomm.init():
        pycomm.all_reduce(tensor)

Importing starts no thread, reads no environment and loads neither torch nor a native library: names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import Config
from .errors import (
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    NativeUnavailableError,
    PeerLostError,
    PlanError,
    PycommError,
    TransportError,
)
from .types import PremulSum, ReduceOp, premul_sum

if TYPE_CHECKING:
    from . import compression, monitor, overlap
    from .collectives.coalescing import coalescing
    from .collectives.compression_wire import CompressionReport
    from .collectives.context import NON_MEMBER
    from .collectives.explain import explain
    from .collectives.group import Group
    from .collectives.hooks import CollectiveRecord
    from .collectives.init import (
        finalize,
        get_group,
        init,
        is_initialized,
        local_rank,
        new_group,
        rank,
        split,
        world_size,
    )
    from .collectives.lists import all_gather, all_to_all, gather, reduce_scatter, scatter
    from .collectives.memory import empty, zeros
    from .collectives.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from .collectives.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
    from .collectives.verbs import (
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_reduce_mean,
        all_to_all_single,
        barrier,
        broadcast,
        reduce,
        reduce_scatter_single,
        reduce_scatter_tensor,
    )
    from .collectives.work import Work
    from .engines.clip import clip_grad_norm_
    from .engines.ddp import DistributedDataParallel
    from .engines.fsdp import FullyShardedDataParallel, fully_shard
    from .engines.mesh import Mesh
    from .engines.optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
    from .engines.pipeline.pipeline import Pipeline
    from .engines.planning.parallelism import plan_parallelism
    from .engines.sampler import DistributedSampler
    from .monitor.integrity import verify
    from .overlap.stream import CommStream

__version__ = "0.1.0"

_MODULE_OF = {
    name: f"pycomm.{module}"
    for module, names in {
        "collectives.coalescing": "coalescing",
        "collectives.compression_wire": "CompressionReport",
        "collectives.context": "NON_MEMBER",
        "collectives.explain": "explain",
        "collectives.group": "Group",
        "collectives.hooks": "CollectiveRecord",
        "collectives.init": "finalize get_group init is_initialized local_rank new_group rank split world_size",
        "collectives.lists": "all_gather all_to_all gather reduce_scatter scatter",
        "collectives.memory": "empty zeros",
        "collectives.objects": "all_gather_object broadcast_object_list gather_object recv_object_list "
        "scatter_object_list send_object_list",
        "collectives.p2p": "P2POp batch_isend_irecv irecv isend recv send",
        "collectives.verbs": "all_gather_into_tensor all_gather_single all_reduce all_reduce_mean all_to_all_single "
        "barrier broadcast reduce reduce_scatter_single reduce_scatter_tensor",
        "collectives.work": "Work",
        "engines.clip": "clip_grad_norm_",
        "engines.ddp": "DistributedDataParallel",
        "engines.fsdp": "FullyShardedDataParallel fully_shard",
        "engines.mesh": "Mesh",
        "engines.pipeline.pipeline": "Pipeline",
        "engines.planning.parallelism": "plan_parallelism",
        "engines.sampler": "DistributedSampler",
        "engines.optimizer": "DistributedOptimizer broadcast_optimizer_state broadcast_parameters",
        "monitor.integrity": "verify",
        "overlap.stream": "CommStream",
    }.items()
    for name in names.split()
}
_PACKAGES = ("compression", "monitor", "overlap")

__all__ = [
    "NON_MEMBER",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveRecord",
    "CollectiveTimeoutError",
    "CommStream",
    "CompressionReport",
    "Config",
    "ConfigError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "FullyShardedDataParallel",
    "Group",
    "Mesh",
    "NativeUnavailableError",
    "P2POp",
    "PeerLostError",
    "Pipeline",
    "PlanError",
    "PremulSum",
    "PycommError",
    "ReduceOp",
    "TransportError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "coalescing",
    "compression",
    "empty",
    "explain",
    "finalize",
    "fully_shard",
    "gather",
    "gather_object",
    "get_group",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "local_rank",
    "monitor",
    "new_group",
    "overlap",
    "plan_parallelism",
    "premul_sum",
    "rank",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split",
    "verify",
    "world_size",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"pycomm.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'pycomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # next time it is an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
