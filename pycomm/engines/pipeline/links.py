"""Messages between the ranks of a pipeline: activations forward, their gradients back.

Every message has a tag of its own, made of direction, stage and microbatch, so rows of two ranks need not have their
messages in the same order. Shape and dtype of what a stage sends are told once a step, before its first message.
"""

from __future__ import annotations

import torch

import pycomm

from ...errors import ConfigError
from .actions import Action, Kind, Schedule

__all__ = ["Links"]

_MAX_DIMS = 8
_FAILED = -1  # in the place of a dtype
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


class Links:
    """The messages of one rank, on ``group``, by the placement of ``schedule``."""

    def __init__(self, group: pycomm.Group, schedule: Schedule, device: torch.device) -> None:
        self._group, self._schedule, self._device = group, schedule, device
        # Of the output of each stage, once known; None if the stage failed before it had one.
        self._shapes: dict[int, tuple[tuple[int, ...], torch.dtype] | None] = {}
        self._told: set[int] = set()
        self._sent: list[tuple[pycomm.Work, torch.Tensor]] = []

    def begin(self) -> None:
        """Called before a step: the one before may have had other shapes, or been interrupted."""
        self._shapes.clear()
        self._told.clear()

    def check(self, tensor: torch.Tensor) -> None:
        """Raises ConfigError for what cannot be sent."""
        _describe(tensor)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Starts to send what ``action``, a SEND_F or SEND_B, names; does not wait."""
        forward = action.kind is Kind.SEND_F
        peer = self._schedule.placement[action.stage + (1 if forward else -1)]
        if forward and action.stage not in self._told:
            self._told.add(action.stage)
            self._shapes[action.stage] = (tuple(tensor.shape), tensor.dtype)
            self._start(_describe(tensor).to(self._device), peer, self._header_tag(action.stage))
        self._start(tensor.contiguous(), peer, self._tag(action))

    def send_nothing(self, action: Action) -> None:
        """Sends zeros in the place of what a rank that has failed does not have; or, once, that it has no shape."""
        forward = action.kind is Kind.SEND_F
        source = action.stage if forward else action.stage - 1
        if forward and source not in self._told:
            self._told.add(source)
            self._shapes[source] = None
            peer = self._schedule.placement[source + 1]
            self._start(
                torch.full((2 + _MAX_DIMS,), _FAILED, dtype=torch.int64, device=self._device),
                peer,
                self._header_tag(source),
            )
        known = self._shapes[source]
        if known is not None:
            self.send(action, torch.zeros(known[0], dtype=known[1], device=self._device))

    def receive(self, action: Action) -> torch.Tensor | None:
        """Waits for what ``action``, a RECV_F or RECV_B, names and returns it; None if its sender has failed."""
        forward = action.kind is Kind.RECV_F
        peer = self._schedule.placement[action.stage + (-1 if forward else 1)]
        source = action.stage - 1 if forward else action.stage  # whose output this is, or is the gradient of
        if source not in self._shapes:
            header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=self._device)
            pycomm.recv(header, group=self._group, tag=self._header_tag(source), group_src=peer)
            code, dims, *lengths = header.tolist()
            self._shapes[source] = None if code == _FAILED else (tuple(lengths[:dims]), _DTYPES[code])
        known = self._shapes[source]
        if known is None:
            return None
        shape, dtype = known
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        pycomm.recv(tensor, group=self._group, tag=self._tag(action), group_src=peer)
        return tensor

    def advance(self) -> None:
        """Moves messages on that are under way, and lets go of those that have arrived. Never blocks."""
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()

    def _start(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self._sent.append((pycomm.isend(tensor, group=self._group, tag=tag, group_dst=peer), tensor))

    def _header_tag(self, stage: int) -> int:
        return 1 + 2 * self._schedule.stages * self._schedule.microbatches + stage

    def _tag(self, action: Action) -> int:
        """Returns the message's number: the receiver's and the sender's action have the same."""
        stage = action.stage + (1 if action.kind is Kind.SEND_F else -1 if action.kind is Kind.SEND_B else 0)
        is_backward = action.kind in (Kind.SEND_B, Kind.RECV_B)
        return 1 + (stage * self._schedule.microbatches + action.microbatch) * 2 + is_backward


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    """Returns dtype, number of dimensions and shape as ``(2 + _MAX_DIMS,)`` int64. Raises ConfigError."""
    if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
        raise ConfigError(
            f"Pipeline: a stage gave a tensor of {tensor.dtype} with {tensor.dim()} dimensions to the next; expected "
            f"one of {', '.join(str(dtype) for dtype in _DTYPES)} with at most {_MAX_DIMS}"
        )
    shape = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *shape], dtype=torch.int64, device="cpu")
