"""The words of every error about a call that failed between ranks: the one place where they are written.

All transports, native ones too (``from_native``), build their errors here, so a death, a timeout or a disagreement
reads the same whatever carries the bytes: verb and sequence number, group, this rank; the other rank, its pid and what
became of it; what each side passed; what to do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, PycommError, TransportError
from ..types import VERBS, ReduceOp, dtype_of_code

__all__ = [
    "CALLS",
    "CODES",
    "Failure",
    "Place",
    "Remembered",
    "as_member",
    "called",
    "describe_call",
    "explainers",
    "failed",
    "fate",
    "forked",
    "from_native",
    "globally",
    "mismatch",
    "other_thread",
    "splits_differ",
    "timed_out",
    "used_closed",
    "whom_awaited",
    "why",
    "wrong_size",
]

# Codes of what ranks call, shared with csrc/shm/group.h; new_group has none there.
CALLS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter_single",
    "broadcast",
    "all_gather_single",
    "all_to_all_single",
    "gather",
    "scatter",
    "new_group",
)
_REDUCES = ("all_reduce", "reduce", "reduce_scatter_single")
_HAS_ROOT = ("reduce", "broadcast", "gather", "scatter")
assert set(CALLS) == {*VERBS, "new_group"}
CODES = {verb: code for code, verb in enumerate(CALLS)}

_E = TypeVar("_E", bound=PycommError)

NEW_GROUP = "the group is broken, make a new one of the ranks that live"
NO_STATUS = -1  # nobody can say how a process ended


class Place(NamedTuple):
    """Where an error happened: the call ``seq`` of a group, on one of its ranks, whose rank r is ``global_ranks[r]`` of
    the job; none: r.
    """

    verb: str
    seq: int
    group: str
    rank: int
    world_size: int
    global_ranks: Sequence[int] = ()

    def __str__(self) -> str:
        is_message = " " in self.verb  # "receiving 4 bytes from rank 1": its number is that of the collective before it
        call = f"{self.verb}, after #{self.seq}," if is_message else f"{self.verb} #{self.seq}"
        return f"{call} on group {self.group!r}, {as_member(self.rank, self.world_size, globally(self, self.rank))}"


class Failure(NamedTuple):
    """What broke a group, as its ranks tell one another.

    ``kind`` is "lost", "closed", "interrupted" or "timeout"; ``status`` is how the process of ``rank`` ended, as
    ``os.waitpid`` encodes it. ``call`` is the collective in which, or after which, it was first found: those before it
    succeeded.
    """

    kind: str
    rank: int
    pid: int = 0
    status: int = NO_STATUS
    call: int = 0


# What observers know of why a call waited in vain: each is given the place and the kind of the failure, "mere timeout"
# where it broke nothing, and returns text that goes behind the error's own, or "".
explainers: list[Callable[[Place | str, str], str]] = []


def _explained(place: Place | str, kind: str) -> str:
    return "".join(explain(place, kind) for explain in explainers)


def globally(place: Place | str, rank: int) -> int:
    """Returns the rank in the job of ``rank`` there, which is -1 if nobody knows it; without a group it is the same."""
    return place.global_ranks[rank] if isinstance(place, Place) and place.global_ranks and rank >= 0 else rank


def as_member(rank: int, world_size: int, global_rank: int) -> str:
    """Returns ``rank 1 of 2 (global rank 3)``, of a group's; without the last where it is the same number."""
    return f"rank {rank} of {world_size}" + (f" (global rank {global_rank})" if global_rank != rank else "")


def called(place: Place | str, rank: int, *known: str) -> str:
    """Returns ``rank 1 (pid 42, global rank 3)``, where ``known`` is the pid; the last where it is another number."""
    if globally(place, rank) != rank:
        known = *known, f"global rank {globally(place, rank)}"
    return f"rank {rank} ({', '.join(known)})" if known else f"rank {rank}"


def fate(status: int) -> str:
    """Returns what became of a process, from its status as ``os.waitpid`` encodes it; -1 if nobody knows."""
    if status < 0:
        return "its process has ended"
    number = status & 0x7F
    if number == 0:
        return f"exited with status {status >> 8 & 0xFF}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def describe_call(verb: str, op: int, dtype: int, numel: int, root: int, algorithm: str = "") -> str:
    """Returns ``all_reduce(SUM, float32, 1024 elements)``; ``op`` and ``dtype`` are codes."""
    parts = []
    if verb in _REDUCES:
        parts.append(ReduceOp(op).name)
    if verb not in ("barrier", "new_group"):
        parts.append(dtype_of_code(dtype).name)
        if verb != "all_to_all_single":  # its splits are compared on their own
            parts.append(f"{numel} elements")
    if verb in _HAS_ROOT:
        parts.append(f"root {root}")
    if algorithm:
        parts.append(f"algorithm {algorithm}")
    return f"{verb}({', '.join(parts)})"


