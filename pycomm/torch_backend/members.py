"""What torch asks of a process group besides collectives: messages, coalescing, its properties and its end."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..collectives.p2p import start_message
from ..config import seconds
from ..errors import CollectiveTimeoutError
from .calls import Calls
from .ranges import range_of_call
from .work import CallWork, joined_work

if TYPE_CHECKING:
    from ..collectives.group import Group
    from .options import Options

__all__ = ["Members"]

# Torch keeps the C++ half of an instance and lets the Python half go (in DETAIL mode, for one): these are kept here.
_instances: set[Members] = set()


class Members(Calls):
    """All of a process group but its base class of torch's."""

    def _set_up(self, group: Group, options: Options, store: Any = None) -> None:
        super()._set_up(group, options)
        self._store = store
        self._barriers = 0
        self._starting = threading.Lock()
        _instances.add(self)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> CallWork:
        """Starts sending a tensor to rank ``dst`` of the group."""
        return self._message("isend", tensors, dst, tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> CallWork:
        """Starts receiving a tensor from rank ``src`` of the group."""
        return self._message("irecv", tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> CallWork:
        """Starts receiving a tensor from any rank; the handle's ``source_rank()`` says from which."""
        return self._message("irecv", tensors, None, tag)

    def _message(self, verb: str, tensors: Sequence[torch.Tensor], peer: int | None, tag: int) -> CallWork:
        (tensor,) = tensors
        # Where messages move by themselves none waits for a collective: another thread's may wait for this very one.
        lock = self._starting if self.group.transport.messages_are_free else self._lock
        with range_of_call(verb, tensors), lock:
            work = CallWork(verb, [start_message(self.group, verb, tensor, peer, tag)], tensors)
            if self._coalesced is not None:
                self._coalesced.append(work)
            return work

    # -- coalescing ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        """Until ``_end_coalescing`` calls do not block, and that returns one handle for all of them."""
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> CallWork:
        works, self._coalesced = self._coalesced or [], None
        return joined_work(works) if works else CallWork("coalesced calls", (), ())

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # torch 2.14's names

    # -- a barrier that names who is missing --------------------------------------------------------------------------

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 says who is missing after ``timeout``: the first, or all of them.

        It goes through the store and leaves the group as it is. Raises CollectiveTimeoutError on every rank that came.
        """
        timeout = getattr(timeout, "timeout", timeout)  # 2.14 passes BarrierOptions
        is_given = timeout is not None and timeout.total_seconds() > 0
        limit_s = seconds(timeout) if is_given else self.group.timeout_s
        self._barriers += 1
        prefix = f"monitored_barrier{self._barriers}"
        group = self.group
        self._store.set(f"{prefix}/{group.rank}", "here")
        if group.rank == 0:
            missing = self._absent(prefix, limit_s, wait_all_ranks)
            words = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not come" if missing else ""
            self._store.set(f"{prefix}/all", words)
        else:
            # Rank 0 may take its whole time, and must be able to say who is missing.
            try:
                self._store.wait([f"{prefix}/all"], timedelta(seconds=2 * limit_s))
                words = self._store.get(f"{prefix}/all").decode()
            except RuntimeError:
                words = "rank 0 did not come"
        if words:
            raise CollectiveTimeoutError(
                f"[monitored_barrier, group {group.name!r}, {group.member}] {words} within "
                f"{limit_s:g} s; see what those ranks do"
            )

    def _absent(self, prefix: str, limit_s: float, wants_all: bool) -> list[int]:
        deadline = time.monotonic() + limit_s
        missing = []
        for rank in range(1, self.group.world_size):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                self._store.wait([f"{prefix}/{rank}"], left)
            except RuntimeError:
                missing.append(rank)
                if not wants_all:
                    break
        return missing

    # -- what it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "pycomm"

    name = _get_backend_name = getBackendName

    # Torch 2.14 and 2.15 call themselves for ever on a property that a subclass does not have.
    @property
    def supports_splitting(self) -> bool:
        """Whether ``split_group`` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether a coalescing context makes one handle of its calls."""
        return True

    @property
    def supports_shrinking(self) -> bool:
        """A group does not shrink; pycomm.fault.Membership makes a new one."""
        return False

    supports_reconfigure = supports_window = supports_time_estimate = supports_shrinking
    _supports_time_estimate = supports_shrinking

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Torch cannot allocate from pycomm; ``pycomm.empty(..., shared=True)`` does."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives this rank has issued."""
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Every rank begins at 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Bounds the wait of each later call that names no timeout of its own."""
        self.group.timeout_s = self.group.transport.timeout_s = seconds(timeout)

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.group.settle()

    def _enable_collectives_timing(self) -> None:
        """The group's hooks time every call anyway."""

    def eager_connect_single_device(self, device: Any) -> None:
        """The ranks are connected from the beginning."""

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the group on this rank, after its calls."""
        _instances.discard(self)
        self.group.close()

    def abort(self) -> None:
        """Ends the group on all ranks: those that wait in a call get an error, this rank's own calls too."""
        self.group.transport.abandon()
        self.shutdown()


@atexit.register
def _shut_down_all() -> None:
    for instance in list(_instances):
        instance.shutdown()
