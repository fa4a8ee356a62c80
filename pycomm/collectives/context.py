"""Which group a call is for, and how: the default group, torch's groups, ranks, operators, the extra keywords."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ..config import seconds
from ..errors import ConfigError
from ..sizes import integer
from ..types import PremulSum, ReduceOp
from .group import Group
from .short_cuts import not_now
from .tensors import operator_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "NON_MEMBER",
    "CallOptions",
    "GroupLike",
    "NonMember",
    "OpLike",
    "Options",
    "default_group",
    "is_non_member",
    "parse_op",
    "parse_options",
    "resolve",
    "root_rank",
    "state",
]


class NonMember:
    """What ``new_group`` and ``split`` return on a rank that is not in the group.

    Every call with it raises ConfigError.
    """

    ranks: tuple[int, ...] = ()
    rank = -1
    fast_batch_isend_irecv = fast_irecv = fast_isend = staticmethod(not_now)

    def close(self) -> None:
        """Does nothing, so that members and others may end a group alike."""

    def __enter__(self) -> NonMember:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "pycomm.NON_MEMBER"


NON_MEMBER = NonMember()


def is_non_member(group: Any) -> bool:
    """Says whether ``group`` stands for one that this rank is not in: NON_MEMBER, or what torch's new_group returns."""
    if isinstance(group, NonMember):
        return True
    import torch.distributed as dist

    outside = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    return outside is not None and type(group) is type(outside) and bool(group == outside)


GroupLike = "Group | NonMember | ProcessGroup | None"  # for docstrings; the verbs annotate Any, as torch's stubs do
OpLike = ReduceOp | PremulSum | Any  # torch's ReduceOp is not a Python enum


class _State:
    """The default group of the process, and of each thread that is a rank of a LocalWorld."""

    __slots__ = ("by_thread", "local_rank", "lock", "torch_groups", "world")

    def __init__(self) -> None:
        # While there is none, NON_MEMBER stands in: its short cuts lead to the ordinary path, which asks
        # default_group().
        self.world: Group | NonMember = NON_MEMBER
        self.by_thread = threading.local()
        self.local_rank = 0
        self.torch_groups: dict[ProcessGroup, Group] = {}
        self.lock = threading.Lock()


state = _State()


def default_group() -> Group | None:
    """Returns the group that ``init`` made for this thread or process, or None."""
    if isinstance(state.world, Group):
        return state.world
    return getattr(state.by_thread, "world", None)


def resolve(group: Any) -> Group:
    """Returns the Group that ``group`` means: itself, the default for None, a wrapper for a torch ProcessGroup.

    Without ``pycomm.init`` an initialized torch.distributed is joined on first use. Raises ConfigError for anything
    else.
    """
    if group is None:
        found = default_group()
        if found is None:
            from .init import init_from_torch

            found = init_from_torch()
    elif isinstance(group, Group):
        found = group
    elif is_non_member(group):
        whose = "pycomm.NON_MEMBER" if isinstance(group, NonMember) else "torch's GroupMember.NON_GROUP_MEMBER"
        raise ConfigError(
            f"this rank is not a member of the group ({whose}); only members may call its collectives, which are those "
            f"whose pycomm.rank(group) is not -1"
        )
    else:
        found = _wrap_torch(group)
    found.check_open()
    return found


def _wrap_torch(group: Any) -> Group:
    import torch.distributed as dist

    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ConfigError(
            f"group: expected a pycomm.Group, a torch ProcessGroup or None, got {type(group).__name__}: {group!r}"
        )
    own = _own_group(group)
    if own is not None:
        return own
    if group not in state.torch_groups:
        _close_destroyed()
    with state.lock:
        found = state.torch_groups.get(group)
        if found is None:
            from ..transport import TRANSPORTS

            transport = TRANSPORTS.load("torch").wrap(group)
            name = f"torch:{group.group_name}"
            found = Group(transport, name, dist.get_process_group_ranks(group), lambda _: _forget(group))
            state.torch_groups[group] = found
        return found