def failed(place: Place | str, failure: Failure) -> TransportError:
    """Returns the error of a call on a group that ``failure`` broke."""
    who = called(place, failure.rank, f"pid {failure.pid}" if failure.pid else "pid unknown")
    if failure.rank < 0:
        text = f"lost a rank on another host (its connection is gone, its pid is unknown); {NEW_GROUP}"
    elif failure.kind == "lost":
        text = f"lost {who}: {fate(failure.status)}; {NEW_GROUP}{_explained(place, failure.kind)}"
    elif failure.kind == "closed":
        text = f"{who} has closed the group; every rank must make the same calls before it closes"
    elif failure.kind == "interrupted":
        text = (
            f"{who} was interrupted (Ctrl-C, a signal handler that raised, or no memory) in the middle of a call, so "
            f"the ranks are out of step; the group is broken, make a new one"
        )
    else:
        text = f"{who} ran out of time in this group; the group is broken, make a new one"
        text += _explained(place, failure.kind)
    message = f"{place}: {text}"
    is_late = failure.kind == "timeout"
    lost = failure.rank, globally(place, failure.rank)
    error: TransportError = CollectiveTimeoutError(message) if is_late else PeerLostError(message, *lost)
    error._failed = (place, failure)  # type: ignore[attr-defined]  # see ``why``
    return _located(error)


def why(error: TransportError) -> tuple[str, Failure | None]:
    """Returns what ``failed`` made ``error`` of: what failed, and what broke its group; None if it was not made so."""
    place, failure = getattr(error, "_failed", (None, None))
    return place.verb if isinstance(place, Place) else "a call", failure


def mark_elsewhere(error: TransportError) -> None:
    """Marks that ``error`` says what broke another group than the one in which it is raised."""
    error._is_elsewhere = True  # type: ignore[attr-defined]


def is_elsewhere(error: TransportError) -> bool:
    """Says whether ``error`` is marked so."""
    return getattr(error, "_is_elsewhere", False)


class Remembered(NamedTuple):
    """What broke a group, in the words of the call that found it; not the error itself, which keeps its frames alive.

    ``lost`` are the ranks of a PeerLostError, in the group and in the job; None if it was another error.
    """

    text: str
    lost: tuple[int, int] | None

    @classmethod
    def of(cls, error: BaseException) -> Remembered:
        """Returns what is to be remembered of ``error``."""
        return cls(str(error), (error.rank, error.global_rank) if isinstance(error, PeerLostError) else None)

    def again(self) -> TransportError:
        """Returns the error of a later call on the group."""
        message = f"an earlier call failed, so the group is broken, make a new one; it said: {self.text}"
        return TransportError(message) if self.lost is None else PeerLostError(message, *self.lost)


def timed_out(place: Place | str, limit_s: float, awaited: str = "", is_broken: bool = True) -> CollectiveTimeoutError:
    """Returns the error of a call that had ``limit_s``; ``awaited`` says whom it waited for, if that is known."""
    whom = f", waiting for {awaited}, which is alive but has not arrived" if awaited else ""
    after = "; then make a new group, this one is broken" if is_broken else ""
    said = _explained(place, "timeout" if is_broken else "mere timeout")
    error = CollectiveTimeoutError(
        f"{place}: did not finish within {limit_s:.3g} s{whom}; see whether every rank makes the same calls, or "
        f"pass a longer timeout (seconds){after}{said}"
    )
    error._awaited = awaited  # type: ignore[attr-defined]  # for the call that this one is a part of
    return _located(error)


def whom_awaited(error: CollectiveTimeoutError) -> str:
    """Returns whom the call waited for whose time was over, "" if that is not known."""
    awaited: str = getattr(error, "_awaited", "")
    return awaited


def mismatch(place: Place | str, rows: Sequence[str], ranks: Sequence[int] = ()) -> CollectiveMismatchError:
    """Returns the error of ranks that called different things: ``rows[r]`` is what rank r called, or ``ranks[r]``."""
    members = ranks or range(len(rows))
    listed = "".join(f"\n  {called(place, rank)}: {row}" for rank, row in zip(members, rows, strict=True))
    return _located(
        CollectiveMismatchError(
            f"{place}: the ranks called different collectives:{listed}\nNo buffer was written. Make the ranks call the "
            f"same collectives with the same arguments, in the same order."
        )
    )


