"""The reading side of the board: this process's, the other ranks', or those of any job of this user on this host.

``csrc/shm/board.h`` says what a board is. Reading one disturbs nobody: it is a file that the ranks have mapped. A rank
that was killed can no longer be asked, but its board is held by the others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import TransportError
from ..ops import native
from ..transport._wording import CALLS, describe_call

__all__ = ["Board", "CallRecord", "GroupOnBoard", "boards_of_host", "name_on_board"]

# As csrc/shm/board.h has them.
_HEADER = struct.Struct("<QQQQIIQQQQQIIQ")
_GROUP = np.dtype(
    [
        ("name", "S48"),
        ("transport", "S16"),
        ("members", "<u8"),
        ("rank", "<u4"),
        ("ranks", "<u4"),
        ("state", "<u8"),
        ("_", "<u8", 5),
        ("seq", "<u8"),
        ("ended", "<u8"),
        ("latest", "<u8"),
        ("mail_since", "<u8"),
        ("mail_peer", "<i4"),
        ("__", "<u4", 7),
    ]
)
_RECORD = np.dtype(
    [
        ("stamp", "<u8"),
        ("seq", "<u8"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("numel", "<u8"),
        ("bytes", "<u8"),
        ("verb", "u1"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("root", "<i4"),
        ("group", "<u2"),
        ("algorithm", "u1"),
        ("_", "u1"),
        ("peer", "<i4"),
    ]
)
_NAME_BYTES = _GROUP["name"].itemsize - 1  # the last one is 0
_FAILED = 1
_OPEN = 1
_CLOCK_TRIES = 3


def name_on_board(name: str) -> str:
    """Returns as much of a group's name as a board has of it."""
    return name.encode()[:_NAME_BYTES].decode(errors="ignore")


class CallRecord(NamedTuple):
    """One call of this process. Times are of ``time.monotonic_ns``; ``end_ns`` is 0 while it is under way.

    ``peer`` is the rank waited for: -1 nobody, -2 anybody. ``numel`` counts one rank's part, ``nbytes`` the whole
    buffer.
    """

    number: int
    group: int
    seq: int
    verb: str
    op: int
    dtype: int
    root: int
    numel: int
    nbytes: int
    algorithm: str
    start_ns: int
    end_ns: int
    peer: int
    has_failed: bool

    def describe(self) -> str:
        """Returns ``all_reduce(SUM, float32, 1024 elements)``."""
        return describe_call(self.verb, self.op, self.dtype, self.numel, self.root)


@dataclass(frozen=True)
class GroupOnBoard:
    """A group as one of its ranks wrote it down. ``seq`` is its last call begun, ``ended`` the last that ended."""

    index: int
    name: str
    transport: str
    members: int
    rank: int
    world_size: int
    is_open: bool
    seq: int
    ended: int
    latest: int
    mail_peer: int | None  # whose message is waited for; -2 anybody's, None if none is