def _close_destroyed() -> None:
    """Gives back what belongs to torch's groups that were destroyed, which tells nobody."""
    from torch.distributed.distributed_c10d import _world

    for group, ours in list(state.torch_groups.items()):
        if group not in _world.pg_map:
            ours.close()


def _own_group(group: ProcessGroup) -> Group | None:
    """Returns the Group inside a process group of the backend "pycomm", None for those of other backends."""
    import torch

    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return None
    found = getattr(backend, "pycomm_group", None)
    return found if isinstance(found, Group) else None


def _forget(group: ProcessGroup) -> None:
    state.torch_groups.pop(group, None)


def root_rank(
    group: Group, global_rank: int | None, group_rank: int | None, word: str, default: int | None = None
) -> int:
    """Returns the root's rank in ``group``, from its global rank or its rank in the group, whichever is given.

    ``word`` is "src" or "dst"; ``default`` is the global rank if neither is given. Raises ConfigError.
    """
    if global_rank is not None and group_rank is not None:
        raise ConfigError(f"expected {word} or group_{word}, got both: {global_rank} and {group_rank}; pass one")
    if group_rank is None:
        global_rank = default if global_rank is None else global_rank
        if global_rank is None:
            raise ConfigError(f"expected {word} (a global rank) or group_{word} (a rank of the group), got neither")
        return group.group_rank(global_rank)
    rank = integer(group_rank)
    if rank is None or not 0 <= rank < group.world_size:
        raise ConfigError(f"group_{word}: expected a rank in 0..{group.world_size - 1}, got {group_rank!r}")
    return rank


def parse_op(op: OpLike) -> tuple[ReduceOp, float]:
    """Returns the operator and this rank's factor.

    Takes ours and torch's, torch's premul sums too. Raises ConfigError.
    """
    if isinstance(op, ReduceOp) and op is not ReduceOp.PREMUL_SUM:
        return op, 1.0
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM, op.factor
    kind = getattr(op, "op", op)  # torch: a ReduceOp wraps a RedOpType
    name = getattr(kind, "name", None)
    if name == "PREMUL_SUM":
        factor = None if isinstance(op, ReduceOp) else getattr(op, "factor", None)
        if factor is None:
            raise ConfigError("op PREMUL_SUM needs this rank's factor; pass pycomm.premul_sum(factor)")
        return ReduceOp.PREMUL_SUM, float(factor)
    if type(op).__module__.startswith("torch") and (found := operator_of(kind)) is not None:
        return found, 1.0
    known = ", ".join(ReduceOp.__members__)
    raise ConfigError(
        f"unknown op {op!r}; known: {known} (of pycomm.ReduceOp or torch's), and pycomm.premul_sum(factor)"
    )


class CallOptions(TypedDict, total=False):
    """The extra keywords of every collective; all may be None.

    ``algorithm``: "auto" (as None), "native" (the transport's own) or a registered name such as "direct".
    ``compression``: None, "none", a text such as "int8" or "topk:0.01+ef", a dict, or a compressor, for all_reduce,
    reduce_scatter and all_gather (docs/compression.md). ``name``: the tensor's name, for compressors that keep state.
    ``timeout``: seconds or a timedelta for this call, instead of the group's.
    """

    algorithm: str | None
    compression: Any
    name: str | None
    timeout: float | timedelta | None


class Options(NamedTuple):
    """``CallOptions``, checked."""

    algorithm: str | None = None
    timeout_s: float | None = None
    compression: Any = None  # a text, or a compressor
    name: str | None = None


_DEFAULT = Options()


def parse_options(
    algorithm: str | None = None,
    compression: Any = None,
    name: str | None = None,
    timeout: float | timedelta | None = None,
) -> Options:
    """Checks the extra keywords of a call. Raises ConfigError, and TypeError for a keyword that does not exist."""
    if algorithm is None and compression is None and timeout is None:
        return _DEFAULT  # a name without compression says nothing
    if compression is None or compression == "none":
        return Options(algorithm, None if timeout is None else seconds(timeout))
    from ..compression import checked_spec  # loads on the first compressed call

    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name: expected the tensor's name, a str, got {type(name).__name__}: {name!r}")
    return Options(algorithm, None if timeout is None else seconds(timeout), checked_spec(compression), name)
