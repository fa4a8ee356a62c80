"""The writing side of the board: what this process's ranks call, where others can read it while the job hangs.

``csrc/shm/board.h`` says what a board is. ``init`` makes one, a memfd without a name, and opens those of the other
ranks of the host through /proc, which the kernel allows to processes of the same user; they stay readable when a rank
has been killed. Over ``shm`` the native core writes each call itself; for everything else a group's ``Recorder`` does.
``pycomm/monitor`` reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

from ..algorithms._agreement import FRAMES
from ..errors import NativeUnavailableError, TransportError
from ..ops import native
from ..transport._wording import CALLS
from ..types import dtype_of_name
from .hooks import unwatched, watched

if TYPE_CHECKING:
    import torch

    from ..config import Config
    from .call import Call
    from .compression_wire import CompressionReport
    from .group import Group

__all__ = ["Boards", "Recorder", "boards", "disown_boards", "group_key", "keep_boards", "leave_boards", "new_boards"]

_CODES = {verb: code for code, verb in enumerate(CALLS)}
_SUM = 0
_WIRE_NAME = "compressed"


class Boards:
    """This process's board, and the descriptors of the boards of its host's other ranks."""

    def __init__(self) -> None:
        self.own = native().Board()
        self.job = 0
        self.peers: dict[int, int] = {}  # rank in the group that init returned -> descriptor
        self._address = [os.getpid(), self.own.fd, secrets.randbits(62) | 1]

    def address(self) -> list[int]:
        """Returns what the other ranks need to open this board: process, descriptor, and a number of its own."""
        return self._address

    def meet(self, addresses: Sequence[Any], host_ids: Sequence[str], rank: int) -> None:
        """Opens the boards of this host's other ranks. One that may not be opened (another namespace) stays closed."""
        first = addresses[0]
        self.job = int(first[2]) if first else 1
        self.own.set_job(self.job, rank, len(addresses))
        for member, address in enumerate(addresses):
            if member != rank and address and host_ids[member] == host_ids[rank]:
                with contextlib.suppress(OSError):
                    self.peers[member] = open_board(int(address[0]), int(address[1]))

    def close(self) -> None:
        """Gives the other ranks' boards back; this process's own goes with its groups."""
        while self.peers:
            os.close(self.peers.popitem()[1])


def open_board(pid: int, fd: int) -> int:
    """Opens descriptor ``fd`` of process ``pid``, which must be a board; returns a descriptor. Raises OSError."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    is_board = "memfd:pycomm-board" in os.readlink(f"/proc/self/fd/{opened}")
    if is_board and os.fstat(opened).st_size == native().board_layout()["total"]:
        return opened
    os.close(opened)
    raise FileNotFoundError(f"process {pid} has no board of this version of pycomm at descriptor {fd}")


class _Current:
    boards: Boards | None = None
    users: ClassVar[list[Group]] = []  # the open groups of all ranks of a job that they, and their watch, are there for


def boards() -> Boards | None:
    """Returns this process's boards, None while nothing is recorded."""
    return _Current.boards


def new_boards(is_wanted: bool) -> tuple[Boards | None, list[int] | None]:
    """Makes this process's boards, for a job whose ranks are about to meet; returns them and their address.

    Returns None twice where some are in use, for another group of all ranks, or none are wanted, or can be.
    """
    if _Current.users:
        return None, None
    _close_boards()
    if is_wanted:
        with contextlib.suppress(NativeUnavailableError, TransportError):
            _Current.boards = Boards()
    own = _Current.boards
    return own, None if own is None else own.address()


def keep_boards(group: Group, own: Boards | None, store: Any, config: Config, host_ids: Sequence[str]) -> None:
    """Keeps this process's boards as long as ``group`` is open, and starts their watch if ``own`` are new.

    ``store`` is the watch's own.
    """
    if own is not None:
        watched(group, store, config, host_ids)
    if _Current.boards is not None:
        _Current.users.append(group)