class Board:
    """One process's board, mapped. ``is_alive`` and ``state`` look at the process."""

    def __init__(self, fd: int) -> None:
        """Takes a descriptor over. Raises TransportError if it is no board of this version of pycomm."""
        self._fd = fd
        self._at = native().board_layout()
        if os.fstat(fd).st_size != self._at["total"]:
            raise TransportError("this is no board of this version of pycomm; use the pycomm that the job uses")
        self._data = mmap.mmap(fd, self._at["total"])
        magic, _, self.pid, _, _, _, self._ticks, self._monotonic_ns, _, self._start, self._has_tsc, *_ = self._header()
        if magic != self._at["magic"]:
            raise TransportError("this is no board of this version of pycomm; use the pycomm that the job uses")

    def _header(self) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._data)

    def close(self) -> None:
        """Gives the mapping and the descriptor back."""
        self._data.close()
        os.close(self._fd)

    # -- whose it is ---------------------------------------------------------------------------------------------------

    @property
    def job(self) -> int:
        """The job's number, the same on every rank; 0 before ``init`` is through."""
        return self._header()[3]

    @property
    def rank(self) -> int:
        """This process's rank in the group that init returned."""
        return self._header()[4]

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self._header()[5]

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.state != ""

    @property
    def state(self) -> str:
        """The process's state as the kernel has it: R, S, D, T (stopped), or "" if it has ended or is being ended."""
        state, start = native().look_at_process(self.pid)
        return state if start == self._start else ""  # else another process has its pid by now

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def ns_per_tick(self) -> float:
        """How long a tick is: the more precise the older the board."""
        if not self._has_tsc:
            return 1.0
        tries = []  # of which the fastest counts: a process can be stopped between two reads, for seconds
        for _ in range(_CLOCK_TRIES):
            before_ns, ticks, after_ns = time.monotonic_ns(), native().board_ticks(True), time.monotonic_ns()
            tries.append((after_ns - before_ns, ticks, (before_ns + after_ns) // 2))
        _, ticks, now_ns = min(tries)
        return float((now_ns - self._monotonic_ns) / max(1, ticks - self._ticks))

    def groups(self) -> list[GroupOnBoard]:
        """Returns the groups of this process, those that are closed too."""
        table = np.frombuffer(self._copy("groups", self._at["group_count"] * _GROUP.itemsize), _GROUP)
        found = []
        for index, row in enumerate(table):
            if row["state"]:
                found.append(
                    GroupOnBoard(
                        index=index,
                        name=bytes(row["name"]).decode(errors="ignore"),  # it may be cut in the middle of a character
                        transport=bytes(row["transport"]).decode(errors="replace"),
                        members=int(row["members"]),
                        rank=int(row["rank"]),
                        world_size=int(row["ranks"]),
                        is_open=bool(row["state"] == _OPEN),
                        seq=int(row["seq"]),
                        ended=int(row["ended"]),
                        latest=int(row["latest"]),
                        mail_peer=int(row["mail_peer"]) if row["mail_since"] else None,
                    )
                )
        return found

    def records(self) -> list[CallRecord]:
        """Returns the calls that are still on the board, oldest first."""
        count = self._at["record_count"]
        table = np.frombuffer(self._copy("records", count * _RECORD.itemsize), _RECORD)
        whole = table[(table["stamp"] > 0) & (table["stamp"] % 2 == 0)]
        scale = self.ns_per_tick
        return [self._record(row, scale) for row in whole[np.argsort(whole["stamp"])].tolist()]

    def latest(self, group: GroupOnBoard) -> CallRecord | None:
        """Returns the last call of a group, None if it has made none, or none for so long that it is not here."""
        if not group.latest:
            return None
        at = self._at["records"] + (group.latest - 1) % self._at["record_count"] * _RECORD.itemsize
        row = np.frombuffer(self._data[at : at + _RECORD.itemsize], _RECORD)[0].tolist()
        return self._record(row, self.ns_per_tick) if row[0] == 2 * group.latest else None

    def _record(self, row: tuple[Any, ...], scale: float) -> CallRecord:
        stamp, seq, start, end, numel, nbytes, verb, op, dtype, flags, root, group, algorithm, _, peer = row
        return CallRecord(
            number=stamp // 2 - 1,
            group=group,
            seq=seq,
            verb=CALLS[verb] if verb < len(CALLS) else "?",
            op=op,
            dtype=dtype,
            root=root,
            numel=numel,
            nbytes=nbytes,
            algorithm=self.algorithm(algorithm),
            start_ns=self.to_ns(start, scale),
            end_ns=self.to_ns(end, scale) if end else 0,
            peer=peer,
            has_failed=bool(flags & _FAILED),
        )

    def to_ns(self, ticks: int, scale: float) -> int:
        """Returns a moment as ``time.monotonic_ns`` has it; ``scale`` is ``ns_per_tick``."""
        return self._monotonic_ns + round((ticks - self._ticks) * scale)

    def algorithm(self, number: int) -> str:
        """Returns an algorithm's name."""
        known = self._names
        if number not in known:
            at = self._at["names"] + number * self._at["name_bytes"]
            known[number] = self._text(at, self._at["name_bytes"]) if number < 255 else "?"
        return known[number]

    @cached_property
    def _names(self) -> dict[int, str]:
        return {}

    def classes(self) -> np.ndarray[Any, Any]:
        """Returns the table of call classes, those in use: see CallClass in board.h. Times are in ticks."""
        kind = np.dtype(
            [
                *((name, "<u8") for name in ("key", "calls", "bytes", "wire_bytes", "ticks", "most_ticks")),
                *((name, "<f8") for name in ("recent_bytes", "recent_ticks")),
                ("buckets", "<u4", self._at["buckets"]),
            ]
        )
        table = np.frombuffer(self._copy("classes", self._at["class_count"] * kind.itemsize), kind)
        return table[table["calls"] > 0]

    @property
    def calls(self) -> int:
        """How many calls this process has made."""
        return int(struct.unpack_from("<Q", self._data, self._at["record_number"])[0])

    def ask(self, timeout_s: float) -> str | None:
        """Returns what the process says of where its threads stand, None if it does not answer in time."""
        if not native().ask_board(self._fd, timeout_s):
            return None
        return self._text(self._at["answer"], self._at["text_bytes"])

    def verdict(self) -> str:
        """Returns the last verdict that this rank has reached."""
        return self._text(self._at["verdict"], self._at["text_bytes"])

    def _copy(self, table: str, nbytes: int) -> bytes:
        return self._data[self._at[table] : self._at[table] + nbytes]

    def _text(self, at: int, nbytes: int) -> str:
        return self._data[at : at + nbytes].split(b"\0", 1)[0].decode(errors="replace")


def _descriptors(pid: int) -> Iterator[tuple[str, int]]:
    """Yields (path, inode) of the boards that a process holds."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith("/memfd:pycomm-board"):
                    yield path, os.stat(path).st_ino


def _own_pid(pid: int) -> int:
    """Returns a process's number in its own pid namespace."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
    return -1


def boards_of_host() -> dict[int, list[Board]]:
    """Returns the boards of all jobs of this user on this host, by job, ordered by rank.

    Also of ranks that were killed, as long as another rank of their job on this host lives. Boards of another version
    of pycomm are left out.
    """
    found: dict[int, Board] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        for path, inode in _descriptors(pid):
            if inode not in found:
                with contextlib.suppress(OSError, TransportError):
                    found[inode] = Board(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            board = found.get(inode)
            if board is not None and board.pid != pid and _own_pid(pid) == board.pid:
                board.pid = pid  # it runs in a container, which has numbers of its own
    jobs: dict[int, list[Board]] = {}
    for board in sorted(found.values(), key=lambda each: each.rank):
        if board.job:
            jobs.setdefault(board.job, []).append(board)
        else:
            board.close()
    return jobs
