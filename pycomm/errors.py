"""Every error that pycomm raises on purpose.

A message has four parts: what went wrong; where (rank, group, verb, sequence number); what was expected and what was
got; what to do about it. Mistakes of the caller raise before a byte moves.
"""

from __future__ import annotations

import traceback

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigError",
    "NativeUnavailableError",
    "PeerLostError",
    "PlanError",
    "PycommError",
    "TransportError",
    "forget_locals",
]


class PycommError(Exception):
    """Base of all errors raised by pycomm."""


class ConfigError(PycommError, ValueError):
    """An argument, option or environment variable cannot be used as given."""


class NativeUnavailableError(PycommError, RuntimeError):
    """A native library (ours, MPI, NCCL, CUDA) that the call needs is not there; the message has the command that
    adds it.
    """


class PlanError(PycommError):
    """An algorithm's plan is wrong or does not suit the world size."""


class CollectiveMismatchError(PycommError, RuntimeError):
    """The ranks of a group called different collectives, or the same one with different arguments."""


class TransportError(PycommError, RuntimeError):
    """Data could not be moved. A RuntimeError as torch's are, so around calls of torch's own it is told apart first."""


class PeerLostError(TransportError):
    """A rank died, left, or its connection broke.

    ``rank`` is its rank in the group that the message names, -1 if nobody knows it; ``global_rank`` is its rank in the
    job, as in ``Group.ranks``.
    """

    def __init__(self, message: str, rank: int = -1, global_rank: int | None = None) -> None:
        """``global_rank`` is by default ``rank``."""
        super().__init__(message)
        self.rank = rank
        self.global_rank = rank if global_rank is None else global_rank


class CollectiveTimeoutError(TransportError):
    """A call did not finish within its timeout."""


class CheckpointError(PycommError):
    """A checkpoint is missing, damaged or does not fit."""


def forget_locals(error: BaseException) -> None:
    """Clears the local variables of the calls that ``error`` ended, and of those of its causes.

    For errors that leave the library: who keeps one, as a shell does, or a thread that dies of it, would keep the
    tensors, handles and process groups of all these calls, and would be the one to destroy them. What a closure holds
    is out of reach here (the frame keeps its function), so where there are such things none is called.
    """
    cause: BaseException | None = error
    cleared: list[BaseException] = []
    while cause is not None and cause not in cleared:
        traceback.clear_frames(cause.__traceback__)  # not of calls that still run
        cleared.append(cause)
        cause = cause.__cause__ or cause.__context__