def leave_boards(group: Group) -> None:
    """``group`` closes. With the last one end the watch, whose thread reads the boards, and then they."""
    if group in _Current.users:
        _Current.users.remove(group)
        if not _Current.users:
            unwatched()
            _close_boards()


def disown_boards() -> object:
    """Makes a forked child have no boards; returns what it has to keep, since it closes nothing of its parent's."""
    kept = _Current.boards, list(_Current.users)
    _Current.boards = None
    _Current.users.clear()
    return kept


def _close_boards() -> None:
    if _Current.boards is not None:
        _Current.boards.close()
    _Current.boards = None


def group_key(name: str, ranks: Sequence[int]) -> int:
    """Returns what a group is told by on the boards: the same number on every rank of it."""
    return int.from_bytes(blake2b(repr((name, tuple(ranks))).encode(), digest_size=7).digest(), "little")


class Recorder:
    """Writes the calls of one group on the board, but for those that the native core writes itself."""

    def __init__(self, board: Any, log: Any, group: Group) -> None:
        self._transport = group.transport
        self._board = board
        self.log = log
        self._algorithms: dict[str, int] = {}
        self._seq = 0
        self._transport.record_on(log)

    @classmethod
    def of(cls, group: Group) -> Recorder | None:
        """Returns the recorder of a new group, None if nothing is recorded, or if the board has no room for it."""
        if _Current.boards is None or group.transport.name == "local":
            return None
        board = _Current.boards.own
        key = group_key(group.name, group.ranks)
        log = board.add_group(group.name, group.transport.name, key, group.rank, group.world_size)
        return None if log is None else cls(board, log, group)

    def begin(self, call: Call, algorithm: str) -> None:
        """A call of the ordinary path begins."""
        first = call.collectives[0]
        size = self._transport.world_size
        nbytes = sum(each.whole_numel(size) * each.dtype.itemsize for each in call.collectives)
        part = first.output if first.verb in ("reduce_scatter_single", "scatter", "broadcast") else first.input
        numel = 0 if part is None or first.verb == "all_to_all_single" else part.numel()
        op = _SUM if first.op is None else int(first.op)
        self._begin(_CODES[first.verb], op, _code_of(first.dtype), algorithm, first.root, numel, nbytes)

    def record(self, call: Any) -> None:
        """Lets a native FrameCall write its calls itself, by the numbers of ``next_seq``."""
        call.record_on(self.log, self._number_of(FRAMES), self._number_of("native"))

    def next_seq(self) -> int:
        """Returns the number of the call that begins, as the errors have it."""
        self._seq = max(self._transport.calls, self._seq) + 1
        return self._seq

    @contextlib.contextmanager
    def exchange(self, verb: str, nbytes: int) -> Iterator[None]:
        """The span of a call that swaps ``nbytes`` of each rank and is no collective of the user's."""
        self._begin(_CODES[verb], 0, 0, "native", 0, nbytes, nbytes)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self.end(has_failed=not is_done)

    def _begin(self, verb: int, op: int, dtype: int, algorithm: str, root: int, numel: int, nbytes: int) -> None:
        number, is_plan = self._number_of(algorithm), algorithm not in ("native", _WIRE_NAME)
        seq = 0 if self._transport.compares_calls else self.next_seq()  # 0: the native core numbers it
        self.log.begin(verb, op, dtype, number, is_plan, root, numel, nbytes, seq)

    def _number_of(self, algorithm: str) -> int:
        number = self._algorithms.get(algorithm)
        if number is None:
            number = self._algorithms[algorithm] = self._board.intern(algorithm)
        return number

    def end(self, report: CompressionReport | None = None, has_failed: bool = False) -> None:
        """The call is over; ``report`` is what a compressed one moved."""
        self.log.end(0 if report is None else report.wire_bytes, has_failed)


@cache
def _code_of(dtype: torch.dtype) -> int:
    known = dtype_of_name(str(dtype).removeprefix("torch."))
    return 0 if known is None else known.code
