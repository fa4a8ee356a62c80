"""After a step, or in the middle of it: a rank that raised lets all others know, and all raise.

[Note: a step that raises]
What a layer or the loss raises on one rank would leave the others waiting for its messages. So that rank goes on
through its row: it computes nothing, takes the messages that come, and sends zeros where others expect something
(``links.py``). At the end all ranks tell each other whether one raised. No message is left over, and a later step finds
a clean group.

Where layers are engines, ranks beside this one may be in a call that it will not make. So it makes one at once that
does not fit theirs, which then raises there; it does not wait for it, as others wait for its messages. A rank whose
call did not fit makes the same one, as does each that has come to its end: at last, repeated there, it fits. Engines
that overlap make calls on streams too, where the same holds: but there only once a rank has raised, which all know by
then, as in a good step it would only cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

import pycomm

from ...errors import CollectiveMismatchError, PycommError
from .._inside import Averaging, groups_of

__all__ = ["Outcome"]

_FINE, _CUT_OFF, _RAISED = range(3)  # cut off: another rank raised
_Call = tuple[pycomm.Work | None, torch.Tensor]  # and what it tells, once it is complete
_Place: TypeAlias = "pycomm.Group | pycomm.CommStream"  # where calls are made, each in their order


class Outcome:
    """Whether the run of a row of this rank has failed so far; ``error`` is its own, None if that of another rank."""

    def __init__(self, group: pycomm.Group, beside: pycomm.Group | None, engines: Sequence[Averaging]) -> None:
        """``group`` is the pipeline's, ``beside`` that of the other batches; ``engines`` are those in it."""
        self._group, self._beside = group, beside
        wires = [wire for engine in engines for wire in engine.wires]
        self._groups: list[_Place] = [*groups_of(engines)]
        self._streams: list[_Place] = [wire.stream for wire in wires if wire.stream is not None]
        self._calls: dict[_Place, _Call] = {}  # under way, in which engines' ranks are told
        self._worst = _FINE  # that this rank has heard of
        self.has_failed = False
        self.error: Exception | None = None

    def fail(self, error: Exception | None = None) -> None:
        """Called where this rank cannot go on."""
        if not self.has_failed:
            self.has_failed, self.error = True, error
            self._worst = _CUT_OFF if error is None or isinstance(error, CollectiveMismatchError) else _RAISED
            self._calls = {place: self._start(place) for place in (*self._groups, *self._streams)}

    def agree(self) -> None:
        """Called at the end of the row: returns if no rank has failed, else raises.

        A rank's own error, or PycommError with those of the others.
        """
        for group in self._groups:
            self._tell(group)
        if self._beside is not None:
            self._tell(self._beside)
        self._tell(self._group)
        if self._worst == _FINE:
            return
        for stream in self._streams:
            self._tell(stream)
        cause = self.error
        if self._worst == _RAISED and isinstance(self.error, CollectiveMismatchError):
            self.error = None  # a rank with another batch said so that it had raised
        everyone: list[Any] = [None] * self._group.world_size
        mine = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        pycomm.all_gather_object(everyone, mine, self._group)
        if self.error is not None:
            raise self.error
        said = "; ".join(f"rank {rank} raised {each}" for rank, each in enumerate(everyone) if each)
        raise PycommError(
            f"Pipeline.step, rank {self._group.rank} of group {self._group.name!r}: "
            f"{said or 'ranks with other batches raised; see their errors'}. Gradients are those of a part of the "
            f"batch: zero them; the next step can be made"
        ) from cause

    def _tell(self, place: _Place) -> None:
        """Tells the ranks there, as often as their calls are others."""
        while True:
            with suppress(CollectiveMismatchError):  # that was a call of an engine on another rank, which raises there
                under_way = self._calls.pop(place, None)
                work, told = under_way or self._start(place, is_async=False)
                if work is not None:
                    work.wait()
                self._worst = max(self._worst, int(told.item()))
                return

    def _start(self, place: _Place, is_async: bool = True) -> _Call:
        told = torch.tensor([self._worst], dtype=torch.int64, device=self._group.control_device)
        tell = partial(pycomm.all_reduce, told, pycomm.ReduceOp.MAX)
        return place.submit(tell, hold=told) if isinstance(place, pycomm.CommStream) else tell(place, is_async), told