def splits_differ(place: Place | str, source: int, target: int, sent: int, expected: int) -> CollectiveMismatchError:
    """Returns the error of an all-to-all whose splits do not fit together."""
    return _located(
        CollectiveMismatchError(
            f"{place}: {called(place, source)} sends {sent} elements to {called(place, target)}, and rank {target} "
            f"expects {expected} from rank {source}\nNo buffer was written. Entry j of rank i's input splits must be "
            f"entry i of rank j's output splits."
        )
    )


def wrong_size(place: Place | str, source: int, tag: int, expected: int, got: int) -> CollectiveMismatchError:
    """Returns the error of a receive whose message has another byte count."""
    return _located(
        CollectiveMismatchError(
            f"{place}: the message from {called(place, source)} with tag {tag} has another size: expected {expected} "
            f"bytes, got {got}; no buffer was written. Make both ranks pass tensors of the same size and dtype."
        )
    )


def used_closed(place: Place | str) -> TransportError:
    """Returns the error of a call on a group that this very rank has closed."""
    return _located(TransportError(f"{place}: this rank has closed the group; make a new one"))


def other_thread(place: Place | str) -> TransportError:
    """Returns the error of two threads in one group."""
    return _located(
        TransportError(
            f"{place}: another thread is inside a collective of this group; use one thread a group at a time"
        )
    )


def forked(place: Place | str) -> TransportError:
    """Returns the error of a call in a process that was forked from a rank."""
    return _located(
        TransportError(
            f"{place}: this process was forked from a rank and is not one; call pycomm.init in it, or use the group in "
            f"the parent"
        )
    )


def from_native(
    kind: str,
    where: tuple[str, int, str, int, int, Sequence[int]],
    numbers: Sequence[int],
    calls: Sequence[tuple[int, int]],
    ranks: Sequence[int] = (),
) -> PycommError:
    """Returns the error for what csrc/shm threw; called by csrc/bindings/shm_errors.cpp.

    ``where`` is a Place; ``numbers`` and ``calls`` (a header's word and numel, one a rank) depend on ``kind``. With
    ``ranks`` the group is a part of the one in ``where``: its rank r is ``ranks[r]`` there.
    """
    place = Place(*where)
    named = dict(enumerate(ranks))
    if kind in ("lost", "closed", "interrupted", "timeout"):
        rank, pid, status = numbers
        return failed(place, Failure(kind, named.get(rank, rank), pid, status))
    if kind in ("late", "late message"):
        rank, pid, limit_ns = numbers
        awaited = called(place, named.get(rank, rank), f"pid {pid}") if rank >= 0 else ""
        return timed_out(place, limit_ns / 1e9, awaited, is_broken=kind == "late")
    if kind == "calls":
        return mismatch(place, [_describe_word(word, numel) for word, numel in calls], ranks)
    if kind == "splits":
        source, target, sent, expected = numbers
        return splits_differ(place, named.get(source, source), named.get(target, target), sent, expected)
    if kind == "size":
        source, tag, expected, got = numbers
        return wrong_size(place, named.get(source, source), tag, expected, got)
    if kind == "no memory":
        source, tag, nbytes = numbers
        text = (
            f"{called(place, named.get(source, source))} sends {nbytes % 2**64} bytes (tag {tag}) that nobody here has "
            f"asked for"
        )
        after = "there is no memory to keep them; the group is broken, make a new one"
        return _located(TransportError(f"{place}: {text}, and {after}"))
    return {"closed by this rank": used_closed, "other thread": other_thread, "forked": forked}[kind](place)


def _describe_word(word: int, numel: int) -> str:
    """Describes a header's ``call`` word; see encode() in csrc/shm/group.cpp."""
    verb, op, dtype, is_plan, root = word & 0xFF, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 24 & 0xFF, word >> 32
    if verb >= len(CALLS):
        return "(unreadable)"
    if is_plan:  # what it is about comes in the frame that follows
        return f"{CALLS[verb]}(...), {'' if CALLS[verb] == 'new_group' else 'by another algorithm'}".rstrip(", ")
    return describe_call(CALLS[verb], op, dtype, numel, root)


def _located(error: _E) -> _E:
    """Marks that ``error`` says where it happened, so that nobody says it again."""
    error._is_located = True  # type: ignore[attr-defined]
    return error
